"""Checks of layers whose memory vLLM empties or moves: sleep mode, and experts that its load balancer moves.

`tools.engines.vllm_layers` runs them as "asleep" and "moved". On a GPU layers are put to sleep by vLLM's allocator, and
what is called is a captured graph; without one all memory that a layer has taken since it was made is overwritten.
"""
# pyright: reportMissingImports=false

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tools.engines import vllm_layers as layers
from tools.engines.checks import said

NAN = 0xFF  # a byte that makes every number NaN
NUM_TOKENS = 16
_pools: list[Any] = []  # of vLLM's allocator


def check_sleep(judge: Any) -> None:
    """Check in each format that a layer computes after sleep: level 1 keeps its weights, level 2 needs them anew."""
    for name in (*layers.ANEW, "bf16"):
        format, make, changed = layers.CASES[name]
        try:
            moe_config = layers.config(**changed)
            with sleeping() as memory:
                layer, loaded = layers.made(make(moe_config), moe_config)
            memory.keep(loaded)
            call = captured(layer)
            before = call(loaded)
            memory.sleep(level=1)
            kept = call(loaded)
            memory.sleep(level=2)
            gone = call(loaded)
            anew = call(layers.loaded_anew(layer))
            limit = layers.FORM[format]
            good = max(before, kept, anew) < limit and not gone < limit
            judge(f"asleep: {name}", good, f"{before:.1e}, level 1 {kept:.1e}, level 2 and loaded anew {anew:.1e}")
        except Exception as problem:
            judge(f"asleep: {name}", False, f"{type(problem).__name__}: {problem}")


def captured(layer: Any) -> Callable[[dict[str, Any]], float]:
    """Return a call of the layer, on a GPU the replay of a graph, that returns its error for weights in float64."""
    source = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_TOKENS, layers.H, generator=source).bfloat16().to(layers.DEVICE)
    logits = torch.randn(NUM_TOKENS, layers.E, generator=source).bfloat16().to(layers.DEVICE)
    top, ids = logits.float().topk(layers.K, dim=1)
    weights, ids = top.softmax(1), ids.int()

    def call() -> torch.Tensor:
        return layers.called(layer.quant_method, layer, x, logits, weights, ids)

    replay = call
    if layers.GPU:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

    def error(means: dict[str, Any]) -> float:
        want = layers.expected(x, weights, ids, layer, means)
        return float((replay().double() - want).norm() / want.norm())

    return error


@contextlib.contextmanager
def sleeping() -> Iterator[Any]:
    """Put what is made within to where sleep empties it."""
    if layers.GPU:
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.get_instance()
        # A server has one pool of weights. One that is freed while another is in use ends the process: torch asserts
        # there, in a destructor, that no memory goes to a pool, and vLLM 0.26 lets go of a pool when the next begins.
        _pools.append(dict(allocator.allocator_and_pools))
        with allocator.use_memory_pool(tag="weights"):
            yield Asleep()
        return
    before = set(_storages())
    memory = Emptied()
    yield memory
    memory.storages = {at: x for at, x in _storages().items() if at not in before}


class Asleep:
    """Memory of vLLM's allocator."""

    def keep(self, tensors: dict[str, Any]) -> None:
        """Put tensors into other memory."""
        tensors.update({name: None if x is None else x.clone() for name, x in tensors.items()})

    def sleep(self, level: int) -> None:
        """Sleep and wake as vLLM's worker does."""
        from vllm.device_allocator.cumem import CuMemAllocator

        torch.cuda.synchronize()
        CuMemAllocator.get_instance().sleep(offload_tags=("weights",) if level == 1 else ())
        CuMemAllocator.get_instance().wake_up()


class Emptied:
    """Memory of a CPU that stands for it: it stays where it is, and loses its contents."""

    storages: dict[int, torch.Tensor]

    def keep(self, tensors: dict[str, Any]) -> None:
        """Except tensors from it."""
        for x in tensors.values():
            if x is not None:
                self.storages.pop(x.untyped_storage().data_ptr(), None)

    def sleep(self, level: int) -> None:
        """Overwrite it; level 1 writes back what it held."""
        for x in self.storages.values():
            held = x.clone()
            x.fill_(NAN)
            if level == 1:
                x.copy_(held)


def _storages() -> dict[int, torch.Tensor]:
    """Return the bytes of all tensors on a CPU by address."""
    gc.collect()
    found = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return found


def move(layer: Any, order: Sequence[int]) -> int:
    """Let vLLM's load balancer put expert order[i] of all ranks in place i; return how many tensors it moved here."""
    from vllm import distributed
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    group, weights = distributed.get_ep_group().device_group, list(layer.get_expert_weights())
    places = torch.tensor([list(range(len(order))), list(order)])
    rearrange_expert_weights_inplace(
        places[:1], places[1:], [weights], [torch.empty_like(x) for x in weights], group,
        TorchDistNcclEplbCommunicator(group),
    )  # fmt: skip
    return len(weights)


def check_moves(judge: Any) -> None:
    """Check in each format that a layer computes after vLLM has moved its experts, one of which gets two places."""
    order = [*range(1, layers.E), 3]  # expert 3 is in expert 0's place too
    for name in (*layers.ANEW, "fp8 a matrix", "bf16"):
        format, make, changed = layers.CASES[name]
        try:
            moe_config = layers.config(**changed, parallel={"use_ep": True, "enable_eplb": True})
            layer, loaded = layers.made(make(moe_config), moe_config)
            loaded = {key: None if x is None else x.clone() for key, x in loaded.items()}
            first = layers.errors_of(layer, loaded)
            count = move(layer, order)
            errors = layers.errors_of(layer, {key: None if x is None else x[order] for key, x in loaded.items()})
            packed = layer.quant_method.moe_kernel.fused_experts.packed
            good = packed is not None and max(*first.values(), *errors.values()) < layers.FORM[format]
            judge(f"moved: {name}", good, f"{count} tensors, {said(errors)}")
        except Exception as problem:
            judge(f"moved: {name}", False, f"{type(problem).__name__}: {problem}")
