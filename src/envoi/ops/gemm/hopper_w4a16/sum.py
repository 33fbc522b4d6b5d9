"""Sum of a token's rows, launched so that it begins while the GEMM that writes the rows ends; in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from envoi.epilogues.codes_triton import widen
from envoi.epilogues.device import bf16
from envoi.runtime import devices
from envoi.runtime.math import next_power_of_2

COLUMNS = 512  # of a program


@triton.jit
def sum_kernel(
    rows, slot_to_pos, out, width, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr
):
    """Store the sum of a token's rows in the order of its slots, in float32, rounded once.

    EARLY: slot_to_pos is there before the launch in front ends, so that it is read meanwhile.
    """
    positions = ()
    if EARLY:
        # Past the L1 cache, which may have what was there before.
        for s in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            positions += (tl.load(slot_to_pos + tl.program_id(0) * K + s, cache_modifier=".cg"),)
    if OVERLAP:
        gdc_wait()
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):  # unrolled: all loads are under way before the first sum
        pos = positions[s] if EARLY else tl.load(slot_to_pos + m * K + s)
        at = rows + pos.to(tl.int64) * width + columns
        total += widen(tl.load(at, mask=(columns < width) & (pos >= 0), other=0.0))
    tl.store(out + m.to(tl.int64) * width + columns, bf16(total), mask=columns < width)


def sum_launch(
    rows: torch.Tensor, slot_to_pos: torch.Tensor, out: torch.Tensor, early: bool = False
) -> tuple[Any, tuple[int, ...], tuple, dict[str, Any]]:
    """Build the launch that sums rows [P, H] bf16 at slot_to_pos [M, k] int32, -1 = none, into out [M, H] bf16.

    early: slot_to_pos was written before the launch in front of this one began.
    """
    (M, k), H, on_gpu = slot_to_pos.shape, rows.shape[1], devices.on_gpu(out.device)
    block = min(COLUMNS, next_power_of_2(H))
    arguments = rows, slot_to_pos, out, H, k, block, on_gpu, early
    return sum_kernel, (M, -(-H // block)), arguments, {"num_warps": 4, "launch_pdl": on_gpu}
