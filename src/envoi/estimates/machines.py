"""Performance constants of the GPUs: those of `envoi.estimates` alone, beside the rates that all models share.

H200: measured on the GPUs that bench/results names. B200: the vendor's peaks; nothing has been run there.
"""

from dataclasses import dataclass

from envoi.check import expect_choice
from envoi.ops.gemm.hopper_w4a8.config import TILES
from envoi.runtime import devices


@dataclass(frozen=True)
class Machine:
    """GPU model; several GPUs share one NVLink domain.

    measured: False = the vendor's peaks, so predicted times are lower bounds.
    memory_gb: per GPU.
    tflops: by format, of a large GEMM.
    widened_per_us: weights that all SMs widen to bf16 per us, for formats without tensor-core support; 0 = none needed.
    widened_tflops: highest rate of a GEMM with widening, for any number of tokens.
    w4a16_tflops: rate of a GEMM of bf16 tokens on 4-bit weights, by tokens of a tile; empty where no kernel is known.
    w4a16_few_tflops: rate of the kernel for few tokens, whose SMs share all tiles evenly, by tokens of a tile.
    hbm_gb_per_s: read and written together.
    pull_gb_per_s, push_gb_per_s: read from a peer, written to a peer, in one direction.
    launch_us: a kernel's launch up to its first product, plus its last tile. dependent_launch_us: with programmatic
        dependent launch. round_trip_us: a flag to a peer and
        back, the cost of a barrier across ranks.
    unhidden: the fraction of the shorter resources' times that isn't hidden by the longest.
    tile_us: by format, what a tile of 128 x 128 takes beside its products, where that is known. one_launch_hbm: factor
    of hbm_gb_per_s where L1 and L2 are one launch, in which no SM waits for another. sort_us, slot_us: between ranks,
    the two launches in front of the pull, which quantise tokens and sort slots, beside their bytes: for any number of
    slots, and for each of a rank's.
    """

    name: str
    arch: str
    measured: bool
    num_sms: int
    memory_gb: float
    tflops: dict[str, float]
    widened_per_us: float
    widened_tflops: float
    w4a16_tflops: dict[int, float]
    w4a16_few_tflops: dict[int, float]
    hbm_gb_per_s: float
    pull_gb_per_s: float
    push_gb_per_s: float
    launch_us: float
    dependent_launch_us: float
    round_trip_us: float
    unhidden: float
    tile_us: dict[str, float]
    one_launch_hbm: float
    sort_us: float
    slot_us: float

    def gemm_tflops(self, format: str, block_m: int, shared_evenly: bool = False) -> float:
        """Return the rate of a GEMM in tiles of block_m tokens; each tile widens its weights again."""
        w4a16 = self.w4a16_few_tflops if shared_evenly else self.w4a16_tflops
        if format in W4A16 and block_m in w4a16:
            return w4a16[block_m]
        if format not in WIDENED or not self.widened_per_us:
            return self.tflops[format]
        flops = 2 * block_m  # per weight
        return min(self.widened_tflops, flops / (1e6 / self.widened_per_us + flops / self.tflops[format]))


WIDENED = ("mxfp8", "mxfp4", "mxfp4_mxfp8", "nvfp4", "int4")
W4A16 = ("mxfp4", "mxfp4_mxfp8", "nvfp4", "int4")  # MXFP8's numbers are read as bf16
W4A8 = "mxfp4_fp8"

H200 = Machine(
    name="H200", arch="sm_90", measured=True, num_sms=devices.H200.num_sms,
    memory_gb=141,
    tflops={
        # bench/results, suites gemm and gemm_fp8, 8192x4096x7168.
        "bf16": 745, "fp8_row": 1474, "fp8_block128": 1155,
        # notes/2026-11-mxfp4-sm90.md, 32 experts of 4096x4096: from 16 to 64 tokens a tile the time grows by 0.79 us a
        # token. More than bf16 because widening hides some products. mxfp8, nvfp4, int4: assumed equal.
        "mxfp8": 1353, "mxfp4": 1353, "mxfp4_mxfp8": 1353, "nvfp4": 1353, "int4": 1353,
        "mxfp4_fp8": 1200,  # notes/2026-11-fp8-fp4.md, rows that fill tiles counted
    },
    widened_per_us=7.39e6,  # same note, at 0 tokens per tile and without launch_us and unhidden reads: 73 us
    widened_tflops=610,  # same note, 32 experts of 4096x4096 with about 384 tokens, rows that fill tiles counted
    # notes/2026-11-fp8-fp4.md: an SM takes 18.5 us for a tile of 128 x 128 with K = 2880; other tiles by their relative
    # times. Few tokens (notes/2026-11-decode-w4a16.md): 72 or 80 ns of an SM for 64 x 64 weights, fitted together with
    # dependent_launch_us to the suite moe on two machines.
    w4a16_tflops={size: 673 / 128 * size / costs[size] for size, _, costs in TILES["bf16"]},
    w4a16_few_tflops={8: 120, 16: 216},
    hbm_gb_per_s=devices.H200.hbm_gb_per_s,
    # Between two H200s, 16-byte loads and stores of a Triton kernel, a CTA on each SM. With 32 CTAs: 311 and 278. These
    # and round_trip_us are not in bench/results yet.
    pull_gb_per_s=334, push_gb_per_s=362,
    launch_us=devices.H200.launch_us,
    dependent_launch_us=4.2,  # bench/results, suite moe, mxfp4: a launch that begins before the previous one ends
    round_trip_us=2.6,  # between two H200s, atomics of system scope
    unhidden=0.1,  # bench/results, suites gemm_grouped and gemm_weights, bf16 and FP8
    # Fitted to bench/results, suite moe, fp8_block128, on two and four GPUs.
    tile_us={"fp8_block128": 0.6}, one_launch_hbm=1.06, sort_us=6.0, slot_us=6e-4,
)  # fmt: skip

B200 = Machine(
    name="B200", arch="sm_100", measured=False, num_sms=148, memory_gb=180,
    # Dense peaks of HGX B200, an eighth of the board's. E2M1 with E4M3 runs at FP8's rate; with bf16 it is widened.
    tflops={
        "bf16": 2250, "fp8_row": 4500, "fp8_block128": 4500, "mxfp8": 4500, "mxfp4": 2250, "mxfp4_mxfp8": 4500,
        "mxfp4_fp8": 4500, "nvfp4": 2250, "int4": 2250,
    },
    widened_per_us=0, widened_tflops=0, w4a16_tflops={}, w4a16_few_tflops={},
    hbm_gb_per_s=8000, pull_gb_per_s=900, push_gb_per_s=900,
    launch_us=devices.H200.launch_us, dependent_launch_us=4.2, round_trip_us=2.6,  # H200's: no measurement of a B200
    unhidden=0, tile_us={}, one_launch_hbm=1, sort_us=0, slot_us=0,
)  # fmt: skip

MACHINES = {machine.arch: machine for machine in (H200, B200)}


def machine_of(arch: str) -> Machine:
    """Return the machine model of an architecture. Raises ValueError that lists the supported ones."""
    return MACHINES[expect_choice("arch", arch, MACHINES)]
