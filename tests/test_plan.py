"""`envoi.plan`: launches, outputs and workspace of calls that aren't made, with tensors that have no memory."""

import pytest
import torch

import envoi
from envoi.ops.moe import choose
from envoi.runtime import program
from envoi.runtime.devices import Target
from envoi.types import ExpertWeights, Routing

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(num_tokens: int) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    slots = meta(num_tokens, 8, dtype=torch.float32), meta(num_tokens, 8, dtype=torch.int32)
    experts = ExpertWeights(meta(16, 512, 256), meta(16, 256, 256), "bf16")
    return meta(num_tokens, 256), Routing(*slots, 16), experts


def test_a_layer_is_planned_without_a_gpu():
    made = envoi.plan(envoi.moe, *layer(6400))
    kernels = [launch.kernel for launch in made.launches]
    assert kernels == ["count_kernel", "place_kernel", "gather_kernel", "gemm_kernel", "gemm_kernel", "combine_kernel"]
    assert (made.outputs.shape, made.outputs.dtype, made.outputs.device.type) == ((6400, 256), BF16, "meta")
    rows = 6400 * 8
    assert rows * (256 + 256 + 256) * 2 < made.workspace_bytes < 1.02 * rows * 3 * 256 * 2  # gathered, hidden, rows


def test_a_call_without_tokens_has_no_launches():
    made = envoi.plan(envoi.moe, *layer(0))
    assert (made.launches, made.workspace_bytes, made.outputs.shape) == ((), 0, (0, 256))
    given = layer(0)
    tensors = given[0], given[1].topk_weights, given[1].topk_ids, given[2].gate_up, given[2].down
    assert program.plan(envoi.moe.__wrapped__, given, {}, tensors, Target("sm_90")).refusal == ""


def test_float32_is_left_to_torch():
    sides = meta(64, 64, dtype=torch.float32), meta(64, 64, dtype=torch.float32)
    planned = program.plan(envoi.gemm.__wrapped__, sides, {}, sides, Target("sm_90"))
    assert not planned.launches and "between the launches" in planned.refusal


def test_a_choices_own_tensors_take_no_workspace():
    sizes = []
    for _ in range(2):  # the first makes what the second finds
        sizes.append(envoi.plan(envoi.moe, *layer(6400)).workspace_bytes)
        choose._rows(1, 256, None)
    choose._rows.cache_clear()
    assert envoi.plan(envoi.moe, *layer(6400)).workspace_bytes == sizes[0] == sizes[1]


def test_fewer_multiprocessors_and_another_architecture():
    given = meta(4096, 512), meta(4096, 512)
    assert envoi.plan(envoi.gemm, *given).launches[0].grid == (132,)
    assert envoi.plan(envoi.gemm, *given, num_sms=20).launches[0].grid == (20,)
    (launch,) = envoi.plan(envoi.gemm, *given, arch="sm_100").launches
    assert launch.grid != (132,), "Triton's kernel has a program for each tile"


def test_outputs_have_the_form_of_the_result():
    made = envoi.plan(envoi.route, meta(64, 512), meta(32, 512), 4, return_counts=True)
    assert isinstance(made.outputs, Routing) and made.outputs.num_tokens_per_expert.shape == (32,)
    values = envoi.plan(envoi.gemm, meta(64, 512), meta(256, 512), envoi.epilogues.library.swiglu_fp8).outputs
    assert isinstance(values, envoi.QuantTensor) and values.shape == (64, 128)


def test_what_is_refused():
    with pytest.raises(ValueError, match="function: expected an operator such as envoi.gemm"):
        envoi.plan(torch.mm, meta(4, 4), meta(4, 4))
    with pytest.raises(ValueError, match="b: expected"):
        envoi.plan(envoi.gemm, meta(64, 256), meta(64, 128))
    with pytest.raises(ValueError, match="expected tensors on meta, or on a GPU without arch, got cpu"):
        envoi.plan(envoi.gemm, torch.zeros(64, 256), torch.zeros(64, 256))
    a = meta(64, 256)
    for arch in ("hopper", 90):
        with pytest.raises(ValueError, match=f"arch: expected one of NVIDIA's, such as 'sm_90', got {arch!r}"):
            envoi.plan(envoi.gemm, a, meta(64, 256), arch=arch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="given twice"):
        envoi.plan(envoi.gemm, a, a)
    with pytest.raises(ValueError, match="expected arguments like the planned ones"):
        envoi.plan(envoi.gemm, a, meta(64, 256)).run(meta(63, 256), meta(64, 256))
    with pytest.raises(ValueError, match="gemm: expected arguments of the operator, got others"):
        envoi.plan(envoi.gemm, a, 3)


def test_wrong_names_are_those_of_the_planned_call():
    sides = meta(64, 512), meta(32, 512)
    made = envoi.plan(envoi.route, *sides, 4)
    for call in (
        lambda **named: envoi.plan(envoi.route, *sides, 4, **named),
        lambda **named: made.run(*sides, 4, **named),
    ):
        with pytest.raises(TypeError, match=r"^plan of route\(\) got an unexpected keyword argument 'tokenz'"):
            call(tokenz=1)
    with pytest.raises(TypeError, match=r"^plan of route\(\) missing 1 required positional argument: 'k'"):
        envoi.plan(envoi.route, *sides)
    with pytest.raises(TypeError, match=r"^plan of moe\(\) got an unexpected keyword argument 'tokenz'"):
        envoi.plan(envoi.moe, *layer(64), tokenz=1)
