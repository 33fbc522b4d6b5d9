"""Experts packed from tensors that somebody else owns, kept for as long as those tensors live and stay as they are.

`packed` compares on the host, in microseconds and without reading a weight, so that it can run at every call. What it
notices, and what it can't, is said in `envoi.integrations.transformers`.
"""

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from envoi.moe import pack
from envoi.types import ExpertWeights, QuantTensor


class Weights(NamedTuple):
    """An experts module's tensors in the module's own layout: gate_up, down, and both biases or neither."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class Recipe(NamedTuple):
    """How to pack Weights: `pack`'s plain arguments, and whether gate_up is [E, H, 2I] and down [E, I, H]."""

    format: str
    activation: str
    swiglu_limit: float | None
    gate_up_layout: str
    transposed: bool


class Mark(NamedTuple):
    """What tells a tensor's present content from a later one, as far as torch counts writes."""

    tensor: weakref.ref
    storage: weakref.ref
    data_ptr: int
    version: int
    shape: torch.Size
    stride: tuple[int, ...]

    def fits(self, x: torch.Tensor) -> bool:
        """True if x is the tensor that was marked, in the same memory, with no write counted since."""
        return (
            self.tensor() is x
            # A new storage may begin at the address of a dead one: the object tells them apart.
            and self.storage() is x.untyped_storage()
            and self.data_ptr == x.data_ptr()
            and self.version == version(x)
            and self.stride == x.stride()
            and self.shape == x.shape
        )


@dataclass(frozen=True)
class Packing:
    """Packed experts and the marks of the tensors that they were packed from, None for a bias that isn't there."""

    experts: ExpertWeights
    marks: tuple[Mark | None, ...]

    def fits(self, weights: Weights) -> bool:
        """True if nothing counted has happened to the weights since they were packed."""
        return all(x is None if mark is None else mark.fits(x) for mark, x in zip(self.marks, weights, strict=True))


_kept: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # gate_up -> {Recipe: Packing}
_lock = threading.Lock()


def version(x: torch.Tensor) -> int:
    """How often x was written to in place, or -1 for inference tensors, whose writes nobody counts."""
    return -1 if x.is_inference() else x._version


def capturing(device: torch.device) -> bool:
    """Whether what is launched on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def packed(weights: Weights, recipe: Recipe) -> ExpertWeights:
    """The weights packed by the recipe: those kept if they still fit, else packed now and kept until gate_up dies.

    Raises RuntimeError where they'd have to be packed while a CUDA graph is captured.
    """
    packing = _kept.get(weights.gate_up, {}).get(recipe)
    if packing is None or not packing.fits(weights):
        with _lock:
            # Another thread may have packed them meanwhile.
            packing = _kept.setdefault(weights.gate_up, {}).get(recipe)
            if packing is None or not packing.fits(weights):
                packing = _renew(weights, recipe, packing)
    return packing.experts


def refresh(weights: Weights) -> None:
    """Pack again by every recipe for which a packing is kept, whether or not a change was noticed."""
    with _lock:
        for recipe, packing in list(_kept.get(weights.gate_up, {}).items()):
            _renew(weights, recipe, packing)


def forget(weights: Weights) -> None:
    """Free what is kept for the weights."""
    with _lock:
        _kept.pop(weights.gate_up, None)


def pack_weights(weights: Weights, recipe: Recipe) -> ExpertWeights:
    """Pack without keeping. Raises RuntimeError while a CUDA graph is captured, ValueError as `envoi.experts.pack`."""
    if capturing(weights.gate_up.device):
        raise RuntimeError(
            "the experts' weights are new or have changed, and can't be packed while a CUDA graph is captured; "
            "call the model once, or envoi.integrations.transformers.refresh(model), before the capture"
        )
    # What is made in inference mode couldn't be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        gate_up, down, *biases = (None if x is None else x.detach() for x in weights)
        if recipe.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        # For this one pack's None is 7.
        unclamped = math.inf if recipe.activation == "swiglu_oai" else None
        return pack(
            gate_up, down, recipe.format, gate_up_layout=recipe.gate_up_layout, gate_up_bias=biases[0],
            down_bias=biases[1], activation=recipe.activation,
            swiglu_limit=unclamped if recipe.swiglu_limit is None else recipe.swiglu_limit,
        )  # fmt: skip


def _renew(weights: Weights, recipe: Recipe, old: Packing | None) -> Packing:
    marks = tuple(None if x is None else _mark(x) for x in weights)

    def make() -> ExpertWeights:
        new = pack_weights(weights, recipe)
        return new if old is None else _written_over(old, new, weights)

    packing = Packing(_outside_graph_pools(make, weights.gate_up.device), marks)
    _kept[weights.gate_up][recipe] = packing
    return packing


def _mark(x: torch.Tensor) -> Mark:
    return Mark(weakref.ref(x), weakref.ref(x.untyped_storage()), x.data_ptr(), version(x), x.shape, x.stride())


def _outside_graph_pools(make: Callable[[], ExpertWeights], device: torch.device) -> ExpertWeights:
    """Call make, on a GPU so that its memory belongs to no CUDA graph, and so that all streams may read the result.

    The compiler's CUDA graphs warm up in a pool of memory that they later rewind, with what a call has kept there;
    only the thread that warms up allocates from it.
    """
    if device.type != "cuda" or capturing(device):
        return make()
    result: list[Any] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                result.append(make())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            result.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=run, name="envoi-pack")
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _written_over(old: Packing, new: ExpertWeights, weights: Weights) -> ExpertWeights:
    """The new experts, in the old ones' memory where they own it and it fits: CUDA graphs read them there."""
    sources = [mark.storage() for mark in old.marks if mark is not None]
    sources += [x.untyped_storage() for x in weights if x is not None]

    def over(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        # bf16 weights may be packed without a copy: that memory is the module's.
        owned = not any(x.untyped_storage() is source for x in (before, now) for source in sources)
        if owned and before.shape == now.shape and before.dtype == now.dtype and before.device == now.device:
            with torch.inference_mode(False), torch.no_grad():
                return before.copy_(now)
        return now

    return replace(
        new,
        **{
            name: _map(over, getattr(old.experts, name), getattr(new, name))
            for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        },
    )


def _map(over: Callable, before: Any, now: Any) -> Any:
    if isinstance(before, QuantTensor) and isinstance(now, QuantTensor):
        return replace(now, values=over(before.values, now.values), sf=over(before.sf, now.sf))
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return over(before, now)
    return now
