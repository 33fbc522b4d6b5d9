"""Layout of the memory that ranks share."""

from dataclasses import replace

import torch

from envoi.ops.moe.one_launch.config import NUM_COUNTERS
from envoi.ops.moe.parallel.nvlink import SharedLayout, allocate
from envoi.runtime.program import tensors_in
from tests.helpers import fresh


def test_a_rank_has_room_for_a_row_a_slot_or_with_presum_for_one_from_each_rank():
    layout = SharedLayout(4, 8, 10, 2, 128, "fp8_block128")
    row = layout.max_tokens * layout.slot_bytes
    assert layout.regions.end - layout.regions.returned_rows == 2 * row
    summing = replace(layout, presum=True)
    assert summing.regions.end - summing.regions.returned_rows == 4 * row


def test_only_the_format_of_one_launch_has_its_counters():
    """L1 and L2 are one launch, or not, from call to call."""
    given = 0, [0, 4, 8], 1.0, torch.device("meta"), False
    other, blocks = (allocate(SharedLayout(2, 8, 10, 2, 128, name), *given) for name in ("fp8_row", "fp8_block128"))
    assert other.progress is None
    assert len([*tensors_in(blocks)]) == len([*tensors_in(other)]) + 1
    assert blocks.progress.shape == (NUM_COUNTERS,)


LOOKS = """
import sys
import torch
from envoi.experts import pack
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.parallel.warm_up import ParallelCall
from envoi.ops.moe.warm_up import LayerCall, without_tensors
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import find

class Allocator:
    @staticmethod
    def empty_strided_p2p(size, stride, dtype, device):
        print(size, stride, dtype, device)

torch._C._distributed_c10d._SymmetricMemory = Allocator
nvlink.allocate_bytes(64, torch.device("cuda", 1), shared=True)
for format in ("bf16", "fp8_block128"):
    experts = without_tensors(pack(torch.randn(4, 256, 128), torch.randn(4, 128, 128), format))
    layout = nvlink.SharedLayout(2, 8, 16, 2, 128, format)
    calls = ParallelCall(layout, 2, 0, (0, 4, 8), 1.0, experts), LayerCall(experts, 2)
    assert find(calls, Target("sm_90"), [1, 16])
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


def test_opening_and_looking_import_none_of_torchs_compiler():
    """It takes seconds where Python keeps no compiled files."""
    found = fresh.run(LOOKS)
    assert found.stdout.splitlines() == ["(64,) (1,) torch.uint8 cuda:1", "[]"], found.stderr
