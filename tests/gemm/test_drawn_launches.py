"""Random products and epilogues without a GPU: the host finds kernels for every one that a GPU would be given."""

from typing import Any, NoReturn

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from envoi.ops.gemm import api, backend
from envoi.runtime.devices import Target
from envoi.runtime.program import building
from tests.fuzz import run
from tests.helpers.slow import mostly_slow
from tools.machine_code.compile import compile_launch

COUNTS = {"epilogue": 20, "gemm": 12, "grouped_gemm": 6}
# Rare epilogues: whole rows quantised in groups, and more tiles of whole rows than shared memory holds.
KNOWN = {"epilogue": (161, 484, 989)}
PACKED = (308, 664, 1329, 1667, 2343, 2602)  # 4-bit outputs of one of two halves of the columns, or of pairs of columns


class Launched(BaseException):
    """Ends a call where its kernels would be launched; no handler of errors takes it for one."""


def rehearse(a, b, offsets, ir, out_dtype, operands, grouping) -> NoReturn:
    """Stand in for `backend.run_kernels`: do all that it does on the host, on tensors without memory."""
    operands = {name: on_meta(value) for name, value in operands.items()}
    with building(Target(rehearse.arch)) as builder:
        outputs = backend.run_kernels(on_meta(a), on_meta(b), on_meta(offsets), ir, out_dtype, operands, grouping)
    by_torch = isinstance(a, torch.Tensor) and a.dtype == torch.float32
    assert (outputs is None, not builder.launches) == (by_torch, by_torch)
    check_boxes([launch.arguments for launch in builder.launches])
    rehearse.launches = builder.launches
    raise Launched


def check_boxes(x: Any) -> None:
    """Assert that the boxes of all descriptors in launches' arguments are as wide as TMA needs them."""
    if isinstance(x, (tuple, list)):
        for part in x:
            check_boxes(part)
    elif isinstance(x, TensorDescriptor):
        assert x.block_shape[-1] * x.base.itemsize >= 16, f"boxes of {x.block_shape} {x.base.dtype}"


def on_meta(x: Any) -> Any:
    return x if x is None or isinstance(x, (int, float)) else x.to("meta")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("operator", COUNTS)
def test_every_call_has_kernels(operator, arch, monkeypatch):
    monkeypatch.setattr(api, "run_kernels", rehearse)
    monkeypatch.setattr(rehearse, "arch", arch, raising=False)
    for seed in (*range(COUNTS[operator]), *KNOWN.get(operator, ())):
        _, case = run.draw_case(operator, seed, "large", "cpu")
        if case.refused:
            continue
        try:
            case.call()
        except Launched:
            continue
        except ValueError as error:
            pytest.fail(f"seed {seed}: {case.text}\n{error}")
        pytest.fail(f"seed {seed} reached no kernels")


@pytest.mark.parametrize("seed", mostly_slow(PACKED, quick=[664]))
def test_packed_outputs_of_split_columns_compile(seed, monkeypatch):
    monkeypatch.setattr(api, "run_kernels", rehearse)
    monkeypatch.setattr(rehearse, "arch", "sm_90", raising=False)
    monkeypatch.setattr(rehearse, "launches", [], raising=False)
    _, case = run.draw_case("epilogue", seed, "large", "cpu")
    with pytest.raises(Launched):
        case.call()
    for launch in rehearse.launches:
        assert compile_launch(launch, "sm_90").stack_bytes == 0
