"""Prepared calls of the Hopper kernels, compiled without a GPU: every parameter of a replay is what it would be always.

Numbers and maps have to be equal. Addresses may differ for what a call allocates, but consistently: each tensor of a
call as always has one place in the replay, and these places don't overlap.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

import envoi
from envoi.runtime import shortcuts, workspace
from envoi.runtime.prepared import Calls, calls
from envoi.runtime.prepared.replay import parameters_of
from tests.helpers.compiling_driver import CompilingDriver
from tests.helpers.slow import mostly_slow
from tests.runtime.prepared_cases import Case, gemm_cases, indexer_cases, moe_cases, route_cases, tensors_in

LAYERS = moe_cases(8, 8, 2, 512, 512)
CASES = {
    **{name: case for name, case in gemm_cases(200, 256, 512).items() if name in (
        "gemm-bf16", "gemm-several", "gemm-reduced", "gemm-mxfp4", "grouped-fp8_block128", "gemm-fp8_row",
    )},
    "moe-many-tokens": moe_cases(64, 2, 2, 512, 512)["moe-mxfp4"],
    "moe-bf16": LAYERS["moe-bf16"], "moe-fp8_row": LAYERS["moe-fp8_row"], "moe-mxfp4-bias": LAYERS["moe-mxfp4-bias"],
    "route": route_cases(70, 64, 256, 4)["route"], "route-all": route_cases(3, 64, 2048, 4)["route-all"],
    "indexer": indexer_cases(700)["indexer"],
}  # fmt: skip


def assert_replayed(
    case: Case, hopper: CompilingDriver, known: Calls | None = None, owned: Sequence[torch.Tensor] = ()
) -> None:
    """Make a call, and compare what the next one hands to the driver with a call as always.

    known: where the call is kept. owned: tensors that stay where they are.
    """
    given, named = case.arguments(0)
    case.function(*given, **named)
    assert not (known or calls._calls).refusals()
    given, named = case.arguments(2)
    hopper.always.clear()
    hopper.calls.clear()
    shortcuts.PREPARED = False
    want = case.function(*given, **named)
    shortcuts.PREPARED = True
    got = case.function(*given, **named)
    assert len(hopper.calls) == len(hopper.always) > 0
    places = {}  # of tensors that the call made as always: where they are in the replay
    for x in tensors_in((given, named)):
        places[storage(x)] = storage(x)
    for x, y in zip(tensors_in(want), tensors_in(got), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        places[storage(x)] = storage(y)
    kept = [x for pool in (workspace._counters, workspace._blanks) for _, x in pool.shared.values()]
    for x in (*kept, *owned):
        places[storage(x)] = storage(x)
    for (function, config, values), (kernel, grid, arguments) in zip(hopper.calls, hopper.always, strict=True):
        assert function == kernel.function and tuple(config.grid) == grid and config.stream == hopper.stream_now
        parameters = parameters_of(kernel, arguments, hopper, 0)
        for value, parameter in zip(values, parameters, strict=True):
            assert value[8:] == parameter.value[8:]
            if parameter.tensor is None or not parameter.tensor.numel():
                assert value == parameter.value or parameter.tensor is not None
                continue
            (address,) = struct.unpack_from("Q", value)
            start, length = storage(parameter.tensor)
            place = address - (parameter.tensor.data_ptr() - start), length
            assert places.setdefault((start, length), place) == place
    ranges = sorted(set(places.values()))
    assert all(start + length <= after for (start, length), (after, _) in pairwise(ranges))


def storage(x: torch.Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


@pytest.mark.parametrize(
    "name", mostly_slow(CASES, quick=["gemm-bf16", "gemm-reduced", "moe-bf16", "route-all", "indexer"])
)
def test_parameters(name, hopper):
    assert_replayed(CASES[name], hopper)


def test_a_call_without_tokens_is_replayed(hopper):
    (tokens, routing, *rest), named = LAYERS["moe-bf16"].arguments(0)
    given = tokens[:0], envoi.Routing(routing.topk_weights[:0], routing.topk_ids[:0], routing.num_experts), *rest
    outs = [envoi.moe(*given, **named) for _ in range(3)]
    assert all(out.shape == given[0].shape and out.dtype == torch.bfloat16 for out in outs)
    assert not calls._calls.refusals() and len(calls._calls.known) == 1 and not hopper.calls
