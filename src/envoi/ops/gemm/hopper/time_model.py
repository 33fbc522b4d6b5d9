"""Model of the GPU time that a config of the Hopper GEMM takes for a problem; which config runs depends on it."""

from dataclasses import dataclass
from math import ceil, erfc, exp, hypot, sqrt

from envoi.ops.gemm.hopper.config import FEW_TOKENS, NEIGHBOURS, Config, Problem
from envoi.runtime.devices import H200
from envoi.runtime.math import cdiv, mean_chosen

ONE_TILE = 1.1  # tiles of tokens of an expert in the mean, up to which nearly every one has one


@dataclass(frozen=True)
class Costs:
    """Constants of the model of GPU time, in cycles at `H200.clock_mhz`, from measurements on an H200.

    `tools/time_models` fits them to bench/gemm_times.jsonl.

    launch: the kernel's launch and its first loads. tile, element, operand: around a tile's mainloop, for each of a
    consumer's accumulators in its epilogue, by four warps, and beyond that, by however many warps, for each consumer of
    the tile, if it loads an operand by TMA. step: around the loads of a stage. latency: from a stage's release to its
    next fill. held_stages: stages whose wgmma may not have completed. part: around one part of a split tile. join: to
    store or to add one accumulator's partial sum. l2_bytes, dram_bytes: loaded per cycle, by one multiprocessor and by
    all. one_round: l2_bytes in a plain GEMM without scales along K where each has at most one tile: none is a tile
    behind its neighbours. outside_lines: lines of 128 bytes outside of a matrix that all multiprocessors together fill
    with zeros per cycle. own_lines: by one, of a box of weights that is partly outside; beside its own loads where it
    has one tile, else all wait. scaled_block: to add up a block of 128 elements of K with its scales. wide_step,
    wide_tile: factors with wide tail tiles. three_step: of a step by three consumers. rest: an instruction for the
    second of two widths, at least: it reads the tokens from shared memory once more. again: reading weights once more,
    for another tile of few tokens, costs this share of reading them from memory, unless NEIGHBOURS read them together,
    in 16 bits. again_by_expert: likewise where experts have few tokens and most of them one tile: multiprocessors drift
    apart, and the second reads memory, too. again_odd: likewise with an odd number of tiles along the features: behind
    an expert with one tile of tokens the two of another don't lie on a pair of multiprocessors. short_rows: factor of
    the bytes there where a stage has 128 bytes of a row of weights. stored_rows: added to `element` where few tokens
    are the M side of a tile of more than 64 features: their rows leave from registers. box: to start a TMA load; counts
    where a stage has many. narrowed_fp8, narrowed_operand: factors of an element's epilogue and of its operand in FP8,
    whose factors are loaded by each chunk, if `narrowed`. scaled_column: to add up one of those blocks, for each token
    of a tile whose tokens are its columns, each with a factor. kept_values, value_code: to fetch the code of an
    epilogue with an operand, which every consumer has for each of its accumulator's values of a thread; those kept are
    still in the instruction cache. own_row, shared_bytes: loads of a token's row count as so many where an expert has
    many, and how much one multiprocessor loads per cycle there: neighbours load the same weights, which the L2 sends
    once for all of them. l2_sends: bytes that the L2 sends per cycle to all multiprocessors together, what NEIGHBOURS
    ask for at once counted once.
    """

    launch: float = H200.launch_cycles
    tile: float = 825
    element: float = 0.13
    operand: float = 0.4
    step: float = 19
    latency: float = 1300
    held_stages: float = 1.6
    part: float = 3900
    join: float = 0.1
    l2_bytes: float = H200.l2_bytes
    dram_bytes: float = H200.hbm_bytes
    one_round: float = 95
    outside_lines: float = 13
    own_lines: float = 2
    scaled_block: float = 80
    wide_step: float = 1.02
    wide_tile: float = 1.15
    three_step: float = 1.05
    rest: float = 24
    again: float = 0.4
    again_by_expert: float = 0.18
    again_odd: float = 0.34
    short_rows: float = 1.05
    stored_rows: float = 0.05
    box: float = 50
    narrowed_fp8: float = 3.0
    narrowed_operand: float = 2.0
    scaled_column: float = 1.5
    kept_values: float = 176
    value_code: float = 100
    own_row: float = 2.25
    shared_bytes: float = 100
    l2_sends: float = 5280


