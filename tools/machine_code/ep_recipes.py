"""Recipes of the kernels between ranks, of tensors without memory: 4 ranks, 2048 tokens each, 6 of 256 experts each."""

import torch

from envoi.moe.launches import Launch
from envoi.moe.parallel import combine, combine_kernels, dispatch, dispatch_kernels
from envoi.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.moe.permute import empty_rows
from tools.machine_code.compile import Recipe, recipe_of_call

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, NUM_RANKS = 2048, 6, 256, 4096, 4
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS


def publish(arch: str, format: str) -> Recipe:
    """Return the recipe of `publish`: tokens into the memory that peers read."""
    domain = _domain(format)
    mine = domain.layout.tokens_in(domain.memory)
    given = dispatch.publish_arguments(_of(torch.bfloat16, M, HIDDEN), _slots(), _ranked(), mine)
    return _recipe(arch, dispatch_kernels.publish_kernel, given)


def announce(arch: str) -> Recipe:
    """Return the recipe of `announce`: slots to peers."""
    weights = _of(torch.float32, M, NUM_TOPK)
    return _recipe(
        arch,
        dispatch_kernels.announce_kernel,
        dispatch.announce_arguments(_domain("bf16"), _slots(), weights, _ranked()),
    )


def pull(arch: str, format: str) -> Recipe:
    """Return the recipe of `pull`: peers' tokens into rows."""
    return _recipe(arch, dispatch_kernels.pull_kernel, dispatch.pull_arguments(_domain(format)))


def meet(arch: str) -> Recipe:
    """Return the recipe of the barrier across ranks after L2."""
    return _recipe(arch, combine_kernels.meet_kernel, combine.meet_arguments(_domain("bf16")))


def sums(arch: str) -> Recipe:
    """Return the recipe of the sums over each token's slots."""
    given = combine.sum_arguments(_domain("bf16"), _slots(), _of(torch.bfloat16, M, HIDDEN))
    return _recipe(arch, combine_kernels.sum_kernel, given)


def returns(arch: str) -> Recipe:
    """Return the recipe that sums L2's rows per token and sends the sums to their ranks."""
    results = _of(torch.bfloat16, NUM_RANKS * M * NUM_TOPK, HIDDEN)
    return _recipe(arch, combine_kernels.return_kernel, combine.return_arguments(_domain("bf16", True), results))


def sums_of_ranks(arch: str) -> Recipe:
    """Return the recipe that adds up the ranks' sums per token."""
    given = combine.sum_ranks_arguments(_domain("bf16", True), _slots(), _of(torch.bfloat16, M, HIDDEN))
    return _recipe(arch, combine_kernels.sum_ranks_kernel, given)


def _recipe(arch: str, kernel: object, given: Launch) -> Recipe:
    _, arguments, options = given
    return recipe_of_call(kernel, arguments, arch, **options)


def _domain(format: str, presum: bool = False) -> Domain:
    layout = SharedLayout(NUM_RANKS, NUM_EXPERTS, M, NUM_TOPK, HIDDEN, format, presum)
    capacity = NUM_RANKS * M * NUM_TOPK
    shift, offsets = _of(torch.int32, NUM_RANKS, NUM_LOCAL), _of(torch.int32, NUM_LOCAL + 1)
    state, report = _of(torch.int32, 4), _of(torch.int32, NUM_RANKS)
    return Domain(
        layout, 1, list(range(0, NUM_EXPERTS + 1, NUM_LOCAL)), 10.0, _of(torch.uint8, layout.regions.end),
        _of(torch.int64, NUM_RANKS), shift, offsets, state, report,
        empty_rows(capacity, HIDDEN, layout.scheme, torch.device("meta")),
        _of(torch.float32, capacity), _of(torch.int64, capacity), _of(torch.int32, NUM_RANKS),
    )  # fmt: skip


def _ranked() -> dispatch.RankedSlots:
    return dispatch.empty_ranked(_slots(), NUM_EXPERTS)


def _slots() -> torch.Tensor:
    return _of(torch.int32, M, NUM_TOPK)


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
