"""Cache of experts packed from tensors that others own, valid while those tensors exist unchanged.

`packed` compares on the host, in microseconds and without reading a weight, so that it can run at every call.
`envoi.integrations.transformers` lists the changes that it notices and those that it can't.
"""

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from envoi.ops.moe import pack
from envoi.ops.moe.op import tensors_of
from envoi.runtime.devices import capturing
from envoi.runtime.workspace import in_another_thread
from envoi.types import ExpertWeights


class Weights(NamedTuple):
    """Tensors of an experts module in the module's own layout: gate_up, down, and both biases or neither.

    gate_up_sf, down_sf: factors of weights that are quantised already, as `envoi.experts.pack` takes them.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_sf: torch.Tensor | None = None
    down_sf: torch.Tensor | None = None


class Recipe(NamedTuple):
    """Arguments to pack Weights with: those of `pack`, and transposed: gate_up is [E, H, 2I] and down [E, I, H].

    block_rows, block_columns: weight_block_size, 0 for None.
    """

    format: str
    activation: str
    swiglu_limit: float | None
    gate_up_layout: str
    transposed: bool
    requantize: bool = False
    block_rows: int = 0
    block_columns: int = 0


class Mark(NamedTuple):
    """Fingerprint of a tensor's present content, which tells it from later content as far as torch counts writes."""

    tensor: weakref.ref
    storage: weakref.ref
    data_ptr: int
    version: int
    shape: torch.Size
    stride: tuple[int, ...]

    def fits(self, x: torch.Tensor) -> bool:
        """Return True if x is the tensor that was marked, in the same memory, with no write counted since."""
        return (
            self.tensor() is x
            # A new storage may begin at the address of a freed one: the object tells them apart.
            and self.storage() is x.untyped_storage()
            and self.data_ptr == x.data_ptr()
            and self.version == version(x)
            and self.stride == x.stride()
            and self.shape == x.shape
        )


@dataclass(frozen=True)
class Packing:
    """Packed experts and the marks of the tensors that they were packed from, None for an absent bias.

    handed_over: somebody else has them too, who doesn't follow the weights: they are never written over.
    """

    experts: ExpertWeights
    marks: tuple[Mark | None, ...]
    handed_over: bool = False

    def fits(self, weights: Weights) -> bool:
        """Return True if no change of the weights has been counted since they were packed."""
        return all(
            x is mark if mark is None or x is None else mark.fits(x)
            for mark, x in zip(self.marks, weights, strict=True)
        )

    def is_of(self, weights: Weights) -> bool:
        """Return True if these are the tensors that were packed, changed or not."""
        return all(x is (None if mark is None else mark.tensor()) for mark, x in zip(self.marks, weights, strict=True))

    def is_orphaned(self) -> bool:
        """Return True if one of the tensors is gone, so that nothing will ask for this packing again."""
        return any(mark is not None and mark.tensor() is None for mark in self.marks)


# gate_up -> {Recipe: packings}: several where modules share gate_up alone. Tuples, as they are read without the lock.
_kept: Any = WeakTensorKeyDictionary()
_NONE: dict[Recipe, tuple[Packing, ...]] = {}
_lock = threading.Lock()


def version(x: torch.Tensor) -> int:
    """Return the number of in-place writes to x, or -1 for inference tensors, whose writes torch doesn't count."""
    return -1 if x.is_inference() else x._version


def packed(weights: Weights, recipe: Recipe) -> ExpertWeights:
    """Return the weights packed by the recipe: the kept packing if it still fits, else a new one.

    Keeps a new packing until one of the weights is freed and another is packed, or gate_up is freed. Raises
    RuntimeError if it had to pack while a CUDA graph is captured.
    """
    packing = _fitting(weights, recipe)
    if packing is None:
        weights = lasting(weights)
        with _lock:
            packing = _fitting(weights, recipe) or _renew(weights, recipe)  # another thread may have packed them
    return packing.experts


def hand_over(weights: Weights, recipe: Recipe) -> ExpertWeights:
    """Return the weights packed by the recipe, for somebody who keeps them whatever becomes of the weights."""
    experts = packed(weights, recipe)
    with _lock:
        kept = _kept[lasting(weights).gate_up]
        kept[recipe] = tuple(
            replace(packing, handed_over=True) if packing.experts is experts else packing
            for packing in kept.get(recipe, ())
        )
    return experts


def _fitting(weights: Weights, recipe: Recipe) -> Packing | None:
    for packing in _kept.get(weights.gate_up, _NONE).get(recipe, ()):
        if packing.fits(weights):
            return packing
    return None


def lasting(weights: Weights) -> Weights:
    """Return the tensors that views stand for which are made anew for each call, as a DTensor's `to_local` makes them
    in grad mode; other tensors unchanged."""
    gate_up, down, *rest = weights
    return Weights(_base(gate_up), _base(down), *(None if x is None else _base(x) for x in rest))