COSTS = Costs()


def predicted_cycles(problem: Problem, config: Config, num_sms: int, costs: Costs = COSTS) -> float:
    """Return the cycles that a config should take: for ranking configs, not for predicting times.

    Loads from memory and the multiprocessors' own work hide each other, except where they are about equally long.
    """
    tiles = max(1, round(_token_tiles(problem, config) * cdiv(problem.N, config.block_n)))
    rest = tiles % num_sms if config.split_k > 1 else 0
    steps, epilogue = cdiv(problem.K, config.block_k), _epilogue_cycles(problem, config, costs)
    steps, epilogue = config.tiles_per_unit * steps, config.tiles_per_unit * epilogue
    whole, low = _step_cycles(problem, config, num_sms, tiles, costs)
    work = 0.0
    if rounds := cdiv(tiles - rest, num_sms):
        # Of a CTA's tiles, those with the last rows take longer; pingpong hides all epilogues but the last.
        num_low = 0 if problem.num_groups else min(rounds, cdiv(rounds, cdiv(problem.M, config.block_m)))
        mainloop = steps * (whole + (low - whole) * num_low / rounds)
        hidden = max(mainloop, (mainloop + epilogue) / 2) if config.pingpong else mainloop + epilogue
        work = mainloop + (rounds - 1) * hidden + epilogue
    if rest:
        sums = costs.join * config.rows_per_consumer * config.block_y
        parts = cdiv(rest * config.split_k, num_sms)
        work += parts * (cdiv(steps, config.split_k) * low + costs.part + sums) + config.split_k * sums + epilogue
    partial_sums = rest * config.split_k * config.block_x * config.block_y
    moved = problem.element_bytes * problem.K * (problem.M + _busy_groups(problem) * problem.N)
    moved += (2 + problem.tma_operand_bytes) * problem.M * problem.N + 2 * 4 * partial_sums
    if problem.M <= FEW_TOKENS and not problem.num_groups:
        token_tiles = cdiv(problem.M, config.block_m)
        shared = token_tiles * config.swizzle_rows * config.split_k <= NEIGHBOURS and problem.element_bytes == 2
        if not shared:
            moved += costs.again * (token_tiles - 1) * problem.element_bytes * problem.K * problem.N
    if _are_few_by_expert(problem):
        more = max(0.0, _token_tiles(problem, config) - _busy_groups(problem))  # which are counted by two formulas
        again = costs.again_odd if cdiv(problem.N, config.block_n) % 2 else costs.again_by_expert
        moved += again * more * problem.element_bytes * problem.K * problem.N
        if config.block_k * problem.element_bytes <= 128:
            moved *= costs.short_rows
    return costs.launch + _code_cycles(problem, config, costs) + hypot(work, moved / costs.dram_bytes)


def _code_cycles(problem: Problem, config: Config, costs: Costs) -> float:
    if not problem.tma_operand_bytes:
        return 0.0
    values = config.num_consumers * config.rows_per_consumer * config.block_y / (32 * config.num_warps)
    return costs.value_code * max(0.0, values - costs.kept_values)


def _epilogue_cycles(problem: Problem, config: Config, costs: Costs) -> float:
    element = costs.element
    operand = costs.operand * config.consumers_per_tile if problem.tma_operand_bytes else 0.0
    if config.narrowed and problem.element_bytes == 1:
        element, operand = costs.narrowed_fp8 * element, costs.narrowed_operand * operand
    plain = not (problem.num_groups or problem.scaled)
    if plain and problem.M <= FEW_TOKENS and not config.swap_ab and config.block_y > 64:
        element += costs.stored_rows
    cycles = costs.tile + (element * 4 / config.num_warps + operand) * config.rows_per_consumer * config.block_y
    return cycles * costs.wide_tile if config.wide_tail_tiles else cycles


