"""Model of the GPU time that a tiling of the Hopper router takes; which one runs depends on it."""

from dataclasses import dataclass

from envoi.ops.moe.router.spec import Spec
from envoi.ops.moe.router.tiling import TILE, RouterTiling
from envoi.runtime.gpu_rates import H200

CACHED_BYTES = 30e6  # of tokens that are still in the L2 when they are needed again
CACHED_SUMS_BYTES = 20e6  # the same of tokens and sums of parts along K together: sums are written first
LAUNCH_CYCLES = 1500.0  # one more launch, besides what `predicted_cycles` has for each


@dataclass(frozen=True)
class Costs:
    """Constants of the model of time, in cycles at `H200.clock_mhz`, from measurements on an H200.

    A test holds them to bench/router_times.jsonl; `tools/time_models` can fit them to it.

    start: a launch, and the first loads of a round. cta: until the next CTA of a round starts. roles: until the warps
    of several roles have started. meet, signal: all parts of some rows wait for each other, by a counter or by polling
    the sums. choose: choosing the experts of a pass of rows, however few. element: for each logit of a warp, in each
    round of the choice. idle: for each warp beyond the rows of a pass. group: for each group but one, in each pass, if
    the best of each is found after that of the one before. l2_bytes: loaded by a multiprocessor per cycle; less than a
    GEMM's tiles, since there is no second consumer. sum_bytes: of partial sums that a multiprocessor stores or loads
    per cycle. wide: factor of products by tiles of more than TILE rows, or of more than 128 columns by eight warps.
    """

    start: float = 1500.0
    cta: float = 12.0
    roles: float = 1800.0
    meet: float = 3300.0
    signal: float = 1300.0
    choose: float = 1500.0
    element: float = 0.12
    idle: float = 200.0
    group: float = 400.0
    l2_bytes: float = 65.0
    sum_bytes: float = 20.0
    wide: float = 1.2


COSTS = Costs()


def predicted_cycles(
    M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int, costs: Costs = COSTS
) -> float:  # fmt: skip
    """Estimate the cycles of a launch: loading and multiplying, then exchanging sums and choosing.

    Loads and products hide each other, unless they are about equally long; not at all if one role does first all of the
    former and then the latter.
    """
    ctas = -(-M // tiling.rows_per_cta) * tiling.parts
    waves = -(-ctas // num_sms)
    loads = max(_load_cycles(hidden, spec, tiling, costs), _memory_cycles(M, hidden, spec, tiling, num_sms) / waves)
    products = _product_cycles(hidden, tiling, costs)
    both = loads + products if tiling.single_fill else (loads**3 + products**3) ** (1 / 3)
    rest = 0.0 if tiling.single_fill else costs.roles
    if tiling.parts > 1:
        sets = max(1, tiling.num_sets // max(tiling.parts_k - 1, 1))
        floats = tiling.rows_per_part * tiling.num_sets * spec.columns + tiling.rows_per_cta * tiling.width * sets
        rest += (costs.signal if tiling.polls_sums else costs.meet) + 4 * floats / costs.sum_bytes
    return costs.cta * min(ctas, num_sms) + waves * (costs.start + both + rest + _choice_cycles(spec, tiling, costs))


def _span(hidden: int, tiling: RouterTiling) -> int:
    """Return the elements along K of a CTA."""
    return min(hidden, tiling.steps_each * tiling.block_k)


def _load_cycles(hidden: int, spec: Spec, tiling: RouterTiling, costs: Costs) -> float:
    """Return the cycles of a CTA's loads from the L2."""
    columns = min(tiling.turns * tiling.width, -(-spec.num_experts // tiling.box_n) * tiling.box_n)
    return 2 * _span(hidden, tiling) * (tiling.turns * tiling.rows_per_cta + columns) / costs.l2_bytes


def _memory_cycles(M: int, hidden: int, spec: Spec, tiling: RouterTiling, num_sms: int) -> float:
    """Return the cycles of a launch's loads from memory: each turn's tokens, unless the L2 still has them."""
    at_once = 2 * hidden * min(M, num_sms * tiling.rows_per_cta // tiling.parts)  # bytes of the tokens of a round
    reads = tiling.turns if at_once > CACHED_BYTES else 1
    return 2 * hidden * (M * reads + spec.num_experts) / H200.hbm_bytes


def _product_cycles(hidden: int, tiling: RouterTiling, costs: Costs) -> float:
    """Return the cycles of a CTA's products.

    An instruction takes at least the time in which its operands, 64 rows of tokens and the columns, 32 bytes each, come
    from shared memory, 128 bytes a cycle; the tokens for each four warps.
    """
    groups = tiling.num_warps * 16 // tiling.tile
    widths = (n for n in (tiling.block_n, tiling.rest_n) if n)
    cycles = _span(hidden, tiling) / 16 * tiling.turns * sum(max(n / 2, 16 * groups + n / 4) for n in widths)
    if tiling.tile > TILE or (tiling.num_warps == 8 and tiling.width > 128):
        cycles *= costs.wide * tiling.tile / TILE
    return cycles


def _choice_cycles(spec: Spec, tiling: RouterTiling, costs: Costs) -> float:
    """Return the cycles in which a CTA chooses the experts of its rows."""
    passes = -(-tiling.rows_per_part // tiling.rows_per_pass)
    chosen_from = tiling.width if tiling.in_runs else spec.columns
    elements = tiling.rows_per_pass * chosen_from / tiling.num_warps
    groups = 0 if spec.groups_fill else spec.rule.num_groups - 1
    idle = max(0, tiling.num_warps - tiling.rows_per_pass)
    each = costs.choose + groups * costs.group + elements * (spec.k + 12) * costs.element
    return passes * each + idle * costs.idle
