"""Steps of a layer's warm-up: the call whose kernels are compiled (`runtime.planned_kernels`), calls to prepare."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from envoi.check import expect_bool, expect_int
from envoi.ops.moe.api import moe
from envoi.ops.moe.choose import has_kernels
from envoi.runtime.program import without_memory
from envoi.types import ExpertWeights, QuantTensor, Routing

# Up to so many tokens calls are prepared too; above, multiples of eight, to which servers pad. With still more tokens
# the GPU takes longer than the host.
PREPARED_EACH, PREPARED_EIGHTHS = 64, 256
ROUTED = torch.int32, torch.float32  # ids and weights from `envoi.route`


@dataclass(frozen=True)
class LayerCall:
    """Call of `envoi.moe` for a number of tokens. experts: without memory. dtypes: of the routing's ids and weights.

    With a map of experts, so that a warm-up compiles its kernel; the others are those of calls without.
    """

    experts: ExpertWeights
    num_topk: int
    dtypes: tuple[torch.dtype, torch.dtype] = ROUTED
    batch_invariant: bool = False

    def __call__(self, num_tokens: int) -> None:
        """Make the call."""
        ids, weights = (without_memory((num_tokens, self.num_topk), dtype) for dtype in self.dtypes)
        routing = Routing(weights, ids, self.experts.num_routed)
        tokens = without_memory((num_tokens, self.experts.hidden), torch.bfloat16)
        expert_map = without_memory((routing.num_experts,), torch.int32)
        moe(tokens, routing, self.experts, batch_invariant=self.batch_invariant, expert_map=expert_map)


def check_jobs(jobs: int | None, progress: bool) -> None:
    """Raise ValueError unless these are a number of processes, or None, and a bool."""
    if jobs is not None:
        expect_int("jobs", jobs, 1)
    expect_bool("progress", progress)


def compiles(device: torch.device) -> bool:
    """Tell whether calls on this device compile kernels: not on a CPU, also in Triton's interpreter."""
    return device.type == "cuda" and has_kernels(device)


def without_tensors(value: Any) -> Any:
    """Return an argument with tensors that have no memory in the place of its tensors."""
    if isinstance(value, ExpertWeights | QuantTensor):
        return value._map(without_tensors)  # not `.to`, which may reorder weights for another device's kernels
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def prepare(
    call: Callable[[torch.Tensor, Routing], Any], experts: ExpertWeights, num_experts: int, max_tokens: int,
    num_topk: int, dtypes: tuple[torch.dtype, torch.dtype] = ROUTED,
) -> None:  # fmt: skip
    """Make calls with few tokens, after which they are prepared: see `envoi.runtime.prepared`."""
    most = min(PREPARED_EIGHTHS, max_tokens)
    tokens = torch.zeros(most, experts.hidden, dtype=torch.bfloat16, device=experts.device)
    ids = torch.arange(most * num_topk, dtype=dtypes[0], device=experts.device).view(most, num_topk) % num_experts
    weights = torch.zeros(most, num_topk, dtype=dtypes[1], device=experts.device)
    counts = [*range(1, min(PREPARED_EACH, most) + 1), *range(PREPARED_EACH + 8, most + 1, 8)]
    for count in reversed(counts):
        call(tokens[:count], Routing(weights[:count], ids[:count], num_experts))
