"""Steps between hosts: a token crosses to another host once, between ranks of the same place, and comes back so.

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
from envoi.plan.blocks import Blocks
from envoi.plan.layer import WEIGHT_AND_SLOT_BYTES, MoeLayer, pulled_tokens, taken_tokens
from envoi.plan.machines import Machine
from envoi.plan.steps import BF16_BYTES, Step, five_steps, step_of, with_pass

NETWORK_GB_PER_S = 45.0  # estimate: what NCCL gets of 400 Gb/s a GPU
COLLECTIVE_US = 30.0  # estimate: NCCL's time for a few bytes between two ranks of a rail


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
    layer: MoeLayer, machine: Machine, l1: Blocks, l2: Blocks, presum: bool, network: Network, max_tokens: int
) -> tuple[Step, ...]:
    """Return router, rail out, dispatch, L1, L2, combine, rail back."""
    router, _, first, second, _ = five_steps(layer, machine, l1, l2, False)
    out, back = bytes_between_hosts(layer, max_tokens, presum).by_host
    return (
        router, _rail_out(layer, machine, network, out), _dispatch(layer, machine), first, second,
        _combine(layer, machine, presum), _rail_back(layer, machine, network, back, presum),
    )  # fmt: skip


def _rail_out(layer: MoeLayer, machine: Machine, network: Network, num_bytes: float) -> Step:
    token, hosts = parcel_bytes(layer), layer.num_hosts
    kept = hosts * layer.num_tokens * (1 - (1 - 1 / hosts) ** layer.num_topk)
    packed = layer.num_tokens * (BF16_BYTES * layer.hidden + token)
    return with_pass(
        _sent("rail out", machine, network, num_bytes), machine, packed + 2 * kept * token, machine.launch_us
    )


def _dispatch(layer: MoeLayer, machine: Machine) -> Step:
    row = layer.row_bytes(layer.hidden) + WEIGHT_AND_SLOT_BYTES
    return step_of(
        "dispatch", machine, hbm_bytes=(taken_tokens(layer) + layer.num_rows) * row,
        nvlink_bytes=pulled_tokens(layer) * row, nvlink_gb_per_s=machine.pull_gb_per_s,
        round_trips=2 if layer.num_ranks > 1 else 0,
    )  # fmt: skip


def _combine(layer: MoeLayer, machine: Machine, presum: bool) -> Step:
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
