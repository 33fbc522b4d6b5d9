"""Index vectors, loads and stores of a tile in registers, for lowered epilogues in Gluon.

A tile is [rows, columns] in any distributed layout; a row value is a vector in the layout's slice along columns, a
column value in its slice along rows. Indices from m_end or num_columns on are masked: loads give 0, nothing is stored.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from envoi.epilogues import device
from envoi.runtime import math
from envoi.runtime.triton_compat import role_barrier, tma_load, tma_store

next_power_of_2 = gluon.constexpr_function(math.next_power_of_2)


def _gluon(function):
    return gluon.jit(function.fn)


minimum, maximum = _gluon(device.minimum), _gluon(device.maximum)
divide, e4m3, group_amax = _gluon(device.divide), _gluon(device.e4m3), _gluon(device.group_amax)
mxfp8_factors, near_e4m3 = _gluon(device.mxfp8_factors), _gluon(device.near_e4m3)


@gluon.jit
def row_ids(x, m):
    """Return m, m + 1, .. for the rows of x."""
    return m + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))


@gluon.jit
def col_ids(x, n):
    """Return n, n + 1, .. for the columns of x."""
    return n + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))


@gluon.jit
def rows_like(r, x):
    """Convert a row value to the layout of x."""
    return gl.convert_layout(r, gl.SliceLayout(1, x.type.layout))


@gluon.jit
def columns_in(x):
    """Split [rows, C] into even and odd columns, two of [rows, C / 2]."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.split(gl.reshape(x, (rows, columns // 2, 2)))


@gluon.jit
def even(x):
    """Return columns 0, 2, 4 .."""
    return columns_in(x)[0]


@gluon.jit
def odd(x):
    """Return columns 1, 3, 5 .."""
    return columns_in(x)[1]


