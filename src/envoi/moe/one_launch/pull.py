"""Pull of peers' tokens into this rank's rows, by the consumers, before L1."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.aggregate import Scalar, aggregate

WARPS = gl.constexpr(4)  # of a role


@aggregate
class PullArgs:
    """Tokens that are pulled, and where to."""

    to: gl.tuple  # Pulled
    regions: gl.tuple  # `symmetric_memory.Regions`: bytes from the start of a rank's memory to each part
    rank: Scalar
    first_expert: Scalar
    cfg: gl.constexpr  # PullConfig


@gluon.jit
def pull(args, role: gl.constexpr, num_roles: gl.constexpr):
    """Pull this role's share of all ranks' tokens, one of each rank in turn; the last CTA also notes the call's load.

    A token is read once, for all its rows. A warp has one or several tokens at a time, each in a row of a matrix, and
    asks for the next ones before it stores these.
    """
    cfg: gl.constexpr = args.cfg
    to = args.to
    own = gl.load(to.peers + args.rank)
    group = gl.program_id(0) * num_roles + role
    num_groups = gl.num_programs(0) * num_roles
    if role == 0:
        if gl.program_id(0) == gl.num_programs(0) - 1:
            note_load(args, own)
    num_tokens = gl.load(to.state + cfg.max_tokens_at) * to.num_ranks
    x = gl.full((cfg.tokens, cfg.words), 0, gl.int32, layout_of(4))
    sf = gl.full((cfg.tokens, cfg.factors), 0, gl.int32, layout_of(1))
    rows = gl.full((cfg.tokens, cfg.slots), -1, gl.int32, layout_of(1))
    stride = num_groups * cfg.tokens
    for begin in range(group, num_tokens + stride, stride):
        # At first there is nothing to keep, and at last nothing to fetch: the code of each is there once.
        next_x, next_sf, next_rows = fetch(args, own, begin, num_groups)
        keep(args, x, sf, rows)
        x, sf, rows = next_x, next_sf, next_rows


@gluon.constexpr_function
def layout_of(words):
    """Return the layout of a matrix with a row for each token: a warp has whole rows, `words` neighbours a lane."""
    return gl.BlockedLayout([1, words], [1, 32], [4, 1], [1, 0])


@gluon.jit
def pointer_to(address, like):
    """Return a pointer to an address, of the type of another pointer."""
    return address.to(like.dtype)


@gluon.jit
def fetch(args, own, begin, stride):
    """Load tokens begin, begin + stride, .. of all ranks' that have rows here; store what belongs to their rows.

    That is weights and destinations. Return the words [tokens, words], the scale factors [tokens, factors], and the row
    of each slot [tokens, slots], -1 = none here. The tokens are far apart, so that few are spread over all SMs.
    """
    cfg: gl.constexpr = args.cfg
    to, regions = args.to, args.regions
    t = begin + gl.arange(0, cfg.tokens, gl.SliceLayout(1, layout_of(1))) * stride
    source, token = (t + args.rank) % to.num_ranks, t // to.num_ranks
    sizes = pointer_to(own + regions.sizes, to.state) + 2 * source
    k = gl.where(token < gl.load(sizes), gl.load(sizes + 1), 0)  # slots of a token, 0 of one that doesn't exist
    lane = columns(cfg.slots, layout_of(1))
    slot = (token * k)[:, None] + lane
    is_slot = lane < k[:, None]
    place = (source * to.room)[:, None] + slot
    ids = pointer_to(own + regions.topk_ids, to.state)
    expert = gl.load(ids + place, mask=is_slot, other=-1) - args.first_expert
    is_local = (expert >= 0) & (expert < to.num_local)
    base = gl.load(to.peers + source)
    x, sf = load_tokens(args, base, token, gl.max(is_local.to(gl.int32), 1) > 0)
    positions = pointer_to(own + regions.slot_pos, to.state)
    row = gl.load(positions + place, mask=is_local, other=0)
    row += gl.load(to.row_shift + (source * to.num_local)[:, None] + expert, mask=is_local, other=0)
    weights = pointer_to(own + regions.weights, to.row_weights)
    gl.store(to.row_weights + row, gl.load(weights + place, mask=is_local, other=0.0), mask=is_local)
    destination = (base + regions.returned_rows)[:, None] + slot.to(gl.int64) * cfg.slot_bytes
    gl.store(to.row_destinations + row, destination, mask=is_local)
    return x, sf, gl.where(is_local, row, -1)


@gluon.jit
def load_tokens(args, base, token, is_here):
    """Load the words and scale factors of the tokens that have rows here, 0 of others.

    base, token, is_here [tokens]: address of the memory of a token's rank, its number there, whether it has rows here.
    """
    cfg: gl.constexpr = args.cfg
    to, regions = args.to, args.regions
    wide: gl.constexpr = layout_of(4)
    column, factor = columns(cfg.words, wide), columns(cfg.factors, layout_of(1))
    from_words = pointer_to(in_rows(base, wide) + regions.tokens, to.rows)
    from_words += in_rows(token, wide).to(gl.int64) * cfg.num_words
    mask = in_rows(is_here, wide)[:, None] & (column < cfg.num_words)
    x = gl.load(gl.multiple_of(from_words[:, None] + column, [16, 16]), mask=mask, other=0)
    from_sf = pointer_to(base + regions.token_sf, to.rows_sf) + token.to(gl.int64) * cfg.num_sf
    sf = gl.load(from_sf[:, None] + factor, mask=is_here[:, None] & (factor < cfg.num_sf), other=0)
    return x, sf


@gluon.jit
def keep(args, x, sf, rows):
    """Store tokens and their scale factors in all their rows. x, sf, rows: as `fetch` returns them."""
    cfg: gl.constexpr = args.cfg
    to = args.to
    wide: gl.constexpr = layout_of(4)
    column, factor = columns(cfg.words, wide), columns(cfg.factors, layout_of(1))
    slots: gl.constexpr = cfg.slots
    lane = columns(slots, layout_of(1))
    for i in gl.static_range(slots):
        row = gl.max(gl.where(lane == i, rows, -1), 1)
        wide_row = in_rows(row, wide)
        out = to.rows + wide_row.to(gl.int64) * cfg.num_words
        gl.store(out[:, None] + column, x, mask=(wide_row >= 0)[:, None] & (column < cfg.num_words))
        out_sf = to.rows_sf + row.to(gl.int64) * cfg.num_sf
        gl.store(out_sf[:, None] + factor, sf, mask=(row >= 0)[:, None] & (factor < cfg.num_sf))


@gluon.jit
def columns(count: gl.constexpr, layout: gl.constexpr):
    """Return the numbers of the columns, [1, count], of a matrix of this layout."""
    return gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def in_rows(values, layout: gl.constexpr):
    """Return a vector with a value for each row of a matrix, for matrices of this layout; nothing moves."""
    return gl.convert_layout(values, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def note_load(args, own):
    """Add this call's slots of each expert, of all ranks, to the history; nothing if the call failed."""
    cfg: gl.constexpr = args.cfg
    to = args.to
    if gl.load(to.state + cfg.outcome_at) == cfg.fine:
        e = gl.arange(0, cfg.experts, gl.BlockedLayout([1], [32], [4], [0]))
        total = gl.zeros_like(e)
        for source in range(to.num_ranks):
            begin = pointer_to(own + args.regions.slot_offsets, to.state) + source * (cfg.num_experts + 1) + e
            total += gl.load(begin + 1, mask=e < cfg.num_experts, other=0, cache_modifier=".cg")
            total -= gl.load(begin, mask=e < cfg.num_experts, other=0, cache_modifier=".cg")
        call = gl.atomic_add(to.history + cfg.num_calls * cfg.num_experts, 1, sem="relaxed", scope="gpu")
        gl.store(to.history + (call & (cfg.num_calls - 1)) * cfg.num_experts + e, total, mask=e < cfg.num_experts)