def _step_cycles(problem: Problem, config: Config, num_sms: int, tiles: int, costs: Costs) -> tuple[float, float]:
    """Return the cycles of a step along K of most tiles, and of those with the last rows of a dense GEMM.

    Rows of a box outside of the matrix are slow to fill with zeros, also where the whole box is outside.
    """
    row_bytes = config.block_k * problem.element_bytes
    tensor = tensor_cycles(config, row_bytes, costs)
    one_round = tiles <= num_sms and problem.M > FEW_TOKENS and not (problem.num_groups or problem.scaled)
    loads = (config.block_x + config.block_y) * row_bytes / (costs.one_round if one_round else costs.l2_bytes)
    if _shares_weights(problem) and not config.swap_ab:
        loads = (costs.own_row * config.block_x + config.block_y) * row_bytes / costs.shared_bytes
    loads *= problem.K / (config.block_k * cdiv(problem.K, config.block_k))  # the last step may have part of a stage
    filled = _rows_outside_of_box(problem, config) * row_bytes / 128 / costs.own_lines
    drift = 0.0
    if tiles <= num_sms:
        loads += filled
    else:
        drift = filled  # tiles that take longer hold up neighbours, which share less in the L2
    late = costs.latency / max(config.num_stages - costs.held_stages, 0.1)
    issue = costs.box * config.boxes_per_stage if config.narrowed else 0.0
    outside = 0.0
    box = config.block_y if config.swap_ab else config.rows_per_consumer
    token_tiles = cdiv(problem.M, config.block_m)
    # See `TileScheduler.ending_with_tokens`.
    moved = config.tiles_overlap and token_tiles > 1 and (config.split_k == 1 or tiles < num_sms)
    if not problem.num_groups:
        units = tiles + tiles % num_sms * (config.split_k - 1)
        rows = -problem.M % config.block_m
        lines = (rows // box * box if moved else rows) * row_bytes / 128
        outside = lines * min(units, num_sms) / token_tiles / costs.outside_lines
    factor = costs.wide_step if config.wide_tail_tiles else costs.three_step if config.num_consumers == 3 else 1.0
    added = 0.0
    if problem.scaled:
        token_columns = config.block_y if config.swap_ab else 0
        added = (costs.scaled_block + costs.scaled_column * token_columns) * config.block_k / 128
    if lines := _lines_outside_halves(problem, config, row_bytes):
        outside = lines * num_sms / costs.outside_lines  # one multiprocessor fills a share of what all fill
    if not problem.num_groups and problem.M > FEW_TOKENS:
        units = tiles + tiles % num_sms * (config.split_k - 1)
        tensor = sent_cycles(problem, config, tensor, min(units, num_sms), costs)
    whole, low = (max(tensor, issue, max(each, late) + costs.step) for each in (loads, hypot(loads, outside)))
    whole, low = whole + drift, low + drift
    if lines:
        whole += (low - whole) / cdiv(problem.N, config.block_n)
    return factor * (whole + added), factor * (low + added)


def tensor_cycles(config: Config, row_bytes: int, costs: Costs = COSTS) -> float:
    """Return the cycles in which the tensor cores multiply a step along K of a tile, row_bytes of each row."""
    second = max(config.rest_y / 2, costs.rest) if config.rest_y else 0.0
    columns = config.block_y if config.narrowed else config.main_y
    return config.block_x / 64 * row_bytes / 32 * (max(columns / 2, 16) + second)


def sent_cycles(problem: Problem, config: Config, tensor: float, num_ctas: int, costs: Costs = COSTS) -> float:
    """Return the cycles of a step of a plain GEMM, as far as tensor cores and what the L2 sends decide, in the mean.

    tensor: cycles of the tensor cores.
    """
    row_bytes = config.block_k * problem.element_bytes
    each = row_bytes / NEIGHBOURS * num_ctas / costs.l2_sends
    return sum(share * max(tensor, rows * each) for rows, share in rows_of_neighbours(problem, config))


def rows_of_neighbours(problem: Problem, config: Config) -> list[tuple[float, float]]:
    """Return how many rows of x and y NEIGHBOURS tiles after each other have together, and in which share of a GEMM.

    Tiles go down a band of `swizzle_rows` rows of tiles, then one column to the right (`TileScheduler.dense_tile`);
    the last band may be lower.
    """
    num_x, num_y = cdiv(problem.M, config.block_m), cdiv(problem.N, config.block_n)
    if config.swap_ab:
        num_x, num_y = num_y, num_x
    height = min(config.swizzle_rows, num_x)
    found = []
    for band, share in ((height, num_x // height * height / num_x), (num_x % height, num_x % height / num_x)):
        if band:
            columns = max(1.0, min(num_y, NEIGHBOURS / band))
            rows = min(num_x, NEIGHBOURS / columns) * config.block_x + columns * config.block_y
            found.append((rows, share))
    return found


def _rows_outside_of_box(problem: Problem, config: Config) -> int:
    """Return the rows that are outside of the matrix in the box with the last weights; 0 in a grouped GEMM."""
    if problem.num_groups:
        return 0
    inside = (problem.N - 1) % config.block_n + 1  # rows of the last tile
    if config.swap_ab:
        return -inside % config.rows_per_consumer
    first = config.block_y // config.main_y * config.main_y
    if inside <= first:
        return -inside % config.main_y
    return -(inside - first) % (config.rest_y or config.small_box)


def _lines_outside_halves(problem: Problem, config: Config, row_bytes: int) -> float:
    """Return the lines of an expert's last box of weights that are outside of their half.

    Rows after a matrix that a box has as one are the next expert's. Of few tokens it wasn't measured.
    """
    if not problem.in_halves or not _shares_weights(problem):
        return 0.0
    return 2 * (-(problem.N // 2) % (config.block_n // 2)) * row_bytes / 128


def _busy_groups(problem: Problem) -> float:
    """Return the experts that have tokens, in the mean over routing at random; 1 for a plain GEMM."""
    return mean_chosen(problem.num_groups, problem.M) if problem.num_groups else 1


def _token_tiles(problem: Problem, config: Config) -> float:
    """Return the tiles along the tokens, of all experts."""
    groups = max(1, problem.num_groups)
    return groups * _tiles_of_group(problem, config, problem.M / groups)


def have_one_tile(problem: Problem, config: Config) -> bool:
    """Return True if nearly every expert that has tokens has one tile of them; False for a plain GEMM."""
    return problem.num_groups > 0 and _token_tiles(problem, config) <= ONE_TILE * _busy_groups(problem)


def _shares_weights(problem: Problem) -> bool:
    """Return True if experts have so many tokens that multiprocessors next to each other load the same weights.

    In 16 bits alone: in FP8 it made no difference (measured), and with scales along K constants are fitted without it.
    """
    return problem.element_bytes == 2 and problem.M > FEW_TOKENS * problem.num_groups > 0


def _are_few_by_expert(problem: Problem) -> bool:
    """Return True if experts have few tokens, so that reading weights bounds the time; not with scales along K."""
    return 0 < problem.M <= FEW_TOKENS * problem.num_groups and not problem.scaled


def _tiles_of_group(problem: Problem, config: Config, tokens: float) -> float:
    """Return the tiles along an expert's `tokens`, in the mean over routing at random; of a plain GEMM along all."""
    if not problem.num_groups:
        return cdiv(problem.M, config.block_m)
    return expected_tiles(tokens, sqrt(tokens), 1 - exp(-tokens), config.block_m)


def expected_tiles(mean: float, deviation: float, any_row: float, block_m: int) -> float:
    """Return how many tiles of block_m rows an expert needs in the mean: sum over j >= 0 of P(rows > j * block_m).

    mean, deviation: of the expert's number of rows. any_row: the probability of at least one row; the rest of the tail
    is the normal distribution's.
    """
    certain = max(1, int(mean - 6 * deviation) // block_m)
    tiles = certain - 1 + any_row
    for most in range(certain * block_m, ceil(mean + 6 * deviation), block_m):
        tiles += 0.5 * erfc((most + 0.5 - mean) / (deviation * sqrt(2)))
    return tiles
