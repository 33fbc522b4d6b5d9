"""Time an L1 that quantises by pairs of tiles beside one in bf16 and the kernel that quantises, in turns of one run.

    python tools/time_pairs.py                                  on an H200: the shapes of SHAPES, about 90 s
    python tools/time_pairs.py --shape 12288x2048x4096x64       rows, intermediate, hidden, experts

Both are replayed from CUDA graphs, with an empty L2 cache, a round of all contenders at a time, and have the same bits,
which is checked first. Printed per shape: us of L1 with the kernel after it, of L1 by pairs in the config that is
chosen and in others that can run, the two L1 in bf16 alone; then what `envoi.moe` would choose.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from envoi.bench.timing import Clock
from envoi.bench.trial import generator
from envoi.epilogue.library import expert_l1
from envoi.gemm.grouping import EXPERTS_ROWS
from envoi.gemm.hopper import host, pairs, tune
from envoi.gemm.hopper.config import Config, candidates
from envoi.moe.permute import quantize_rows
from envoi.quant import SCHEMES
from envoi.runtime.devices import num_sms
from envoi.types import QuantTensor

ROWS = EXPERTS_ROWS
REPEAT = 60


@dataclass(frozen=True)
class Shape:
    """Rows of all experts, their intermediate and hidden size, and their number; what the rows are those of."""

    rows: int
    intermediate: int
    hidden: int
    num_experts: int
    about: str = ""

    def __str__(self) -> str:
        return f"{self.rows}x{self.intermediate}x{self.hidden}x{self.num_experts} {self.about}".strip()


SHAPES = (
    Shape(12288, 2048, 4096, 32, "2048 tokens, top-6 of 32"),
    Shape(49152, 2048, 4096, 32, "8192 tokens, top-6 of 32"),
    Shape(12288, 2048, 4096, 64, "4 ranks of 2048 tokens, top-6 of 256"),
    Shape(49152, 2048, 4096, 64, "4 ranks of 8192 tokens"),
    Shape(3072, 2048, 4096, 64, "4 ranks of 512 tokens"),
    Shape(384, 2048, 4096, 64, "4 ranks of 64 tokens"),
    Shape(16384, 768, 2048, 32, "4 ranks of 2048 tokens, top-8 of 128"),
    Shape(65536, 768, 2048, 32, "4 ranks of 8192 tokens"),
    Shape(16384, 2048, 7168, 64, "4 ranks of 2048 tokens, top-8 of 256"),
)


@dataclass(frozen=True)
class Inputs:
    """Rows by expert and L1's weights in fp8_block128, as after uniform random routing."""

    rows: QuantTensor
    weights: QuantTensor
    offsets: torch.Tensor
    operands: dict[str, torch.Tensor]

    @staticmethod
    def of(shape: Shape) -> "Inputs":
        """Make the inputs of a shape: random codes, and scale factors about 1 / sqrt(hidden)."""
        device = torch.device("cuda")
        source = generator(device, shape.rows, shape.num_experts)
        E, N, K = shape.num_experts, 2 * shape.intermediate, shape.hidden

        def matrix(*size: int, group: tuple[int, int], scale: float) -> QuantTensor:
            values = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
            for part in values.view(-1, K).split(1 << 16):
                part.copy_(torch.randn(part.shape, generator=source, device=device))
            *lead, R = size[:-1]
            sf = torch.rand(*lead, -(-R // group[0]), K // 128, generator=source, device=device) * scale + scale
            return QuantTensor(values, sf, group)

        drawn = torch.randint(0, E, (shape.rows,), generator=source, device=device)
        counts = torch.bincount(drawn, minlength=E)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        rows = matrix(shape.rows, K, group=(1, 128), scale=1.0)
        weights = matrix(E, N, K, group=(128, 128), scale=K**-0.5)
        return Inputs(rows, weights, offsets, {"weight": torch.rand(shape.rows, generator=source, device=device)})


def run(given: Inputs, ir, config: Config | None = None) -> list[torch.Tensor]:
    """Run L1 with this epilogue, in the chosen config or in another."""
    if config is None:
        return host.run_gemm(given.rows, given.weights, given.offsets, ir, torch.bfloat16, given.operands, ROWS)
    choose = tune.choose
    tune.choose = lambda *_: config
    try:
        return run(given, ir)
    finally:
        tune.choose = choose


def after(given: Inputs, ir) -> list[torch.Tensor]:
    """Run L1 in bf16 and the kernel that quantises."""
    (stored,) = run(given, ir)
    q = quantize_rows(stored, given.offsets, SCHEMES["fp8_1x128"])
    return [q.values, q.sf]


def contenders(given: Inputs, layout: str) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return the calls to time: the kernel after L1, pairs as chosen, pairs in all configs, L1 in bf16 alone."""
    in_bf16 = expert_l1("swiglu", None, False, None, layout).ir
    in_pairs = expert_l1("swiglu", None, False, "fp8_1x128", layout, True).ir
    call, chosen = planned(given, in_pairs)
    others = [c for c in candidates(host.problem_of(call), call.code) if c != chosen]
    if given.rows.shape[0] // given.weights.shape[0] > host.FEW_TOKENS:
        others = [c for c in others if c.num_consumers == 2]
    found = {"after": partial(after, given, in_bf16), f"pairs, {chosen.label()}": partial(run, given, in_pairs)}
    found |= {f"pairs, {config.label()}": partial(run, given, in_pairs, config) for config in others}
    return found | {"bf16 alone": partial(run, given, in_bf16)}


def planned(given: Inputs, ir) -> tuple[host.Call, Config]:
    """Return the call and the config that the host chooses."""
    return host.planned(
        given.rows, given.weights, given.offsets, ir, torch.bfloat16, given.operands,
        num_sms(given.offsets.device), ROWS,
    )  # fmt: skip


def different(got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
    """Return how many bytes of the values and of the scale factors differ."""
    return sum(int((x.view(torch.uint8) != y.view(torch.uint8)).sum()) for x, y in zip(got, want, strict=True))


def measure(shape: Shape, layout: str, clock: Clock) -> int:
    """Print the times of a shape; return how many bytes of the pairs' results differ from those of the kernel after."""
    given = Inputs.of(shape)
    runs = contenders(given, layout)
    want = runs["after"]()
    wrong = {name: different(call(), want) for name, call in runs.items() if name.startswith("pairs")}
    times = clock.rounds({name: clock.graph(call) for name, call in runs.items()})
    first = times["after"].p50_us
    chosen = pairs.quantizes_in_pairs(
        given.rows, given.weights, expert_l1("swiglu", None, False, "fp8_1x128", layout, True).ir,
        expert_l1("swiglu", None, False, None, layout).ir, replace(ROWS, expected=shape.rows),
    )  # fmt: skip
    print(f"{shape}, {layout}; chosen: {'pairs' if chosen else 'after'}")
    for name, t in times.items():
        note = f"   {wrong[name]} bytes DIFFER" if wrong.get(name) else ""
        us = f"{t.p50_us:8.1f} [{t.p10_us:.1f}, {t.p90_us:.1f}] us {t.p50_us - first:+7.1f}"
        print(f"    {us}   {name}{note}", flush=True)
    return sum(wrong.values())


def main() -> int:
    """Time the shapes of the command line; return 1 if any bits differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", help="rows x intermediate x hidden x experts; may be repeated")
    parser.add_argument("--layout", choices=("interleaved", "concat"), default="concat")
    parser.add_argument("--repeat", type=int, default=REPEAT)
    args = parser.parse_args()
    shapes = [Shape(*map(int, text.split("x"))) for text in args.shape or ()] or SHAPES
    clock = Clock(torch.device("cuda"), args.repeat)
    return int(sum([measure(shape, args.layout, clock) for shape in shapes]) > 0)


if __name__ == "__main__":
    sys.exit(main())
