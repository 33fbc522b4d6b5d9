"""Model of a grouped GEMM's time against measurements, and its constants against their sources."""

from pathlib import Path
from statistics import median

import pytest

from bench import evidence
from envoi.estimates import MoeLayer, estimate, total
from envoi.estimates.blocks import Blocks
from envoi.estimates.exchange import WITHIN_A_HOST
from envoi.estimates.layer import rows_per_expert
from envoi.estimates.machines import H200
from envoi.estimates.steps import Network, gemm_us, step_of
from envoi.ops.moe.choose import ONE_LAUNCH_ROWS_AGAIN

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "h200.jsonl"
ONE_LAUNCH_SINCE, WITH_MANY_ROWS_SINCE = "2026-11-26", "2026-11-27"  # L1 and L2: few rows an expert; 768 and more
BYTES = {"bf16": 2, "fp8_row": 1, "fp8_block128": 1, "mxfp4": 17 / 32, "mxfp4_mxfp8": 17 / 32}


def measured(suite: str, case: str) -> evidence.Measurement:
    """The newest of a case."""
    (found,) = (m for m in evidence.latest(evidence.read(RESULTS)) if (m.suite, m.case) == (suite, case))
    return found


def median_us(suite: str, case: str) -> float:
    """The median over all runs of a case: machines of one kind differ by several percent."""
    return median(m.ours_us for m in evidence.read(RESULTS) if (m.suite, m.case) == (suite, case))


def predicted(rows: int, experts: int, n: int, k: int, format: str, block_m: int, block_n: int) -> float:
    """Return the us of a grouped GEMM whose experts have equally many rows, stored in bf16."""
    tiles = experts * -(-rows // block_m) * -(-n // block_n)
    blocks = Blocks(block_m, block_n, 0, 0, tiles)
    tokens = experts * rows * (k * (2 if format.startswith("mxfp4") else BYTES[format]) + 2 * n)
    hbm = experts * n * k * BYTES[format] + tokens
    return step_of("GEMM", H200, compute_us=gemm_us(blocks, k, format, H200), hbm_bytes=hbm).time_us


@pytest.mark.parametrize(
    ("format", "tile"), [("bf16", (64, 256)), ("fp8_row", (64, 256)), ("fp8_block128", (128, 128))]
)
def test_many_rows_an_expert(format, tile):
    took = median_us("gemm_grouped", f"32 experts x 256, 7168 -> 4096 {format}")
    assert predicted(256, 32, 4096, 7168, format, *tile) == pytest.approx(took, rel=0.1)


@pytest.mark.parametrize(("rows", "block_m"), [(16, 8), (64, 64)])
def test_few_rows_an_expert(rows, block_m):
    took = median_us("gemm_weights", f"32 experts x {rows}, 4096 -> 4096 bf16")
    assert predicted(rows, 32, 4096, 4096, "bf16", block_m, 128) == pytest.approx(took, rel=0.1)


# The model omits the wait for the rank with most rows: 7168/2048/256/8 with 2048 tokens on two GPUs takes 1.13 of it,
# all else in fp8_block128 less than 1.07. It has the tiles of 2026-11-28, which it expects to be faster than those of
# older rows: fp8_row's of one GPU are of 2026-11-22, those of four GPUs of 2026-11-26. Of mxfp4 with 512 tokens, a tile
# an expert, it has the costs of tiles before those became faster: 12 % too much.
@pytest.mark.parametrize(
    ("num_gpus", "format", "within"),
    [(4, "fp8_block128", 0.06), (2, "fp8_block128", 0.12), (4, "", 0.12), (1, "", 0.19), (1, "mxfp4", 0.13)],
)
def test_the_staged_path(num_gpus, format, within, monkeypatch):
    """Test the newest measurement of each case; its baseline has inputs in place, without the router."""
    now = total.takes_one_launch
    found = [m for m in evidence.latest(evidence.read(RESULTS)) if m.suite == "moe" and m.num_gpus == num_gpus]
    cases = [m for m in found if f" {format} " in m.case or not format]
    cases = [m for m in cases if len(m.case.split()) == 3]  # neither skewed nor another transport
    cases = [m for m in cases if "mxfp4_mxfp8" not in m.case]  # measured with kernels it had before
    assert len(cases) >= 4
    for m in cases:
        sizes, of, tokens = m.case.split()
        layer = MoeLayer(*map(int, sizes.split("/")), int(tokens.removeprefix("tokens=")), num_gpus, of)
        since = WITH_MANY_ROWS_SINCE if rows_per_expert(layer) >= ONE_LAUNCH_ROWS_AGAIN else ONE_LAUNCH_SINCE
        monkeypatch.setattr(total, "takes_one_launch", now if m.date >= since else lambda *_: False)
        plan = estimate(layer)
        assert plan.staged_us - plan.steps[0].time_us == pytest.approx(m.ours_us, rel=within), m.case


def test_two_hosts():
    """Test the newest measurements by host, of two and four ranks that NCCL connects within one machine."""
    found = [m for m in evidence.latest(evidence.read(RESULTS)) if m.suite == "moe" and " by host" in m.case]
    assert {m.num_gpus for m in found} == {2, 4} and len(found) >= 16
    for m in found:
        sizes, format, tokens, *_, last = m.case.split()
        num_tokens, num_gpus = int(tokens.removeprefix("tokens=")), m.num_gpus // 2
        layer = MoeLayer(*map(int, sizes.split("/")), num_tokens, num_gpus, format, num_hosts=2)
        plan = estimate(layer, network=Network(WITHIN_A_HOST.gb_per_s), presum=last == "sums")
        off = 0.08 if m.num_gpus == 2 or "fp8" in format else 0.18
        assert plan.staged_us - plan.steps[0].time_us == pytest.approx(m.ours_us, rel=off), m.case


@pytest.mark.parametrize(("suite", "format"), [("gemm", "bf16"), ("gemm_fp8", "fp8_row"), ("gemm_fp8", "fp8_block128")])
def test_rates_are_those_of_the_results(suite, format):
    assert measured(suite, f"8192x4096x7168 {format}").tflops == pytest.approx(H200.tflops[format], rel=0.1)
