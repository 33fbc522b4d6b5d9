"""Five steps of the path, each with the time that every resource needs by itself (a roofline), and their sum.

    router    logits GEMM, top-k                       2 M H N FLOP
    dispatch  quantise; each rank pulls every token of its experts once and writes one row per (token, expert); nothing
              where L1 finds its tokens itself
    L1        2 P (2 I) H FLOP, epilogue SwiGLU        in whole tiles, in whole rounds over the SMs
    L2        2 P H I FLOP, epilogue writes each row to its token's rank
    combine   barrier; each token's k rows are summed

Where L1 and L2 are one launch (`envoi.ops.moe.one_launch`) L2's step has no launch of its own.

With presum L2's rows stay local, and combine begins with a kernel that sums a token's rows and sends the sum to its
rank.

M tokens of this rank, P rows of its experts: M k on average. A rank receives as much over NVLink as it sends, so one
direction is counted.

Steps between hosts: a token crosses to another host once, between ranks of the same place, and comes back so.

    rail out    quantise; one all-gather along the rail, M tokens to each other host; unpack those with an expert here
    dispatch    NVLink, as on one host, of the tokens of all ranks of a place
    L1, L2      L2's epilogue writes each row to the rank of its token's place
    combine     barrier; with presum a token's rows on this host are summed
    rail back   one all-to-all along the rail, k rows for each token and host, or one sum; what came is summed

For G hosts of L ranks, parcels of h bytes a token, rows of 2H bytes, bytes that a rank sends to other hosts:

    by host     (G - 1) M h                + (G - 1) M k 2H           2H in place of k 2H with presum
    gathered    L (G - 1) M h              + L (G - 1) M k 2H         between all ranks alike, sizes constant
    counted     L (G - 1) M h p(G L)       + (G - 1) / G M k 2H       p(n) = 1 - (1 - 1/n)^k: a rank has one of the k
"""

from dataclasses import dataclass, replace

from envoi.check import describe
from envoi.epilogues.library import l1_output_scheme
from envoi.estimates.blocks import Blocks
from envoi.estimates.layer import WEIGHT_AND_SLOT_BYTES, MoeLayer, active_experts, pulled_tokens, taken_tokens
from envoi.estimates.machines import W4A16, WIDENED, Machine

RESOURCES = ("compute", "HBM", "NVLink", "network")
BF16_BYTES = 2
NETWORK_GB_PER_S = 45.0  # estimate: what NCCL gets of 400 Gb/s a GPU
COLLECTIVE_US = 30.0  # estimate: NCCL's time for a few bytes between two ranks of a rail


@dataclass(frozen=True)
class Step:
    """Step on one rank. Times in us, each as if the resource were the only one.

    flops: useful ones. hbm_bytes, nvlink_bytes, network_bytes: read and written; through NVLink, and between hosts, in
    one direction. compute_us: at the format's rate, of whole tiles in whole rounds. hbm_us, nvlink_us, network_us:
    bytes at their rates. fixed_us: launch, flags between ranks, a collective without bytes. time_us: fixed_us, the
    longest, and `unhidden` of the others; between hosts, their sum.
    """

    name: str
    flops: float
    hbm_bytes: float
    nvlink_bytes: float
    compute_us: float
    hbm_us: float
    nvlink_us: float
    fixed_us: float
    time_us: float
    network_bytes: float = 0.0
    network_us: float = 0.0

    @property
    def parts_us(self) -> dict[str, float]:
        """Times by resource."""
        times_us = self.compute_us, self.hbm_us, self.nvlink_us, self.network_us
        return dict(zip(RESOURCES, times_us, strict=True))

    @property
    def bound_by(self) -> str:
        """ "compute", "HBM", "NVLink" or "network", or "latency" if the fixed time is longer than any."""
        longest = max(RESOURCES, key=lambda name: self.parts_us[name])
        return longest if self.parts_us[longest] > self.fixed_us else "latency"


def five_steps(
    layer: MoeLayer, machine: Machine, l1: Blocks, l2: Blocks, presum: bool, one_launch: bool
) -> tuple[Step, ...]:
    """Return router, dispatch, L1, L2, combine. one_launch: L1 and L2 are."""
    experts = _l1(layer, machine, l1), _l2(layer, machine, l2, presum)
    if one_launch:
        first, second = (_faster_hbm(step, machine) for step in experts)
        experts = first, replace(second, fixed_us=0.0, time_us=second.time_us - second.fixed_us)
    return (
        _router(layer, machine),
        _dispatch(layer, machine, l1),
        *experts,
        _combine_sums(layer, machine) if presum else _combine(layer, machine, l2.shared_evenly),
    )


