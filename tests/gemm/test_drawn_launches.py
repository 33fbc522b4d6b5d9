"""Random products and epilogues without a GPU: the host finds kernels for every one that a GPU would be given."""

from typing import Any, NoReturn

import pytest

from envoi.gemm import api, backend
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.observer import rehearsing
from tools.fuzz import run

COUNTS = {"epilogue": 150, "gemm": 40, "grouped_gemm": 40}
# Rare epilogues: whole rows quantised in groups, and more tiles of whole rows than shared memory holds.
KNOWN = {"epilogue": (161, 484, 989)}


class Launched(BaseException):
    """Ends a call where its kernels would be launched; no handler of errors takes it for one."""


def rehearse(a, b, offsets, ir, out_dtype, operands, grouping) -> NoReturn:
    """Stand in for `backend.run_kernels`: do all that it does on the host, on tensors without memory."""
    found: list[Any] = []
    operands = {name: on_meta(value) for name, value in operands.items()}
    with rehearsing(found), standing_for(Target(rehearse.arch)):
        outputs = backend.run_kernels(on_meta(a), on_meta(b), on_meta(offsets), ir, out_dtype, operands, grouping)
    assert outputs is not None and found
    raise Launched


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
