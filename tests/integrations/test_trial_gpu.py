"""Trial of an untested Triton's kernels on a Hopper GPU: this Triton's compute what torch does, in all formats."""

import pytest

from envoi.integrations import engines, trial
from envoi.integrations.engines import Layer
from envoi.ops.moe import permute
from tests.integrations.test_engines import SERVED

pytestmark = [pytest.mark.gpu(arch="sm_90"), pytest.mark.usefixtures("tidy_gpu")]


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(trial, "_triton", lambda: "9.8.7")
    monkeypatch.setattr(engines, "_built", {})


@pytest.mark.parametrize("format", SERVED)
def test_this_tritons_kernels_are_right(untested, format):
    assert engines.why_unbuilt(Layer(format, 512, 256, 8, 2), 300) == ""


def test_a_kernel_that_is_wrong_is_a_reason(untested, monkeypatch):
    combine = permute.combine_rows

    def wrong(rows, slot_to_pos, **how):
        out = combine(rows, slot_to_pos, **how)
        if out.is_cuda and len(out) > 200:  # not while kernels are looked for, on tensors without memory
            out[200, 8:72] = 0
        return out

    monkeypatch.setattr("envoi.ops.moe.experts.combine_rows", wrong)
    why = engines.why_unbuilt(Layer("fp8_row", 512, 256, 8, 2), 300)
    assert "wrong numbers for 2" in why and "tokens under Triton 9.8.7" in why
