"""MoE layers of serving engines: what is refused before weights exist, kernels built before they change, packing.

    Layer       what an engine knows of a layer when it chooses a kernel
    why_not     Layer -> the reason why Envoi doesn't run it, "" if it does
    why_unbuilt Layer -> why its kernels can't be compiled and loaded here, "" if they are ready
    why_not_routed  arguments of `envoi.route` -> the same for a router
    pack_layer  Layer and its tensors -> ExpertWeights that hold no weight twice

An engine that was refused keeps its own kernels: nothing has been changed by then.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from envoi.ops.moe import moe, pack, supports
from envoi.ops.moe.op import constants_of
from envoi.ops.moe.router.warm_up import RouterCall
from envoi.ops.moe.support import experts_without_memory
from envoi.ops.moe.warm_up import LayerCall, compiles, prepare, without_tensors
from envoi.runtime import shortcuts
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.planned_kernels import Call, compile_calls, load_at
from envoi.types import ExpertWeights

VIEWED = ("bf16", "fp8_row", "fp8_block128")  # formats whose kernels read weights as checkpoints store them
ARCH = "sm_90"  # the one on which Envoi is measured against the engines' own kernels
# Releases of Triton whose code of these kernels has run there. One that is newer may compile all of it, some wrongly.
TRITONS = ("3.6.", "3.8.")


@dataclass(frozen=True)
class Layer:
    """MoE layer of one rank: num_experts of hidden x intermediate, top_k slots a token; the rest as `pack` has it.

    batch_invariant: of its calls, as in `moe`.
    """

    format: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    gate_up_layout: str = "concat"
    bias: bool = False
    limit: float | None = None
    alpha: float | None = None
    batch_invariant: bool = False

    def __str__(self) -> str:
        sizes = f"{self.num_experts} experts of {self.hidden} x {self.intermediate}, top {self.top_k}"
        return f"{self.format}, {sizes}, {self.activation}"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `pack` and `supports` that don't depend on tensors."""
        found = {"format": self.format, "activation": self.activation, "swiglu_limit": self.limit}
        return found | ({} if self.alpha is None else {"swiglu_alpha": self.alpha})

    @property
    def is_viewed(self) -> bool:
        """Tell whether everything that is packed is a view, which follows weights that an engine moves or reloads."""
        return self.format in ("bf16", "fp8_block128") and not self.bias


def why_not(layer: Layer) -> str:
    """Return why Envoi doesn't run a layer on this process's GPU, "" if it does. Reads no weights."""
    return _why_not_here() or supports(
        **layer.options, hidden=layer.hidden, intermediate=layer.intermediate, num_experts=layer.num_experts,
        top_k=layer.top_k, bias=layer.bias,
    ) or ""  # fmt: skip


def _why_not_here() -> str:
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    found = f"sm_{major}{minor}"
    if found != ARCH:
        return f"the GPU is {found}, and Envoi's kernels for engines are those of {ARCH}"
    if not _triton().startswith(TRITONS):
        known = " and ".join(f"{release}x" for release in TRITONS)
        return f"Triton is {_triton()}, and Envoi's kernels have run in engines as {known} compile them"
    return ""


def _triton() -> str:
    from envoi.runtime import triton_compat  # not at the top: `import envoi` must not import Triton

    return triton_compat.VERSION


def on_meta(layer: Layer, target: Target) -> ExpertWeights:
    """Return such a layer packed for a GPU, without memory, with factors as small as checkpoints have them."""
    sizes = layer.hidden, layer.intermediate, layer.num_experts
    with standing_for(target):
        return experts_without_memory(*sizes, bias=layer.bias, gate_up_layout=layer.gate_up_layout, **layer.options)


_built: dict[tuple, str] = {}
_lock = threading.Lock()


def why_unbuilt(layer: Layer, max_tokens: int) -> str:
    """Compile and load on the current GPU what calls with 1 to max_tokens tokens launch; return why that failed, or "".

    Needs no weights, so that an engine can still choose its own kernels. Repeated for an equal layer, it returns what
    was found at first.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    return _remembered((layer, max_tokens, device), lambda: _build(layer, device, max_tokens))


def why_not_routed(options: Mapping[str, Any], max_tokens: int) -> str:
    """Return why `envoi.route` doesn't run here with such named arguments but its tokens, or can't be built; else "".

    Compiles and loads what calls with 1 to max_tokens tokens in bf16 launch. Reads no values of tensors.
    """
    call = RouterCall({name: without_tensors(x) for name, x in options.items()})
    try:
        call(1)  # checks the arguments
    except ValueError as error:
        return str(error)
    why = _why_not_here()
    if why:
        return why
    device = torch.device("cuda", torch.cuda.current_device())
    known = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in call.options.values())
    return _remembered((known, max_tokens, device), lambda: _compile([call], device, max_tokens))


def _remembered(key: tuple, build: Callable[[], None]) -> str:
    """Build once for a key; return why that failed, or ""."""
    with _lock:
        if key not in _built:
            try:
                build()
                _built[key] = ""
            except Exception as error:  # whatever it is, the engine has kernels of its own
                _built[key] = (
                    f"its kernels can't be built: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                )
        return _built[key]


def _build(layer: Layer, device: torch.device, max_tokens: int) -> None:
    _compile([_call(layer, on_meta(layer, Target.of(device)))], device, max_tokens)


def _call(layer: Layer, experts: ExpertWeights) -> LayerCall:
    return LayerCall(without_tensors(experts), layer.top_k, batch_invariant=layer.batch_invariant)


def _compile(calls: Sequence[Call], device: torch.device, max_tokens: int) -> None:
    target = Target.of(device)
    for site in compile_calls(calls, target, range(1, max_tokens + 1), None, False, for_launch=True):
        load_at(calls, target, site)


def pack_layer(
    layer: Layer, gate_up: torch.Tensor, down: torch.Tensor, *, into: ExpertWeights | None = None, **more: Any
) -> ExpertWeights:  # fmt: skip
    """Pack a layer's tensors without holding a weight twice: views, or reordered over the tensors' own bytes.

    more: factors, scales and biases as `pack` takes them. into: what an earlier call returned, to be filled anew, so
    that captured graphs stay valid. Where its tensors weren't these, these are reordered as well: an engine that has
    loaded into new memory copies that over the old.
    """
    given: dict[str, Any] = {name: None if x is None else x.detach() for name, x in more.items()}
    gate_up, down = gate_up.detach(), down.detach()
    in_place = layer.format not in VIEWED
    if into is not None:
        into.update_(gate_up, down, gate_up_layout=layer.gate_up_layout, **given)
        place = into.gate_up if isinstance(into.gate_up, torch.Tensor) else into.gate_up.values
        if not in_place or gate_up.data_ptr() == place.data_ptr():
            return into
    found = pack(gate_up, down, gate_up_layout=layer.gate_up_layout, in_place=in_place, **layer.options, **given)
    return found if into is None else into


def warm_up(layer: Layer, experts: ExpertWeights, max_tokens: int) -> None:
    """Make the first calls with few tokens, so that they are prepared; compile what `why_unbuilt` didn't foresee."""
    if not compiles(experts.device):
        return
    foreseen = _built.get((layer, max_tokens, experts.device)) == ""
    if not foreseen or constants_of(on_meta(layer, Target.of(experts.device))) != constants_of(experts):
        _compile([_call(layer, experts)], experts.device, max_tokens)
    if shortcuts.PREPARED:
        call = partial(moe, experts=experts, batch_invariant=layer.batch_invariant)
        prepare(call, experts, experts.num_routed, max_tokens, layer.top_k)
