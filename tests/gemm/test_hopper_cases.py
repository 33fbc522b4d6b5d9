"""Cases of the Hopper GEMM: the host path plans them as they say; the kernels of `tuned.json`."""

import dataclasses
import json

import pytest
import torch

from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.config import Config
from envoi.ops.gemm.hopper.kernel import gemm_kernel
from tools.kernel_cases import gemm_hopper as cases
from tools.kernel_cases.gemm_hopper import CASES, NUM_SMS, Case, inputs, planned

CASE = Case("x", "store", 256, 512, 384)


def test_both_widths_have_boxes_of_their_own():
    call, config = planned(inputs(next(case for case in CASES if case.name == "two-widths")))
    arguments = dict(zip(gemm_kernel.arg_names, host.arguments(call, config, NUM_SMS)[1], strict=True))
    weights, rest = arguments["y_desc"], arguments["rest_desc"]
    assert weights.block_shape == [config.main_y, config.block_k]
    assert rest.block_shape == [config.rest_y, config.block_k]
    assert weights.shape == rest.shape == [2880, 4096]
    one_width = host.arguments(*planned(inputs(CASES[0])), NUM_SMS)[1]
    assert dict(zip(gemm_kernel.arg_names, one_width, strict=True))["rest_desc"] is None


def test_the_plan_is_what_a_launch_gets(monkeypatch):
    launched = []
    monkeypatch.setattr(host, "launch_gemm", lambda *call: launched.append(call))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 132})()
    )
    for case in (CASE, dataclasses.replace(CASE, num_experts=4), dataclasses.replace(CASE, epilogue="swiglu")):
        given = inputs(case)
        host.run_gemm(given.a, given.b, given.offsets, given.epilogue.ir, torch.bfloat16, given.operands)
        call, config, num_sms = launched.pop()
        same_call, same_config = planned(given)
        assert (config, num_sms) == (same_config, NUM_SMS)
        assert (call.code, call.names, call.grouping) == (same_call.code, same_call.names, same_call.grouping)
        assert [(x.shape, x.dtype) for x in call.outputs] == [(x.shape, x.dtype) for x in same_call.outputs]


def test_long_rows_are_multiplied_first():
    call, _ = planned(inputs(dataclasses.replace(CASE, epilogue="softmax")))
    assert [output.dtype for output in call.outputs] == [torch.float32]


# Cases of tuned.json


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    def ship(entries):
        path = tmp_path / "tuned.json"
        path.write_text(json.dumps({key: dataclasses.asdict(config) for key, config in entries.items()}))
        monkeypatch.setattr(tune, "SHIPPED", path)
        forget()

    yield ship
    monkeypatch.undo()
    forget()


def forget():
    tune._entries.cache_clear()
    tune.forget_choices()
    cases.measured_cases.cache_clear()


def key(case):
    call, _ = planned(inputs(case))
    return tune.key_of(host.problem_of(call), call.code, NUM_SMS)


def test_a_key_brings_its_kernel(shipped):
    config = Config(64, 2, 128, 64, 5, tiles_overlap=True)  # as `fitted` leaves it
    shipped({key(CASE): config})
    (case,) = cases.tuned_cases()
    assert (case.M, case.N, case.K, case.epilogue) == (256, 512, 384, "store")
    assert planned(inputs(case))[1] == config
    assert cases.measured_cases() == (case,)


def test_a_key_that_nothing_has(shipped):
    shipped({"132sm 4096x4096x7168 2B unheard": Config(64, 2, 128, 64, 5)})
    with pytest.raises(ValueError, match=r"tuned\.json: 132sm 4096x4096x7168 2B unheard: no example has an epilogue"):
        cases.tuned_cases()
    for other in ("4096", "78sm 4096x4096x7168 2B tma"):
        shipped({other: Config(64, 2, 128, 64, 5)})
        with pytest.raises(ValueError, match=f"expected a key like '132sm 4096x4096x7168 2B tma', got '{other}'"):
            cases.tuned_cases()
