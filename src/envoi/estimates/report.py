"""`envoi estimate`: an estimate as text: tables, the steps as a picture, sizes."""

import argparse
import json
import sys
from typing import Any

from envoi.check import expect_int
from envoi.estimates.blocks import Blocks
from envoi.estimates.layer import MAX_HOSTS, MoeLayer
from envoi.estimates.steps import RESOURCES, Network, Step
from envoi.estimates.total import GB, Estimate, estimate
from envoi.table import align, fold, number

BARS = 60  # of all steps together in the picture
FILLS = {"compute": "█", "HBM": "▓", "NVLink": "▒", "network": "░", "latency": "·"}
ASCII = str.maketrans("█▓▒░·", "#=-~.")
PRESUM = "; rows of a token that meet on a {} are summed there before they go back"


def run(args: argparse.Namespace) -> int:
    """Print the estimate of a layer; return 0. Raises ValueError for an invalid layer."""
    sizes = args.hidden, args.inter, args.experts, args.topk, args.tokens, args.gpus, args.format
    layer = MoeLayer(*sizes, expect_int("--hosts", args.hosts, 1, MAX_HOSTS))
    given = {"gb_per_s": args.network, "collective_us": args.collective}
    given = {name: value for name, value in given.items() if value is not None}
    if args.hosts == 1 and (given or args.presum):
        option = "--presum" if not given else "--network" if args.network is not None else "--collective"
        raise ValueError(f"{option}: expected it only beside --hosts 2 or more")
    found = estimate(layer, args.arch, args.max_tokens, Network(**given), True if args.presum else None)
    print(json.dumps(found.to_dict(), indent=2) if args.json else encodable(to_text(found), sys.stdout))
    return 0


def to_text(found: Estimate) -> str:
    """Return title, tables of times and of work, picture, sizes, notes: in 80 columns."""
    names = resources_of(found)
    header = ("step", "us", *(f"{name} us" for name in names), "fixed us", "bound by")
    times = align(header, [_times(step, names) for step in found.steps], left=(0, len(header) - 1))
    wires = [f"{name} MB" for name in names if name not in ("compute", "HBM")]
    work = align(("step", "GFLOP", "HBM MB", *wires), [_work(step, len(wires)) for step in found.steps])
    notes = [f"note: {note}" for note in found.notes]
    prose = map(fold, (_sum(found), *_sizes(found), *notes))
    return "\n".join([fold(title(found)), "", times, "", work, "", *_picture(found), "", *prose])


def encodable(text: str, stream: Any) -> str:
    """Return the text, with bars of ASCII if the stream's encoding has no blocks."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(ASCII)
    return text


def resources_of(found: Estimate) -> tuple[str, ...]:
    """Return the names of the resources that the steps need: the network only between hosts."""
    return RESOURCES if found.layer.num_hosts > 1 else RESOURCES[:-1]


def title(found: Estimate) -> str:
    """Return one line with the layer and the machine."""
    layer, machine = found.layer, found.machine
    where = f"{layer.num_hosts} x {layer.num_ranks}" if layer.num_hosts > 1 else str(layer.num_ranks)
    return (
        f"hidden {layer.hidden}, intermediate {layer.intermediate}, {layer.num_experts} experts, top-{layer.num_topk}, "
        f"{layer.format}; {layer.num_tokens} tokens on each of {where} x {machine.name} ({machine.arch})"
    )


def _times(step: Step, names: tuple[str, ...]) -> list[str]:
    parts = (step.parts_us[name] for name in names)
    return [step.name, *map(_short, (step.time_us, *parts, step.fixed_us)), step.bound_by]


def _work(step: Step, num_wires: int) -> list[str]:
    wires = (step.nvlink_bytes, step.network_bytes)[:num_wires]
    return [step.name, *map(_short, (step.flops / 1e9, *(x / 1e6 for x in (step.hbm_bytes, *wires))))]


def _short(value: float) -> str:
    return number(value) if value else "-"


def _picture(found: Estimate) -> list[str]:
    """Return the lines of the picture; each step's bar begins at the end of the previous one."""
    lines, start = [], 0.0
    for step in found.steps:
        first, last = (round(at / found.staged_us * BARS) for at in (start, start + step.time_us))
        bar = " " * first + FILLS[step.bound_by] * max(1, last - first)
        lines.append(f"{step.name:<9} {bar} {number(step.time_us)}")
        start += step.time_us
    used = (*resources_of(found), "latency")
    legend = "  ".join(f"{fill} {name}" for name, fill in FILLS.items() if name in used)
    return [*lines, f"{'':9} bound by {legend}"]


def _sum(found: Estimate) -> str:
    presum = PRESUM.format("host" if found.layer.num_hosts > 1 else "rank") if found.presum else ""
    return f"staged: {number(found.staged_us)} us, the steps one after the other{presum}"


def _between_hosts(whole: Estimate) -> list[str]:
    """Return the line on bytes between hosts, if there are several."""
    found, network = whole.between_hosts, whole.network
    if found is None or network is None:
        return []
    sent, gathered, counted = (
        " and ".join(number(x / 1e6) for x in pair) for pair in (found.by_host, found.gathered, found.counted)
    )
    return [
        f"between hosts: {sent} MB out and back a GPU; {gathered} if all ranks gathered tokens alike, {counted} if "
        f"counted; at {number(network.gb_per_s)} GB/s, and {number(network.collective_us)} us a collective"
    ]


def _sizes(found: Estimate) -> list[str]:
    layer = found.layer
    return [
        _gemm("L1", found, found.l1, layer.l1_nk),
        _gemm("L2", found, found.l2, layer.l2_nk),
        f"pool: {found.pool_rows} rows, one for each slot of {found.max_tokens} tokens a GPU; buffers "
        f"{number(found.buffer_bytes / GB)} GB, weights {number(found.weight_bytes / GB)} GB",
        *["L1 and L2: one launch"] * found.one_launch, *_between_hosts(found),
    ]  # fmt: skip


def _gemm(name: str, found: Estimate, blocks: Blocks, nk: tuple[int, int]) -> str:
    num_sms = found.machine.num_sms
    rounds = number(blocks.rounds(num_sms)) if blocks.shared_evenly else str(blocks.rounds(num_sms))
    return (
        f"{name}: {found.layer.num_rows} x {nk[0]} x {nk[1]} in tiles of {blocks.block_m} x {blocks.block_n}, "
        f"{blocks.num_stages} stages of {blocks.block_k}; {blocks.num_tiles:.0f} tiles, "
        f"{rounds} rounds on {num_sms} SMs"
    )
