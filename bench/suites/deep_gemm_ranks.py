"""sgl-deep-gemm's one launch over ranks, measured in a process of its own, for `python -m bench --theirs`.

    torchrun --nproc-per-node 2 -m bench.suites.deep_gemm_ranks theirs.jsonl --case 4096/2048/256/6

It needs the torch that the library was built with, and no NCCL. Inputs are those of suite moe; the clock is that of
`python -m bench --theirs`. A case whose result is wrong isn't written.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.nn import functional

from bench import libraries, runner, theirs
from bench.shapes import Case, MoeShape
from bench.suites import cases, repeat_of
from bench.suites.moe import draw
from bench.suites.moe_peers import MAX_ERROR
from bench.suites.peers import Weight, deep_gemm_moe
from bench.timing import Clock, symmetric_barrier
from bench.trial import sample_rows
from envoi.tune.problems import relative_error
from envoi.types import Routing

BASELINE = "sgl_deep_gemm"
FORMAT = "fp8_block128"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases and append them to a file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file that lines are appended to")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this")
    parser.add_argument("--repeat", type=int, default=repeat_of("moe", True), help="default: %(default)s")
    args = parser.parse_args(arguments)
    device = runner.pick_device("auto")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    clock = Clock(device, args.repeat, meet=symmetric_barrier(device))
    for case in chosen(args.case):
        with torch.no_grad():
            found = measure(case, clock)
        gc.collect()
        if dist.get_rank() == 0:
            print(f"{case.name}: {found.p50_us:.1f} us, error {found.error:.1e}", flush=True)
            theirs.write(args.out, found)
    dist.destroy_process_group()
    return 0


def chosen(parts: Sequence[str]) -> list[Case]:
    """Return the cases of suite moe that the library can run over ranks: even or uneven, over NVLink."""
    return [case for case in cases("moe") if _fits(case) and (not parts or any(part in case.name for part in parts))]


def _fits(case: Case) -> bool:
    shape = cast(MoeShape, case.shape)
    return case.on_cuda and case.over_ranks and not shape.transport and shape.format == FORMAT


def measure(case: Case, clock: Clock) -> theirs.Theirs:
    """Measure one case. Collective. Raises RuntimeError if the result is wrong."""
    shape, device = cast(MoeShape, case.shape), clock.device
    ranks = runner.Ranks(dist.get_rank(), dist.get_world_size(), device)
    tokens, routing, gate_up, down = draw(shape, device, ranks.rank, ranks.num_ranks)
    run, close, weights = deep_gemm_moe(shape, tokens, routing, gate_up, down)
    del gate_up, down
    rows = sample_rows(len(tokens), device)
    error = worst(relative_error(run()[rows], exact(tokens[rows], routing, rows, weights)))
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{case.name}: its result differs from float64's by {error:.1e}")
    timing = clock.ranks(clock.graph(run))
    dist.barrier()
    close()
    return theirs.Theirs(
        suite=case.suite, case=case.name, baseline=BASELINE, num_gpus=ranks.num_ranks, gpus=runner.all_gpus(ranks),
        version=str(libraries.versions([BASELINE], {})[libraries.OF_BASELINE[BASELINE]]), torch=torch.__version__,
        error=error, p50_us=timing.p50_us, p10_us=timing.p10_us, p90_us=timing.p90_us, n=timing.n,
    )  # fmt: skip


def worst(error: float) -> float:
    """Return the largest of all ranks. Collective."""
    found = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def exact(x: torch.Tensor, routing: Routing, rows: torch.Tensor, weights: tuple[Weight, Weight]) -> torch.Tensor:
    """Return float64 outputs of this rank's tokens at `rows`: each rank adds its experts' part. Collective."""
    everyone = [_gather(part) for part in (x.float(), routing.topk_weights[rows], routing.topk_ids[rows])]
    tokens, shares, ids = (part.to(x.device) for part in everyone)
    total = torch.zeros(tokens.shape, dtype=torch.float64, device=x.device)
    num_local = len(weights[0][0])
    for local in range(num_local):
        token, slot = (ids == local + num_local * dist.get_rank()).nonzero(as_tuple=True)
        if len(token):
            gate_up, down = (_widened(values[local], sf[local]) for values, sf in weights)
            gate, up = (tokens[token].double() @ gate_up.T).chunk(2, -1)
            part = (functional.silu(gate) * up) @ down.T
            total.index_add_(0, token, part * shares[token, slot].double().unsqueeze(1))
    summed = total.cpu()
    dist.all_reduce(summed)
    return summed[len(rows) * dist.get_rank() :][: len(rows)].to(x.device)


def _gather(x: torch.Tensor) -> torch.Tensor:
    """Gather on the host: the ranks' group is gloo's."""
    mine = x.cpu().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def _widened(values: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    return values.double() * sf.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


if __name__ == "__main__":
    sys.exit(main())