@gluon.jit
def halves(x):
    """Split [rows, C] into the left and the right half."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (rows, 2, columns // 2)), (0, 2, 1)))


@gluon.jit
def ids_like(like, start):
    """Return start, start + 1, .. in the layout of the vector `like`."""
    return start + gl.arange(0, like.shape[0], layout=like.type.layout)


@gluon.jit
def load_at(pointer, ids, limit):
    """Load float32 values for the ids below the limit, 0 for the others."""
    return gl.load(pointer + ids, mask=ids < limit, other=0.0).to(gl.float32)


@gluon.jit
def spread_ids(n, COUNT: gl.constexpr):
    """Return n, n + 1, .., COUNT of them rounded up to a power of two, spread over the role's threads."""
    return n + gl.arange(0, next_power_of_2(COUNT), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def load_column(pointer, ids, num_columns):
    """Load values of a column operand, 0 from num_columns on. Nothing waits for them here, as a conversion would."""
    return gl.load(pointer + ids, mask=ids < num_columns, other=0.0)


@gluon.jit
def column_buffer(COUNT: gl.constexpr):
    """Allocate the buffer of the values of a column operand at `spread_ids`."""
    return gl.allocate_shared_memory(gl.float32, [next_power_of_2(COUNT)], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def keep_column(values, buffer):
    """Keep the values that `load_column` loaded in their buffer."""
    buffer.store(values.to(gl.float32))


@gluon.jit
def take_column(pointer, buffers, x, ids, num_columns, INDEX: gl.constexpr, cfg: gl.constexpr):
    """Return the values of a column operand for x, whose columns are the operand's `ids`.

    They come from the operand's buffer, its INDEX-th, if `cfg.columns_ahead`: so no chunk waits for the L2.
    """
    if cfg.columns_ahead:
        layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        width: gl.constexpr = x.shape[1]
        return buffers.columns[INDEX].slice(buffers.turn * width, width).load(layout)
    else:
        return load_at(pointer, ids, num_columns)


@gluon.jit
def load_one(pointer):
    """Load the float32 value of a tensor of one element."""
    return gl.load(pointer).to(gl.float32)


@gluon.jit
def load_tile(pointer, x, m, n, m_end, num_columns):
    """Load a float32 value for each element of x from a row-major tensor with num_columns columns."""
    rows, columns = row_ids(x, m), col_ids(x, n)
    at = rows[:, None].to(gl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    return gl.load(pointer + at, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def store_row(pointer, value, m, m_end, stride, offset):
    """Store one value a row, `stride` elements apart."""
    ids = ids_like(value, m)
    gl.store(pointer + ids.to(gl.int64) * stride + offset, value, mask=ids < m_end)


@gluon.jit
def store_tile(pointer, value, m, n, m_end, num_columns, cfg: gl.constexpr):
    """Store from registers to a row-major tensor with num_columns columns."""
    if cfg.epilogue_in_place and value.dtype.primitive_bitwidth < 32:
        value = gl.convert_layout(value, neighbours_first(value.type.layout))
    rows, columns = row_ids(value, m), col_ids(value, n)
    at = rows[:, None].to(gl.int64) * num_columns + columns[None, :]
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    gl.store(pointer + at, value, mask=mask)


@gluon.jit
def scatter_tile(addresses, value, m, n, m_end, num_columns, cfg: gl.constexpr):
    """Scatter rows to their addresses, each warp in contiguous runs, which links carry best.

    addresses: a pointer to those of all rows, or `load_addresses` of the tile's, in whose layout rows are.
    """
    if not cfg.swap_ab or cfg.epilogue_in_place:  # else its layout has contiguous runs already
        value = gl.convert_layout(value, runs_of(value.shape[1], value.dtype.primitive_bitwidth, gl.num_warps()))
    rows, columns = row_ids(value, m), col_ids(value, n)
    if addresses.dtype.is_ptr():
        loaded = gl.load(addresses + rows, mask=rows < m_end, other=0)
    else:
        loaded = gl.convert_layout(addresses, rows.type.layout, assert_trivial=True)
    mask = (rows < m_end)[:, None] & (columns < num_columns)[None, :]
    to = gl.multiple_of(loaded.to(gl.pointer_type(value.dtype)), 16)
    gl.store(to[:, None] + columns[None, :], value, mask=mask)


@gluon.jit
def scatter_factors(addresses, factors, m, n, m_end, num_columns, COLUMNS: gl.constexpr):
    """Store the float32 factors [rows, groups] of a chunk of COLUMNS values behind the num_columns bytes of their rows.

    addresses: as of `scatter_tile`. n: the chunk's first group. num_columns: a multiple of the group.
    """
    factors = gl.convert_layout(factors, factors_of(COLUMNS, gl.num_warps()))
    rows, groups = row_ids(factors, m), col_ids(factors, n)
    if addresses.dtype.is_ptr():
        loaded = gl.load(addresses + rows, mask=rows < m_end, other=0)
    else:
        loaded = gl.convert_layout(addresses, rows.type.layout, assert_trivial=True)
    to = (loaded + num_columns).to(gl.pointer_type(gl.float32))
    group: gl.constexpr = COLUMNS // factors.shape[1]
    mask = (rows < m_end)[:, None] & (groups * group < num_columns)[None, :]
    gl.store(to[:, None] + groups[None, :], factors, mask=mask)


@gluon.jit
def load_addresses(pointer, m, m_end, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BITS: gl.constexpr):
    """Start loading the addresses of rows m .. m + ROWS - 1 for `scatter_tile` of chunks of COLUMNS values of BITS."""
    rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, runs_of(COLUMNS, BITS, gl.num_warps())))
    return gl.load(pointer + rows, mask=rows < m_end, other=0)


@gluon.constexpr_function
def runs_of(columns, bits, num_warps):
    """Return a layout in which a thread has 16 bytes of a row and a warp a contiguous run as long as possible."""
    each = 128 // bits
    lanes = min(32, columns // each)
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def e4m3_of_group(x):
    """Round float32 that its group's factor has brought within 448, but for rounding, to E4M3: the cast saturates."""
    return x.to(gl.float8e4nv)


@gluon.constexpr_function
def factors_of(columns, num_warps):
    """Return a layout of groups in which a thread has the rows that it has of `columns` values in `runs_of`."""
    lanes = min(32, columns // 16)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def stage_for_pairs(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate the buffer in which the outputs of a pair's first tile wait for the second's, bf16 [ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], layout)


@gluon.jit
def quantize_pair(x, stage, values, sf, m, n, m_end, num_columns):
    """Quantise a pair of neighbouring tiles to E4M3, a float32 scale for both tiles' columns of a row.

    x: of one tile, float32 [rows, columns] rounded to bf16, first row m, first column n. The first tile of a pair
    (n // columns even) waits in `stage`; the second stores both, and the scales. values, sf: pointers to the values,
    [.., num_columns], and to the scales. Bit for bit what `envoi.ops.moe.kernels.quantize_kernel` makes of bf16 rows.
    Rows from m_end on aren't stored. num_columns: a multiple of 16.
    """
    columns: gl.constexpr = x.shape[1]
    tile = n // columns
    if tile % 2 == 0:
        stage.store(x.to(gl.bfloat16))
    else:
        # A thread has 16 columns of a row, stored by one instruction.
        lanes: gl.constexpr = min(32, columns // 16)
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
        left = stage.load(layout)
        stage.store(x.to(gl.bfloat16))
        left, right = left.to(gl.float32), stage.load(layout).to(gl.float32)
        amax = group_amax(maximum(max_columns(gl.abs(left)), max_columns(gl.abs(right))))
        store_row(sf, divide(amax, 448.0), m, m_end, num_columns // (2 * columns), tile // 2)
        factor = divide(448.0, amax)[:, None]
        store_runs(values, e4m3(left * factor), m, n - columns, m_end, num_columns)
        store_runs(values, e4m3(right * factor), m, n, m_end, num_columns)


@gluon.jit
def store_runs(pointer, value, m, n, m_end, num_columns):
    """Store whole chunks of rows, of which every thread has multiples of 16 bytes, to a row-major tensor."""
    rows, columns = row_ids(value, m), col_ids(value, gl.multiple_of(n, 16))
    starts = pointer + gl.multiple_of(rows.to(gl.int64) * num_columns, 16)
    gl.store(starts[:, None] + columns[None, :], value, mask=(rows < m_end)[:, None])


@gluon.jit
def stage_for(desc, TURNS: gl.constexpr, cfg: gl.constexpr):
    """Allocate a ring of TURNS buffers, a chunk each, through which a role stores to a descriptor or loads from it."""
    shape: gl.constexpr = ring_shape(desc.block_type.shape, TURNS, cfg)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.constexpr_function
def ring_shape(box, turns, cfg):
    """Return the shape of a ring of chunks for boxes of this shape, of which a chunk `stored_in_boxes` has several."""
    return [turns, cfg.epilogue_columns if cfg.stored_in_boxes else box[0], box[1]]


@gluon.jit
def put_tiles(values, descs, stages, coords, m, turn, cfg: gl.constexpr):
    """Start TMA stores of chunks through their ring of buffers, without waiting for them to complete."""
    TURNS: gl.constexpr = cfg.num_store_buffers
    tma.store_wait(pendings=(TURNS - 1) * len(values))  # at most the chunk's before, which may have more boxes
    role_barrier()  # the earlier stores have read these buffers
    for i in gl.static_range(len(values)):
        stages[i].index(turn % TURNS).store(values[i])
    fence_async_shared()
    role_barrier()  # all warps have written
    for i in gl.static_range(len(values)):
        if cfg.stored_in_boxes:
            put_boxes(descs[i], stages[i].index(turn % TURNS), m, coords[i], turn, cfg)
        else:
            tma_store(descs[i], [m, coords[i]], stages[i].index(turn % TURNS))


@gluon.jit
def put_boxes(desc, chunk, m, n, TURN: gl.constexpr, cfg: gl.constexpr):
    """Start TMA stores of chunk TURN, box by box, to (m, n)."""
    box: gl.constexpr = desc.block_type.shape[0]
    for j in gl.static_range(boxes_of_chunk(TURN, box, cfg)):
        tma_store(desc, [m + j * box, n], chunk.slice(j * box, box))


@gluon.constexpr_function
def boxes_of_chunk(turn, box, cfg):
    """Return the boxes of `box` tokens in a chunk of tokens: the last has those that are left of the tile."""
    return min(cfg.epilogue_columns, cfg.block_y - turn * cfg.epilogue_columns) // box


@gluon.jit
def operand_buffers_for(descs, cfg: gl.constexpr):
    """Allocate a role's buffers, a chunk for each tile operand loaded by TMA, and their barriers [operands, 1]."""
    arrived = gl.allocate_shared_memory(gl.int64, [len(descs), 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(len(descs)):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    role_barrier()
    if len(descs) == 1:
        return (stage_for(descs[0], 1, cfg),), arrived
    else:
        return (stage_for(descs[0], 1, cfg), stage_for(descs[1], 1, cfg)), arrived


@gluon.jit
def fetch(desc, buffer, arrived, m, n, TURN: gl.constexpr, cfg: gl.constexpr):
    """Start loading a tile operand's chunk TURN, at (m, n), once all warps have read the one before."""
    role_barrier()
    if cfg.stored_in_boxes:
        box: gl.constexpr = desc.block_type.shape[0]
        count: gl.constexpr = boxes_of_chunk(TURN, box, cfg)
        mbarrier.expect(arrived, count * desc.block_type.nbytes)
        for j in gl.static_range(count):
            tma_load(desc, [m + j * box, n], arrived, buffer.index(0).slice(j * box, box))
    else:
        mbarrier.expect(arrived, desc.block_type.nbytes)
        tma_load(desc, [m, n], arrived, buffer.index(0))


@gluon.jit
def take_tile(operands, desc, x, m, n, INDEX: gl.constexpr, turn, cfg: gl.constexpr):
    """Return a chunk of a tile operand from its buffer; start loading the next. More buffers would cost stages.

    operands: buffers and barriers of the operands loaded by TMA, and the number of tiles finished before. INDEX: which
    operand. turn: which chunk.
    """
    buffers, arrived, before = operands
    mbarrier.wait(arrived.index(INDEX), (before * cfg.num_chunks + turn) & 1)
    value = buffers[INDEX].index(0).load(x.type.layout).to(gl.float32)
    if turn + 1 < cfg.num_chunks:
        if cfg.stored_in_boxes:
            fetch(desc, buffers[INDEX], arrived.index(INDEX), m + cfg.epilogue_columns, n, turn + 1, cfg)
        else:
            fetch(desc, buffers[INDEX], arrived.index(INDEX), m, n + desc.block_type.shape[1], turn + 1, cfg)
    return value


@gluon.jit
def sum_columns(x):
    """Return the sum of each row."""
    return gl.sum(x, axis=1)


@gluon.jit
def max_columns(x):
    """Return the largest of each row; NaN if the row has one."""
    return gl.reduce(x, 1, maximum)


@gluon.constexpr_function
def slots_layout(rows, num_warps):
    """Return the layout in which `max_of_slots` loads [rows, slots]: a row's values are all in one warp."""
    lanes = min(4, max(1, rows // num_warps))  # along the rows; at least eight read neighbouring slots
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def slots_at_once(rows, num_warps):
    """Return how many slots `max_of_slots` loads before it needs one: 128, but at most 32 values a thread.

    Half as many for 64 rows: with factors along K the compiler would spill.
    """
    return min(128, (512 if rows == 64 else 1024) * num_warps // rows)


@gluon.jit
def max_of_slots(partials, like, num_slots, m, m_end, FILL: gl.constexpr):
    """Return the largest of each row's partial values, a row value like `like`; NaN if one is.

    partials: float32 pointer to [M, num_slots]. m: the first row; rows from m_end on get FILL. All threads of the role
    share the loads, so that few round trips are enough.
    """
    rows: gl.constexpr = like.shape[0]
    warps: gl.constexpr = gl.num_warps()
    count: gl.constexpr = slots_at_once(rows, warps)
    layout: gl.constexpr = slots_layout(rows, warps)
    row = m + gl.arange(0, rows, gl.SliceLayout(1, layout))
    slot = gl.arange(0, count, gl.SliceLayout(0, layout))
    starts = partials + row.to(gl.int64) * num_slots
    best = gl.full((rows,), FILL, gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, num_slots, count):
        mask = (row < m_end)[:, None] & (first + slot < num_slots)[None, :]
        found = gl.load(starts[:, None] + (first + slot)[None, :], mask=mask, other=FILL)
        best = maximum(best, max_columns(found))
    return gl.convert_layout(best, like.type.layout)


@gluon.jit
def group_max(x, GROUP: gl.constexpr):
    """Return the largest of each GROUP columns of x [rows, C], as [rows, C / GROUP]."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.reduce(gl.reshape(x, (rows, columns // GROUP, GROUP)), 2, maximum)


@gluon.jit
def times_group(x, factors, GROUP: gl.constexpr):
    """Multiply each GROUP columns of x by their factor; factors: [rows, C / GROUP]."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    cut = gl.reshape(x, (rows, columns // GROUP, GROUP))
    factors = gl.convert_layout(factors, gl.SliceLayout(2, cut.type.layout))
    return gl.convert_layout(gl.reshape(cut * gl.expand_dims(factors, 2), (rows, columns)), x.type.layout)


@gluon.jit
def round_mxfp8(x):
    """Round x [rows, C] to numbers of MXFP8, in groups of 32 columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    groups = gl.reshape(x, (rows, columns // 32, 32))
    factor, inverse = mxfp8_factors(gl.max(groups.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=2))
    rounded = near_e4m3(groups * gl.expand_dims(inverse, 2)) * gl.expand_dims(factor, 2)
    return gl.convert_layout(gl.reshape(rounded, (rows, columns)), x.type.layout)


@gluon.jit
def even_of_column(v, x):
    """Return entries 0, 2, 4 .. of a column value, in the layout of x."""
    size: gl.constexpr = v.shape[0]
    return gl.convert_layout(gl.split(gl.reshape(v, (size // 2, 2)))[0], gl.SliceLayout(0, x.type.layout))


@gluon.jit
def odd_of_column(v, x):
    """Return entries 1, 3, 5 .. of a column value, in the layout of x."""
    size: gl.constexpr = v.shape[0]
    return gl.convert_layout(gl.split(gl.reshape(v, (size // 2, 2)))[1], gl.SliceLayout(0, x.type.layout))


@gluon.constexpr_function
def with_neighbours(layout):
    """Return the layout of a tile [rows, C], or, if neighbouring columns are in other lanes, one with both in a lane.

    They are in other lanes where the tile is one column of each pair of a product's. Lanes exchange the bit that tells
    neighbours apart for that of their last register, so that no value leaves its warp.
    """
    whole = layout.parent if isinstance(layout, gl.SliceLayout) and layout.dim == 2 else layout
    if not isinstance(whole, gl.DistributedLinearLayout):
        return layout
    registers, lanes, warps, blocks = (
        [basis[:2] for basis in bases]
        for bases in (whole.reg_bases, whole.lane_bases, whole.warp_bases, whole.block_bases)
    )
    registers = [basis for basis in registers if basis != [0, 0]]  # that of the dimension that was split off
    if [0, 1] not in lanes or not registers:
        return layout
    lane = lanes.index([0, 1])
    registers[-1], lanes[lane] = lanes[lane], registers[-1]
    return gl.DistributedLinearLayout(registers, lanes, warps, blocks, whole.shape[:2])


@gluon.constexpr_function
def neighbours_first(layout):
    """Return the layout of `with_neighbours`, both columns in neighbouring registers, so that one store has both."""
    found = with_neighbours(layout)
    if not isinstance(found, gl.DistributedLinearLayout) or [0, 1] not in found.reg_bases:
        return found
    registers = [[0, 1], *(basis for basis in found.reg_bases if basis != [0, 1])]
    return gl.DistributedLinearLayout(registers, found.lane_bases, found.warp_bases, found.block_bases, found.shape)


@gluon.jit
def pack_pairs(codes):
    """Pack nibbles [rows, C] into bytes [rows, C / 2], the even column in the low nibble."""
    codes = gl.convert_layout(codes, with_neighbours(codes.type.layout))
    return even(codes) | (odd(codes) << 4)


@gluon.jit
def store_column(pointer, value, ids, limit):
    """Store a column value."""
    gl.store(pointer + ids, value, mask=ids < limit)
