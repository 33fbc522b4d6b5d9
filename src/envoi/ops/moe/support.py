"""Public function `envoi.supports`: whether a layer can be packed and run, before any of its weights exists."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from envoi.check import expect_arch, expect_bool, expect_int
from envoi.epilogues.activation import expect_activation
from envoi.ops.moe.packing import check_sizes, expect_block, pack
from envoi.quant.formats import Format, Scheme, format_named
from envoi.runtime.program import without_memory
from envoi.types import ExpertWeights, Matrix, QuantTensor, has_gate


def supports(
    format: str, *, hidden: int, intermediate: int, num_experts: int, top_k: int,
    activation: str | Callable = "swiglu", bias: bool = False, swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None, weight_block_size: tuple[int, int] | None = None, arch: str = "sm_90",
) -> str | None:  # fmt: skip
    """Return None if `envoi.experts.pack` and `envoi.moe` take such a layer, else the reason: the error they raise.

    Reads no weights and needs no GPU, so that an engine can choose its kernels before it loads a checkpoint.
    hidden, intermediate: H and I of one rank's weights. num_experts: those of one rank, E. top_k: slots of a token.
    format, activation, swiglu_limit, swiglu_alpha, weight_block_size: as in `pack`, but a format by its name, since
        "auto" depends on the weights. bias: whether there are biases.
    arch: of the GPU, "sm_90"; others than sm_90 run Triton's kernels.
    What only the weights tell isn't known yet: numbers that the format doesn't hold, which `pack` refuses.
    Raises nothing: an argument that is wrong is a reason too.
    """
    try:
        expect_int("num_experts", num_experts, 1)
        expect_int("top_k", top_k, 1)
        expect_int("hidden", hidden, 1)
        expect_int("intermediate", intermediate, 1)
        expect_bool("bias", bias)
        expect_arch("arch", arch)
        found, block = format_named(format), expect_block(weight_block_size)
        if block is None:
            check_sizes(hidden, intermediate, found)
        given = _as_stored(found, expect_activation(activation), hidden, intermediate, num_experts, bias, block)
        pack(
            **given, format=format, activation=activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha,
            weight_block_size=block,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None


def _as_stored(
    format: Format, activation: str, hidden: int, intermediate: int, num_experts: int, bias: bool,
    block: tuple[int, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the tensors of a checkpoint's layer as arguments of `pack`, on meta."""
    parts = 2 if has_gate(activation) else 1
    sizes = {"gate_up": (parts, intermediate, hidden), "down": (1, hidden, intermediate)}
    found: dict[str, Any] = {}
    for name, (ranges, rows, columns) in sizes.items():
        values, factors = _stored(format.weights, num_experts, ranges, rows, columns, block)
        found[name] = values
        if factors is not None:
            found[f"{name}_sf"] = factors
    if bias:
        for name, rows in (("gate_up", parts * intermediate), ("down", hidden)):
            found[f"{name}_bias"] = without_memory((num_experts, rows), torch.float32)
    return found


def _stored(
    scheme: Scheme | None, num_experts: int, ranges: int, rows: int, columns: int, block: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight [E, ranges * rows, columns] and its factors, None for bf16: where a range of rows isn't of whole
    groups and no block is given, bf16 to be quantised."""
    if scheme is None or (block is None and rows % max(1, scheme.group[0])):
        return without_memory((num_experts, ranges * rows, columns), torch.bfloat16), None
    side = block or scheme.group_for((rows, columns))
    packed = 2 if scheme.values == torch.uint8 else 1
    groups = num_experts, ranges * -(-rows // side[0]), -(-columns // side[1])
    return (
        without_memory((num_experts, ranges * rows, columns // packed), scheme.values),
        without_memory(groups, scheme.sf),
    )


def experts_without_memory(
    hidden: int, intermediate: int, num_experts: int, format: str, activation: str = "swiglu", bias: bool = False,
    **options: Any,
) -> ExpertWeights:  # fmt: skip
    """Return experts on meta as `pack` would for the current target, with MX scale factors of at most 2.

    Values on meta can't be looked at, and the order of weights depends on it (`QuantTensor.scales_at_most_2`). Two are
    packed, as which all others are: to pack hundreds takes seconds, also without memory. options: more of `pack`'s.
    """
    rows = intermediate * (2 if has_gate(activation) else 1)
    shapes = (2, rows, hidden), (2, hidden, intermediate)
    gate_up, down = (without_memory(shape, torch.bfloat16) for shape in shapes)
    if bias:
        for name, shape in zip(("gate_up_bias", "down_bias"), shapes, strict=True):
            options[name] = without_memory(shape[:2], torch.float32)
    two = pack(gate_up, down, format, activation=activation, **options)

    def promised(x: Matrix) -> Matrix:
        if isinstance(x, QuantTensor) and x.sf.dtype == torch.float8_e8m0fnu:
            return replace(x, scales_at_most_2=True)
        return x

    two = ExpertWeights.arrange(replace(two, gate_up=promised(two.gate_up), down=promised(two.down)))
    return two._map(lambda x: x.new_empty_strided((num_experts, *x.shape[1:]), x.stride()))
