"""Recipes of the kernels around the experts' GEMMs, of tensors without memory: 2048 tokens, 6 of 32 experts each."""

import torch

from envoi.moe import kernels, permute
from envoi.moe.combine import combine_arguments
from envoi.moe.launches import Launch
from envoi.moe.permute import RowMap
from envoi.quant.formats import SCHEMES
from envoi.types import QuantTensor
from tools.machine_code.compile import Recipe, recipe_of_call

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2048, 6, 32, 4096, 2048
P = M * NUM_TOPK


def sort(arch: str) -> Recipe:
    """Return the recipe of the sort of slots by expert."""
    return _recipe(arch, kernels.sort_kernel, permute.sort_arguments(_row_map().slot_to_pos, _row_map()))


def gather(arch: str, scheme: str | None) -> Recipe:
    """Return the recipe of the gather of tokens into rows, in bf16 or a scheme."""
    rows = permute.empty_rows(P, HIDDEN, SCHEMES[scheme] if scheme else None, torch.device("meta"))
    given = permute.gather_arguments(_bf16(M, HIDDEN), _floats(M, NUM_TOPK), _row_map(), rows, _floats(P))
    return _recipe(arch, kernels.gather_kernel, given)


def quantize(arch: str, scheme: str) -> Recipe:
    """Return the recipe that quantises L1's bf16 output."""
    out = permute.empty_rows(P, INTERMEDIATE, SCHEMES[scheme], torch.device("meta"))
    if not isinstance(out, QuantTensor):
        raise ValueError(f"scheme: expected one that quantises, got {scheme!r}")
    given = permute.quantize_arguments(_bf16(P, INTERMEDIATE), _row_map().offsets, out)
    return _recipe(arch, kernels.quantize_kernel, given)


def combine(arch: str) -> Recipe:
    """Return the recipe of the sums over each token's slots."""
    given = combine_arguments(_bf16(P, HIDDEN), _row_map().slot_to_pos, _bf16(M, HIDDEN))
    return _recipe(arch, kernels.combine_kernel, given)


def _recipe(arch: str, kernel: object, given: Launch) -> Recipe:
    _, arguments, options = given
    return recipe_of_call(kernel, arguments, arch, **options)


def _row_map() -> RowMap:
    return RowMap(_ints(NUM_EXPERTS + 1), _ints(M, NUM_TOPK))


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