def _faster_hbm(step: Step, machine: Machine) -> Step:
    """Return a GEMM's step with its bytes at the rate of one launch."""
    hbm_us = step.hbm_us / machine.one_launch_hbm
    times = step.compute_us, hbm_us, step.nvlink_us
    return replace(step, hbm_us=hbm_us, time_us=step.fixed_us + _overlapped(times, machine))


def gemm_us(blocks: Blocks, K: int, format: str, machine: Machine) -> float:
    """Return the time of a GEMM's products: the busiest SM's tiles, at its share of the machine's rate.

    And what tiles take beside their products, but for kernels in which SMs share all tiles evenly.
    """
    rounds = blocks.rounds(machine.num_sms)
    elements = blocks.block_m * blocks.block_n * rounds
    beside_us = 0.0 if blocks.shared_evenly else machine.tile_us.get(format, 0.0) * elements / 128**2
    flops = 2.0 * elements * K * machine.num_sms
    return flops / machine.gemm_tflops(format, blocks.block_m, blocks.shared_evenly) / 1e6 + beside_us


def step_of(
    name: str, machine: Machine, flops: float = 0, compute_us: float = 0, hbm_bytes: float = 0,
    nvlink_bytes: float = 0, nvlink_gb_per_s: float = 1, round_trips: int = 0, dependent: bool = False,
) -> Step:  # fmt: skip
    """Return a step with its times, computed from its work.

    round_trips: barriers across ranks. dependent: the launch begins before the previous one ends.
    """
    fixed_us = machine.dependent_launch_us if dependent else machine.launch_us
    fixed_us += round_trips * machine.round_trip_us
    hbm_us, nvlink_us = hbm_bytes / machine.hbm_gb_per_s / 1e3, nvlink_bytes / nvlink_gb_per_s / 1e3
    time_us = fixed_us + _overlapped((compute_us, hbm_us, nvlink_us), machine)
    return Step(name, flops, hbm_bytes, nvlink_bytes, compute_us, hbm_us, nvlink_us, fixed_us, time_us)


def _overlapped(times_us: tuple[float, ...], machine: Machine) -> float:
    """Return the time of resources that work side by side."""
    *others, longest = sorted(times_us)
    return longest + machine.unhidden * sum(others)


def _router(layer: MoeLayer, machine: Machine) -> Step:
    """Return the router's step: bf16, whatever the experts' format."""
    M, N, H = layer.num_tokens, layer.num_experts, layer.hidden
    flops = 2.0 * M * N * H
    hbm = BF16_BYTES * (M + N) * H + WEIGHT_AND_SLOT_BYTES * layer.num_rows
    return step_of("router", machine, flops, flops / machine.tflops["bf16"] / 1e6, hbm)


def _dispatch(layer: MoeLayer, machine: Machine, l1: Blocks) -> Step:
    """Return dispatch's step. Counts, indices, rows are exchanged: a barrier across ranks for each of the first two.

    Between ranks two launches, which sort the slots, are in front of the pull. No step of its own where L1 gathers.
    """
    if l1.gathers:
        return Step("dispatch", 0, 0, 0, 0, 0, 0, 0, 0)
    stays_bf16 = layer.formats.activations is None or (layer.num_gpus == 1 and _reads_bf16(layer, machine))
    row = (BF16_BYTES * layer.hidden if stays_bf16 else layer.row_bytes(layer.hidden)) + WEIGHT_AND_SLOT_BYTES
    quantised = 0 if stays_bf16 else layer.num_tokens * (BF16_BYTES * layer.hidden + row)
    hbm = quantised + (taken_tokens(layer) + layer.num_rows) * row
    step = step_of(
        "dispatch", machine, hbm_bytes=hbm, nvlink_bytes=pulled_tokens(layer) * row,
        nvlink_gb_per_s=machine.pull_gb_per_s, round_trips=2 if layer.num_ranks > 1 else 0, dependent=l1.shared_evenly,
    )  # fmt: skip
    return _sorting(step, layer, machine) if layer.num_ranks > 1 else step


def _reads_bf16(layer: MoeLayer, machine: Machine) -> bool:
    """Return True if both GEMMs read rows of MXFP8's numbers in bf16, as the kernels of 4-bit weights do."""
    return layer.format in W4A16 and layer.formats.activations is not None and bool(machine.w4a16_tflops)


