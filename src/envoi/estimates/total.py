"""`estimate`: an Estimate from the sizes of a layer."""

from dataclasses import asdict, dataclass
from typing import Any

from envoi.check import expect_int
from envoi.estimates.blocks import Blocks, l1_blocks, l2_blocks, takes_one_launch
from envoi.estimates.exchange import presum_pays
from envoi.estimates.layer import MAX_TOKENS, MoeLayer
from envoi.estimates.machines import W4A16, Machine, machine_of
from envoi.estimates.steps import BetweenHosts, Network, Step, bytes_between_hosts, five_steps, steps_by_host

GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Estimate of a layer for one rank. Bytes are bytes of this rank, times are in us.

    l1, l2: block sizes of the two grouped GEMMs. steps: router, dispatch, L1, L2, combine; with several hosts also
    those of `steps_by_host`. presum: a token's rows on the same rank, with several hosts on the same host, are summed
    there, and combine sends the sums; otherwise L2 sends the rows.
    max_tokens: per rank; sizes the buffers. pool_rows: rows that dispatch has room for, one for each slot of all ranks.
    weight_bytes: the experts. buffer_bytes: the pool, L1's output, and the buffer from which combine reads rows.
    notes: quantities that aren't measured, and paths without a kernel. network, between_hosts: None for one host.
    one_launch: L1 and L2 are one launch.
    """

    layer: MoeLayer
    machine: Machine
    l1: Blocks
    l2: Blocks
    steps: tuple[Step, ...]
    presum: bool
    max_tokens: int
    pool_rows: int
    weight_bytes: float
    buffer_bytes: float
    notes: tuple[str, ...]
    network: Network | None = None
    between_hosts: BetweenHosts | None = None
    one_launch: bool = False

    @property
    def staged_us(self) -> float:
        """Time of all steps, one after the other."""
        return sum(step.time_us for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and properties as JSON-compatible values."""
        found = asdict(self)
        for step, entry in zip(self.steps, found["steps"], strict=True):
            entry["bound_by"] = step.bound_by
        return found | {"staged_us": self.staged_us}


def estimate(
    layer: MoeLayer, arch: str = "sm_90", max_tokens: int | None = None, network: Network | None = None,
    presum: bool | None = None,
) -> Estimate:  # fmt: skip
    """Estimate a layer.

    arch: "sm_90" (H200) or "sm_100" (B200). max_tokens: per rank, sizes the buffers; default: layer.num_tokens.
    network: between hosts, if there are several; default: `Network()`. presum: sum rows before they are sent back;
    default: on one host if that is faster, on several no, which keeps the bits of one rank.

    Example: estimate(MoeLayer(4096, 2048, 256, 6, 2048, 8, "fp8_block128")) has 12288 rows per rank.

    Raises ValueError for anything but a MoeLayer, or if the layer doesn't fit the GPU.
    """
    if not isinstance(layer, MoeLayer):
        raise ValueError(f"layer: expected a MoeLayer, got {type(layer).__name__}")
    machine = machine_of(arch)
    if max_tokens is None:
        max_tokens = layer.num_tokens
    expect_int("max_tokens", max_tokens, layer.num_tokens, MAX_TOKENS)
    local = layer.num_local_experts
    l1, l2 = l1_blocks(layer, machine), l2_blocks(layer, machine)
    pool_rows = layer.num_gpus * max_tokens * layer.num_topk
    weight_bytes = local * (layer.weight_bytes(layer.l1_nk) + layer.weight_bytes(layer.l2_nk))
    row_bytes = layer.row_bytes(layer.hidden) + layer.row_bytes(layer.intermediate)
    several = layer.num_hosts > 1
    if presum is None:
        sizes = layer.hidden, layer.intermediate, layer.num_topk, max_tokens, layer.num_ranks, layer.format
        presum = not several and presum_pays(*sizes)
    returned = _returned_rows(layer, max_tokens, presum)
    buffer_bytes = pool_rows * row_bytes + 2.0 * returned * layer.hidden
    _check_memory(machine, weight_bytes, buffer_bytes)
    network = (network or Network()) if several else None
    one_launch = takes_one_launch(layer, machine)
    steps = five_steps(layer, machine, l1, l2, presum, one_launch)
    if network is not None:
        steps = steps_by_host(layer, machine, l1, l2, presum, network, max_tokens, one_launch)
    return Estimate(
        layer, machine, l1, l2, steps, presum, max_tokens, pool_rows, weight_bytes, buffer_bytes,
        _notes(layer, machine), network, bytes_between_hosts(layer, max_tokens, presum) if several else None,
        one_launch,
    )  # fmt: skip


def _returned_rows(layer: MoeLayer, max_tokens: int, presum: bool) -> int:
    """Return the rows in bf16 for which combine's buffers have room."""
    if layer.num_hosts == 1:
        return max_tokens * (layer.num_ranks if presum else layer.num_topk)
    exchanged = 2 * (1 if presum else 0) + (0 if presum else layer.num_topk)  # sums to send, and what comes
    return layer.num_hosts * max_tokens * (layer.num_topk + exchanged)


def _check_memory(machine: Machine, weight_bytes: float, buffer_bytes: float) -> None:
    if weight_bytes + buffer_bytes > machine.memory_gb * GB:
        raise ValueError(
            f"num_ranks: {weight_bytes / GB:.1f} GB of weights and {buffer_bytes / GB:.1f} GB of buffers a GPU don't "
            f"fit {machine.name}'s {machine.memory_gb:.0f} GB; take more GPUs, or fewer max_tokens"
        )


def _notes(layer: MoeLayer, machine: Machine) -> tuple[str, ...]:
    notes = []
    if layer.num_hosts > 1:
        notes.append("nothing has been measured between hosts: the network's rate and a collective's time are given")
    if not machine.measured:
        notes.append(f"rates of {machine.name} are the vendor's peaks, not measured: times are floors")
    elif layer.format == "mxfp8":
        notes.append(f"widening mxfp8 on {machine.arch} is taken to cost what widening mxfp4 does")
    elif layer.format in ("nvfp4", "int4"):
        notes.append(f"widening {layer.format} on {machine.arch} is taken to cost what widening mxfp4 does")
    if not machine.measured and layer.format in W4A16 and layer.formats.activations is None:
        kind = layer.format
        notes.append(f"{kind} has no kernel of its own on sm_100, where Triton's widens the weights: planned as bf16")
    if not machine.measured and layer.format == "fp8_block128":
        notes.append("fp8_block128 has no kernel on sm_100: no instruction there takes float32 factors along K")
    return tuple(notes)
