"""Data types that the stages exchange: tokens -> Routing -> ExpertRows -> rows -> tokens.

Frozen dataclasses without behaviour beyond their own shape and place: printed as dtypes and shapes, loaded by
`torch.load` with its default safety, since they hold tensors and plain values only, and pytrees of their tensors, so
that `torch.export` and `tree_map` see through them. Sizes: M tokens, N experts, k slots a token, P rows sorted by
expert, E local experts, H hidden, I intermediate.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree as pytree

from envoi.check import describe, expect_device, expect_tensor

UNGATED = ("silu", "relu2")  # activations of experts that have no gate: gate_up is up alone
LONGEST = 80  # characters of a text in a repr
Self = TypeVar("Self", bound="_Printed")


def has_gate(activation: str) -> bool:
    """Return True for an activation of gate and up, False for one of up alone; its name, or a user's as text."""
    head, written, _ = activation.partition(":")
    return head.endswith("(gate, up)") if written else activation not in UNGATED


def _short(value: Any) -> str:
    """Return the repr of a value, shortened, but dtype and shape for a tensor: `float32 [8, 4]`."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{where}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..'"


class _Printed:
    """Base of dataclasses whose repr has tensors as dtype and shape, and omits fields that have their default."""

    def __repr__(self) -> str:
        shown = [(field, getattr(self, field.name)) for field in fields(self)]  # pyright: ignore[reportArgumentType]
        kept = [f"{field.name}={_short(value)}" for field, value in shown if value is not field.default]
        return f"{type(self).__name__}({', '.join(kept)})"

    def to(self: Self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Return a copy with all tensors on a device; tensors that are there already are shared.

        device: or its name, or its number. Raises ValueError for one that isn't here, and for anything else, such as a
        dtype: numbers, factors and ids keep theirs.
        """
        place = expect_device("device", device)
        return self._map(lambda x: x.to(place, non_blocking=non_blocking))

    def _map(self: Self, f: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a copy with f applied to every tensor."""
        changed = {}
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                changed[field.name] = f(value)
            elif isinstance(value, _Printed):
                changed[field.name] = value._map(f)
        return replace(self, **changed)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, repr=False)
class QuantTensor(_Printed):
    """Tensor in a block-scaled format: element [.., r, c] is values[.., r, c] * sf[.., r // group[0], c // group[1]].

    values: float8_e4m3fn [.., R, C], or uint8 [.., R, C / 2] of two E2M1 numbers, even column in the low nibble; of
        INT4, which factors in bfloat16 or float16 tell, two integers from 0 to 15, less the zero point of their group.
    sf: float32, or float8_e8m0fnu (a power of two), or float8_e4m3fn (nvfp4), or bfloat16 or float16 (int4);
        shape [.., ceil(R / group[0]), ceil(C / group[1])].
    group: rows and columns that share a scale factor; a whole dimension is written as its size (fp8_row: (1, C)).
    scale: float32, multiplied on top (nvfp4): one for the whole tensor, or one for each row, [.., R]; or None.
    scales_at_most_2: promise that every UE8M0 scale factor is at most 2 and no element is NaN. Kernels skip the check;
        a false promise gives wrong results: after writing to values or sf, set it by
        `envoi.quant.pack.with_checked_scales`, or to False. In the order "fp8_fragments" the promise is that of
        `envoi.quant.fp8_fragments.in_near_shifts`.
    order: "rows" as above, or the same numbers in the order of the tensor cores' operands, which only the experts'
        kernels and `dequantize` read: "fragments" (`envoi.quant.fragments`) or "fp8_fragments"
        (`envoi.quant.fp8_fragments`).
    zeros: zero points of INT4, uint8 0 to 15, of the shape of sf; None: 8 everywhere.

    Example: fp8_row of a [4, 256] tensor has values [4, 256], sf [4, 1], group (1, 256).
    Raises ValueError for a group that isn't a pair.
    """

    values: torch.Tensor
    sf: torch.Tensor
    group: tuple[int, int]
    scale: torch.Tensor | None = None
    scales_at_most_2: bool = False
    order: str = "rows"
    zeros: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group, tuple | list) or len(self.group) != 2:
            raise ValueError(f"group: expected the rows and the columns that share a scale factor, got {self.group!r}")

    @property
    def packed(self) -> bool:
        """Return True when two 4-bit numbers share a byte."""
        return self.values.dtype == torch.uint8

    @property
    def integers(self) -> bool:
        """Return True for 4-bit integers, False for numbers with an exponent."""
        return self.packed and self.sf.dtype in (torch.bfloat16, torch.float16)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [.., R, C]."""
        *lead, columns = self.values.shape
        return (*lead, columns * 2 if self.packed else columns)

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device


Matrix = torch.Tensor | QuantTensor


@dataclass(frozen=True, repr=False)
class Routing(_Printed):
    """Router's decision for M tokens; slots of a token are ordered by selection key, best first.

    A Routing made by hand for `envoi.moe` may have ids in int64, weights in bf16 or fp16, and for tokens [B, S, H] both
    as [B, S, k].

    topk_weights [M, k] float32, or the dtype asked for: weight of each slot, 0 where masked.
    topk_ids [M, k] int32: expert of each slot, -1 = masked slot. Ids of one token are distinct.
    num_experts: N, the number of experts over all ranks.
    logits [M, N] float32: the router logits, if they were asked for.
    dense [M, N], dtype of topk_weights: these scattered to their experts, 0 elsewhere, if asked for.
    num_tokens_per_expert [N] int32 and expert_offsets [N + 1] int32 (exclusive), if asked for, without masked slots.

    Example, k = 2: topk_ids [[3, 0], [1, -1]], topk_weights [[.6, .4], [1., 0.]] sends token 0 to experts 3 and 0.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    logits: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    num_tokens_per_expert: torch.Tensor | None = None
    expert_offsets: torch.Tensor | None = None


@dataclass(frozen=True, repr=False)
class ExpertRows(_Printed):
    """Token rows gathered by expert, ready for a grouped GEMM.

    rows [P, H] (a tensor, or a QuantTensor with one scale row per row): expert e owns rows offsets[e] : offsets[e + 1].
    offsets [E + 1] int32: exclusive.
    pos_to_slot [P] int32: token * k + slot that row p came from. Within an expert, rows keep the order of their slots.
    topk_weights [P] float32: the slot's weight.

    Example: topk_ids [[1, 0], [1, -1]] gives offsets [0, 1, 3], pos_to_slot [1, 0, 2].
    """

    rows: Matrix
    offsets: torch.Tensor
    pos_to_slot: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, repr=False)
class ExpertWeights(_Printed):
    """Weights of one rank's experts, packed for the grouped GEMMs by `envoi.experts.pack`.

    gate_up [E, 2I, H]: bf16 or a QuantTensor, its rows in the order of `gate_up_layout`; for an activation without a
        gate up alone, [E, I, H].
    down [E, H, I]: bf16 or a QuantTensor.
    gate_up_bias [E, 2I] (in the order of gate_up's rows) and down_bias [E, H], float32, or None.
    format: "bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8", "nvfp4" or "int4";
        says how activations are quantised too. In "nvfp4" both weights have a scale for each row.
    activation: "swiglu", "swiglu_oai", "geglu", "geglu_tanh"; without a gate "silu" or "relu2"; or the operations of a
        user's function, as the text that `envoi.experts.pack` makes of it.
    swiglu_limit: clamp of gate (above only) and up (both sides), or None.
    gate_up_layout: "interleaved" (row 2i is gate i, row 2i + 1 is up i) or "concat" (row i is gate i, row I + i is
        up i), which weights in fragment order can't be.
    padding: how many of the intermediate size I are zeros at its end, in gate, up and down, which `envoi.experts.pack`
        has added to make blocks of factors whole; `unpack` leaves them out.
    num_shared: how many of the E experts, the last ones, every token passes, after the experts of its routing, which
        doesn't know them: see `envoi.experts.with_shared`. Set it by `dataclasses.replace` on experts that were packed
        with theirs at the end.
    shared_gate [H] float32: a token's weight of these is sigmoid(token @ shared_gate); None: it is 1.

    Raises ValueError for another layout, a limit that isn't positive, more shared experts than there are, another
    gate, or one without shared experts.
    """

    gate_up: Matrix
    down: Matrix
    format: str
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_layout: str = "interleaved"
    padding: int = 0
    num_shared: int = 0
    shared_gate: torch.Tensor | None = None

    def __post_init__(self) -> None:
        limit = self.swiglu_limit
        if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
            raise ValueError(f"swiglu_limit: expected a positive number or None, got {self.swiglu_limit!r}")
        shared, gate = self.num_shared, self.shared_gate
        if not isinstance(shared, int) or (shared and not 0 <= shared <= self.num_local_experts):
            raise ValueError(f"num_shared: expected 0 to {self.num_local_experts}, got {shared!r}")
        if gate is not None and not shared:
            raise ValueError(f"shared_gate: expected None with num_shared={shared}, got {describe(gate)}")
        if gate is not None:
            expect_tensor("shared_gate", gate, torch.float32, (self.hidden,), self.device)
        known = ("interleaved", "concat") if self.order == "rows" else ("interleaved",)
        if self.gate_up_layout not in known:
            need = " or ".join(map(repr, known))
            raise ValueError(
                f"gate_up_layout: expected {need} beside order {self.order!r}, got {self.gate_up_layout!r}"
            )

    # Puts weights into the order of their device's kernels; set by `ops.moe.packing`; this module imports nothing.
    arrange: ClassVar[Callable[["ExpertWeights"], "ExpertWeights"]] = staticmethod(lambda experts: experts)

    # Packs weights into the memory of packed ones; set by `ops.moe.refit`.
    refit: ClassVar[Callable[..., "ExpertWeights"]]

    def update_(
        self, gate_up: Matrix, down: Matrix, *, gate_up_sf: torch.Tensor | None = None,
        down_sf: torch.Tensor | None = None, gate_up_scale: torch.Tensor | None = None,
        down_scale: torch.Tensor | None = None, weight_block_size: tuple[int, int] | None = None,
        gate_up_layout: str = "concat", gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None, gate_up_zeros: torch.Tensor | None = None,
        down_zeros: torch.Tensor | None = None, requantize: bool = False,
    ) -> "ExpertWeights":  # fmt: skip
        """Write new weights into this memory, packed as these are, and return self: captured graphs read them.

        Arguments as in `envoi.experts.pack`; format, activation and limit stay. Where these weights are views of a
        caller's, that memory is written, or nothing if it is what is given: views follow their weights without a call.
        Weights given in this very memory, by rows, are read before they are written over. Shared experts are among the
        E of them, in the parts that they have here; shared_gate is the caller's to write.
        Raises ValueError, with nothing written, for other shapes, and for weights that the kernels chosen for these
        couldn't read: another `QuantTensor.order`, or factors that break `QuantTensor.scales_at_most_2`.
        """
        return type(self).refit(
            self, gate_up, down, gate_up_sf=gate_up_sf, down_sf=down_sf, gate_up_scale=gate_up_scale,
            down_scale=down_scale, weight_block_size=weight_block_size, gate_up_layout=gate_up_layout,
            gate_up_bias=gate_up_bias, down_bias=down_bias, gate_up_zeros=gate_up_zeros, down_zeros=down_zeros,
            requantize=requantize,
        )  # fmt: skip

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "ExpertWeights":
        """Return the weights on a device, in the order of its kernels; tensors that change neither are shared."""
        return type(self).arrange(super().to(device, non_blocking=non_blocking))

    @property
    def order(self) -> str:
        """Order of both weights, see `QuantTensor`."""
        return "rows" if isinstance(self.gate_up, torch.Tensor) else self.gate_up.order

    @property
    def num_local_experts(self) -> int:
        """Number of local experts, E, with the shared ones."""
        return self.gate_up.shape[0]

    @property
    def num_routed(self) -> int:
        """Number of local experts that a routing may name, those before the shared ones."""
        return self.num_local_experts - self.num_shared

    @property
    def hidden(self) -> int:
        """Hidden size, H."""
        return self.gate_up.shape[-1]

    @property
    def intermediate(self) -> int:
        """Intermediate size, I, with its padding."""
        return self.gate_up.shape[-2] // (2 if has_gate(self.activation) else 1)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.gate_up.device


def expect_experts(value: Any) -> None:
    """Raise ValueError for anything but packed experts."""
    if not isinstance(value, ExpertWeights):
        raise ValueError(f"experts: expected ExpertWeights from envoi.experts.pack, got {type(value).__name__}")


def expect_routing(value: Any) -> None:
    """Raise ValueError unless this is a Routing whose number of experts is an integer, of Python or NumPy."""
    if not isinstance(value, Routing):
        raise ValueError(f"routing: expected an envoi.Routing, got {type(value).__name__}")
    if not isinstance(value.num_experts, int) and not hasattr(value.num_experts, "__index__"):
        raise ValueError(f"routing.num_experts: expected an int, got {describe(value.num_experts)}")


def _register(kind: type) -> None:
    """Make a dataclass a pytree whose children are the fields that can hold tensors; the others are its context."""
    names = tuple(field.name for field in fields(kind))
    children = tuple(field.name for field in fields(kind) if _holds_tensors(field.type))
    rest = tuple(name for name in names if name not in children)

    def flatten(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, name) for name in children], tuple(getattr(x, name) for name in rest)

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, context = flatten(x)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(children, values, strict=True)], context

    def unflatten(values: Any, context: tuple[Any, ...]) -> Any:
        # Leaves may be anything while a tree is mapped: no check of the constructor applies to them.
        x = object.__new__(kind)
        for name, value in zip((*children, *rest), (*values, *context), strict=True):
            object.__setattr__(x, name, value)
        return x

    pytree.register_pytree_node(
        kind, flatten, unflatten, serialized_type_name=f"envoi.{kind.__name__}", flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=list, from_dumpable_context=lambda dumped: tuple(map(_hashable, dumped)),
    )  # fmt: skip


def _holds_tensors(annotation: Any) -> bool:
    return annotation in (torch.Tensor, torch.Tensor | None, Matrix)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


for _kind in (QuantTensor, Routing, ExpertRows, ExpertWeights):
    _register(_kind)

# Else `torch.load` accepts them only with weights_only=False, which runs arbitrary code from the file.
torch.serialization.add_safe_globals([QuantTensor, Routing, ExpertRows, ExpertWeights])