def _sorting(step: Step, layer: MoeLayer, machine: Machine) -> Step:
    """Return a step with the launches in front of it that sort this rank's slots."""
    launches_us, slots_us = machine.sort_us, machine.slot_us * layer.num_tokens * layer.num_topk
    return replace(step, fixed_us=step.fixed_us + launches_us, time_us=step.time_us + launches_us + slots_us)


def _l1(layer: MoeLayer, machine: Machine, blocks: Blocks) -> Step:
    """Return L1's step. If its epilogue can't quantise, it stores bf16, and another kernel quantises, or L2 itself."""
    scheme, quantised = layer.formats.activations, layer.row_bytes(layer.intermediate)
    if _reads_bf16(layer, machine):
        return _gemm("L1", layer, machine, blocks, layer.l1_nk, BF16_BYTES * layer.intermediate)
    if scheme is None or l1_output_scheme(scheme):
        return _gemm("L1", layer, machine, blocks, layer.l1_nk, quantised)
    stored = BF16_BYTES * layer.intermediate
    step = _gemm("L1", layer, machine, blocks, layer.l1_nk, stored)
    if blocks.gathers:
        return step
    return with_pass(step, machine, layer.num_rows * (stored + quantised), machine.launch_us)


def _l2(layer: MoeLayer, machine: Machine, blocks: Blocks, presum: bool) -> Step:
    """Return L2's step; output rows are bf16."""
    left = BF16_BYTES * layer.hidden
    return _gemm("L2", layer, machine, blocks, layer.l2_nk, left, 0 if presum else layer.num_remote_rows * left)


def _gemm(
    name: str, layer: MoeLayer, machine: Machine, blocks: Blocks, nk: tuple[int, int], left_bytes: float,
    nvlink_bytes: float = 0,
) -> Step:  # fmt: skip
    """Return a GEMM's step. left_bytes: per output row. For weights widened to bf16, a kernel first widens tokens.

    Where both GEMMs read bf16, it widens those of other ranks.
    """
    N, K = nk
    in_bf16 = _reads_bf16(layer, machine)
    widens = machine.widened_per_us and layer.format in WIDENED and layer.formats.activations is not None
    widens = widens and (not in_bf16 or (nk == layer.l1_nk and layer.num_gpus > 1))
    row = BF16_BYTES * K if widens or in_bf16 else layer.row_bytes(K)
    hbm = active_experts(layer) * layer.weight_bytes(nk) + layer.num_rows * (row + left_bytes)
    compute_us = gemm_us(blocks, K, layer.format, machine)
    flops = 2.0 * layer.num_rows * N * K
    dependent = blocks.shared_evenly and not blocks.gathers
    step = step_of(
        name, machine, flops, compute_us, hbm, nvlink_bytes, machine.push_gb_per_s, dependent=dependent
    )  # fmt: skip
    return with_pass(step, machine, layer.num_rows * (layer.row_bytes(K) + row)) if widens else step


def with_pass(step: Step, machine: Machine, num_bytes: float, launch_us: float = 0) -> Step:
    """Add a kernel without overlap to a step: the bytes it reads and writes. launch_us: 0 if the launch is hidden."""
    us = num_bytes / machine.hbm_gb_per_s / 1e3
    return replace(
        step, hbm_bytes=step.hbm_bytes + num_bytes, hbm_us=step.hbm_us + us, fixed_us=step.fixed_us + launch_us,
        time_us=step.time_us + us + launch_us,
    )  # fmt: skip


def _combine_sums(layer: MoeLayer, machine: Machine) -> Step:
    """Return combine's step with presum: sum and send the rows here, barrier, add up the ranks' sums."""
    row, sums = BF16_BYTES * layer.hidden, taken_tokens(layer)
    sent = step_of(
        "combine", machine, hbm_bytes=row * (layer.num_rows + sums), nvlink_bytes=row * pulled_tokens(layer),
        nvlink_gb_per_s=machine.push_gb_per_s, round_trips=1,
    )  # fmt: skip
    return with_pass(sent, machine, row * (sums + layer.num_tokens), machine.launch_us)


def _combine(layer: MoeLayer, machine: Machine, dependent: bool) -> Step:
    hbm = BF16_BYTES * (layer.num_rows + layer.num_tokens) * layer.hidden
    return step_of("combine", machine, hbm_bytes=hbm, round_trips=1 if layer.num_ranks > 1 else 0, dependent=dependent)


# Several hosts