def _base(x: torch.Tensor) -> torch.Tensor:
    base = x._base if x._is_view() else None
    if base is None or base.data_ptr() != x.data_ptr() or base.dtype != x.dtype:
        return x
    return base if (base.shape, base.stride()) == (x.shape, x.stride()) else x


def kept(weights: Weights) -> list[ExpertWeights]:
    """Return the packings that are kept of these weights, of all formats."""
    weights = lasting(weights)
    with _lock:
        found = chain.from_iterable(_kept.get(weights.gate_up, _NONE).values())
        return [packing.experts for packing in found if packing.is_of(weights)]


def refresh(weights: Weights) -> None:
    """Pack again by every recipe for which a packing is kept, whether or not a change was noticed."""
    weights = lasting(weights)
    with _lock:
        for recipe, packings in list(_kept.get(weights.gate_up, _NONE).items()):
            if any(packing.is_of(weights) for packing in packings):
                _renew(weights, recipe)


def pack_weights(weights: Weights, recipe: Recipe) -> ExpertWeights:
    """Pack without keeping. Raises RuntimeError while a CUDA graph is captured, ValueError as `envoi.experts.pack`."""
    if capturing(weights.gate_up.device):
        raise RuntimeError(
            "the experts' weights are new or have changed, and can't be packed while a CUDA graph is captured; "
            "call the model once, or envoi.integrations.transformers.refresh(model), before the capture"
        )
    # Tensors made in inference mode couldn't be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        gate_up, down = weights.gate_up.detach(), weights.down.detach()
        more = [None if x is None else x.detach() for x in weights[2:]]
        if recipe.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        # For swiglu_oai, None in `pack` means 7.
        unclamped = math.inf if recipe.activation == "swiglu_oai" else None
        return pack(
            gate_up, down, recipe.format, gate_up_layout=recipe.gate_up_layout, gate_up_bias=more[0],
            down_bias=more[1], gate_up_sf=more[2], down_sf=more[3], activation=recipe.activation,
            swiglu_limit=unclamped if recipe.swiglu_limit is None else recipe.swiglu_limit,
            weight_block_size=(recipe.block_rows, recipe.block_columns) if recipe.block_rows else None,
            requantize=recipe.requantize,
        )  # fmt: skip


def _renew(weights: Weights, recipe: Recipe) -> Packing:
    """Pack, in the place of these weights' former packing if there is one, else of one whose weights are gone."""
    marks = tuple(None if x is None else _mark(x) for x in weights)
    kept = _kept.setdefault(weights.gate_up, {})
    before = kept.get(recipe, ())
    old = next((packing for packing in before if packing.is_of(weights)), None)
    old = old or next((packing for packing in before if packing.is_orphaned()), None)

    def make() -> ExpertWeights:
        new = pack_weights(weights, recipe)
        return new if old is None or old.handed_over else _written_over(old, new, weights)

    packing = Packing(_outside_graph_pools(make, weights.gate_up.device), marks)
    kept[recipe] = (*(other for other in before if not (other.is_of(weights) or other.is_orphaned())), packing)
    return packing


def _mark(x: torch.Tensor) -> Mark:
    return Mark(weakref.ref(x), weakref.ref(x.untyped_storage()), x.data_ptr(), version(x), x.shape, x.stride())


def _outside_graph_pools(make: Callable[[], ExpertWeights], device: torch.device) -> ExpertWeights:
    """Call make, on a GPU so that its memory belongs to no CUDA graph, and so that all streams may read the result.

    The compiler's CUDA graphs warm up in a memory pool that they later rewind, which would free a packing kept from a
    call; only the thread that warms up allocates from that pool.
    """
    if device.type != "cuda" or capturing(device):
        return make()

    def run() -> ExpertWeights:
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()
        return made

    torch.cuda.current_stream(device).synchronize()
    return in_another_thread(run)


def _written_over(old: Packing, new: ExpertWeights, weights: Weights) -> ExpertWeights:
    """Return the new experts, copied into the old packing's memory where it owns that and it fits: graphs read it."""
    sources = [mark.storage() for mark in old.marks if mark is not None]
    sources += [x.untyped_storage() for x in weights if x is not None]
    written: dict[int, torch.Tensor] = {}
    for before, now in zip(tensors_of(old.experts), tensors_of(new), strict=True):
        # bf16 weights may be packed without a copy: that memory is the module's.
        if before is None or now is None or any(x.untyped_storage() is y for x in (before, now) for y in sources):
            continue
        if (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device):
            with torch.inference_mode(False), torch.no_grad():
                written[id(now)] = before.copy_(now)
    return new._map(lambda x: written.get(id(x), x))
