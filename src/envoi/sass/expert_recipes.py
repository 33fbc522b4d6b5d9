"""Recipes of the kernels around the experts' GEMMs, of tensors without memory: 2048 tokens, 6 of 32 experts each."""

import torch

from envoi.experts import kernel_triton, launch
from envoi.experts.launch import Launch, Places
from envoi.quant.formats import SCHEMES
from envoi.sass.compile import Recipe, recipe_of_call
from envoi.types import QuantTensor

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2048, 6, 32, 4096, 2048
P = M * NUM_TOPK


def sort(arch: str) -> Recipe:
    """Slots by expert."""
    return _recipe(arch, kernel_triton.sort_kernel, launch.sort_arguments(_places().slot_to_pos, _places()))


def gather(arch: str, scheme: str | None) -> Recipe:
    """Tokens to rows, in bf16 or a scheme."""
    rows = launch.empty_rows(P, HIDDEN, SCHEMES[scheme] if scheme else None, torch.device("meta"))
    given = launch.gather_arguments(_bf16(M, HIDDEN), _floats(M, NUM_TOPK), _places(), rows, _floats(P))
    return _recipe(arch, kernel_triton.gather_kernel, given)


def quantize(arch: str, scheme: str) -> Recipe:
    """What L1 left in bf16."""
    out = launch.empty_rows(P, INTERMEDIATE, SCHEMES[scheme], torch.device("meta"))
    if not isinstance(out, QuantTensor):
        raise ValueError(f"scheme: expected one that quantises, got {scheme!r}")
    given = launch.quantize_arguments(_bf16(P, INTERMEDIATE), _places().offsets, out)
    return _recipe(arch, kernel_triton.quantize_kernel, given)


def combine(arch: str) -> Recipe:
    """Sums of tokens' slots."""
    given = launch.combine_arguments(_bf16(P, HIDDEN), _places().slot_to_pos, _bf16(M, HIDDEN))
    return _recipe(arch, kernel_triton.combine_kernel, given)


def _recipe(arch: str, kernel: object, given: Launch) -> Recipe:
    _, arguments, options = given
    return recipe_of_call(kernel, arguments, arch, **options)


def _places() -> Places:
    return Places(_ints(NUM_EXPERTS + 1), _ints(M, NUM_TOPK))


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