@dataclass(frozen=True)
class Network:
    """Network between hosts. gb_per_s: sent by a GPU, while it receives as much. collective_us: of one without bytes.

    Raises ValueError for rates and times that aren't positive.
    """

    gb_per_s: float = NETWORK_GB_PER_S
    collective_us: float = COLLECTIVE_US

    def __post_init__(self) -> None:
        for name, value in (("gb_per_s", self.gb_per_s), ("collective_us", self.collective_us)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a positive number, got {describe(value)}")


@dataclass(frozen=True)
class BetweenHosts:
    """Bytes that a rank sends to other hosts, (out, back): by host, and by both exchanges between all ranks alike."""

    by_host: tuple[float, float]
    gathered: tuple[float, float]
    counted: tuple[float, float]


def bytes_between_hosts(layer: MoeLayer, max_tokens: int, presum: bool) -> BetweenHosts:
    """Return the bytes of a layer. max_tokens: of a rank, for which exchanges of constant sizes have room."""
    others, k, row = layer.num_hosts - 1, layer.num_topk, BF16_BYTES * layer.hidden
    token = parcel_bytes(layer)
    elsewhere = others * layer.num_ranks
    needed = 1 - (1 - 1 / layer.num_gpus) ** k
    sent = layer.num_tokens * row * k * others / layer.num_hosts
    return BetweenHosts(
        (others * max_tokens * token, others * max_tokens * row * (1 if presum else k)),
        (elsewhere * max_tokens * token, elsewhere * max_tokens * row * k),
        (elsewhere * layer.num_tokens * token * needed, sent),
    )


def parcel_bytes(layer: MoeLayer) -> float:
    """Return the bytes of a token as it crosses: quantised, with ids and weights of all its slots."""
    return layer.row_bytes(layer.hidden) + WEIGHT_AND_SLOT_BYTES * layer.num_topk


def steps_by_host(
    layer: MoeLayer, machine: Machine, l1: Blocks, l2: Blocks, presum: bool, network: Network, max_tokens: int,
    one_launch: bool,
) -> tuple[Step, ...]:  # fmt: skip
    """Return router, rail out, dispatch, L1, L2, combine, rail back. one_launch: L1 and L2 are."""
    router, _, first, second, _ = five_steps(layer, machine, l1, l2, False, one_launch)
    out, back = bytes_between_hosts(layer, max_tokens, presum).by_host
    return (
        router, _rail_out(layer, machine, network, out), _dispatch_on_host(layer, machine), first, second,
        _combine_on_host(layer, machine, presum), _rail_back(layer, machine, network, back, presum),
    )  # fmt: skip


def _rail_out(layer: MoeLayer, machine: Machine, network: Network, num_bytes: float) -> Step:
    token, hosts = parcel_bytes(layer), layer.num_hosts
    kept = hosts * layer.num_tokens * (1 - (1 - 1 / hosts) ** layer.num_topk)
    packed = layer.num_tokens * (BF16_BYTES * layer.hidden + token)
    return with_pass(
        _sent("rail out", machine, network, num_bytes), machine, packed + 2 * kept * token, machine.launch_us
    )


def _dispatch_on_host(layer: MoeLayer, machine: Machine) -> Step:
    row = layer.row_bytes(layer.hidden) + WEIGHT_AND_SLOT_BYTES
    return step_of(
        "dispatch", machine, hbm_bytes=(taken_tokens(layer) + layer.num_rows) * row,
        nvlink_bytes=pulled_tokens(layer) * row, nvlink_gb_per_s=machine.pull_gb_per_s,
        round_trips=2 if layer.num_ranks > 1 else 0,
    )  # fmt: skip


def _combine_on_host(layer: MoeLayer, machine: Machine, presum: bool) -> Step:
    rows = layer.num_rows + layer.num_hosts * layer.num_tokens if presum else 0
    met = step_of("combine", machine, round_trips=1 if layer.num_ranks > 1 else 0)
    return with_pass(met, machine, BF16_BYTES * layer.hidden * rows, machine.launch_us) if presum else met


def _rail_back(layer: MoeLayer, machine: Machine, network: Network, num_bytes: float, presum: bool) -> Step:
    rows = layer.num_tokens * (1 + (layer.num_hosts if presum else layer.num_topk))
    sent = _sent("rail back", machine, network, num_bytes)
    return with_pass(sent, machine, BF16_BYTES * layer.hidden * rows, machine.launch_us)


def _sent(name: str, machine: Machine, network: Network, num_bytes: float) -> Step:
    """Return a collective's step: its time without bytes, which is no launch of ours, and the bytes."""
    us = num_bytes / network.gb_per_s / 1e3
    step = step_of(name, machine)
    fixed_us = network.collective_us
    return replace(step, network_bytes=num_bytes, network_us=us, fixed_us=fixed_us, time_us=fixed_us + us)
