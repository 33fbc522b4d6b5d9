"""Refusals name the argument, what was expected and what was given."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import envoi
from envoi import check
from envoi.check import expect_choice, expect_divisible, expect_int, expect_number, expect_tensor
from tests.moe.layers import make


def refused(message: str, function, *args, **kwargs) -> None:
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message


def test_tensors():
    x = torch.zeros(3, 4, dtype=torch.int32)
    assert expect_tensor("x", x, torch.int32, (3, "columns"), x.device, contiguous=True) is x
    refused("x: expected int64 [3, 4], got int32 [3, 4]", expect_tensor, "x", x, torch.int64, (3, 4))
    refused("x: expected int32 [3, 5], got int32 [3, 4]", expect_tensor, "x", x, torch.int32, (3, 5))
    refused("x: expected int32 [rows], got int32 [3, 4]", expect_tensor, "x", x, torch.int32, ("rows",))
    refused("x: expected tensor [*, 5], got int32 [3, 4]", expect_tensor, "x", x, None, (None, 5))
    refused("x: expected tensor [*, 5], got int32 [3, 4]", expect_tensor, "x", x, None, (None, np.int64(5)))
    refused("x: expected int8 or int16, got list", expect_tensor, "x", [1], (torch.int8, torch.int16))
    refused("x: expected int32, got int 3", expect_tensor, "x", 3, torch.int32)
    refused("x: expected int32, got NoneType", expect_tensor, "x", None, torch.int32)


def test_device_and_layout():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="x: expected a tensor on meta like the other arguments, got one on cpu"):
        expect_tensor("x", x, device=torch.device("meta"))
    with pytest.raises(
        ValueError, match=r"x: expected a contiguous tensor, got strides \(1, 4\); call .contiguous\(\)"
    ):
        expect_tensor("x", x.T, contiguous=True)


@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_sparse_and_opaque_tensors_are_refused(name):
    x = getattr(torch.eye(4), name)()
    with pytest.raises(ValueError, match="^x: expected a dense tensor, got one in (sparse_coo|sparse_csr|_mkldnn)$"):
        expect_tensor("x", x, torch.float32, (4, 4))
    with pytest.raises(ValueError, match="^a: expected a dense tensor"):
        envoi.gemm(x, torch.eye(4))
    with pytest.raises(ValueError, match="^b: expected a dense tensor"):
        envoi.gemm(torch.eye(4), x)


def test_numbers():
    assert expect_number("alpha", 2) == 2.0
    assert isinstance(expect_number("alpha", 2), float)
    assert expect_number("alpha", float("inf")) == float("inf")
    refused("alpha: expected a number, got str '2'", expect_number, "alpha", "2")
    refused("alpha: expected a number, got bool True", expect_number, "alpha", True)
    refused("alpha: expected a number, got NoneType", expect_number, "alpha", None)
    refused("alpha: expected a number, got float32 []", expect_number, "alpha", torch.tensor(2.0))


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, torch.zeros(2)])
def test_a_choice_that_is_no_string_is_refused_too(value):
    for choices in (("a", "b"), {"a": 1, "b": 2}, {"a", "b"}):
        with pytest.raises(ValueError, match="^mode: expected one of .*'b'.*, got "):
            expect_choice("mode", value, choices)


def test_a_size_of_zero_is_a_size():
    refused(
        "x: expected float32 [0, 4], got float32 [3, 4]", expect_tensor, "x", torch.zeros(3, 4), torch.float32, (0, 4)
    )
    assert expect_tensor("x", torch.zeros(0, 4), torch.float32, (0, 4)).shape == (0, 4)
    assert expect_tensor("x", torch.tensor(1.0), torch.float32, ()).dim() == 0
    refused("x: expected tensor [], got float32 [1]", expect_tensor, "x", torch.zeros(1), None, ())


def test_the_first_complaint_is_about_the_dtype_and_shape_then_the_device_then_the_layout():
    x = torch.zeros(4, 3).T
    arguments = {"device": torch.device("meta"), "contiguous": True}
    refused("x: expected int8, got float32 [3, 4]", expect_tensor, "x", x, torch.int8, **arguments)
    with pytest.raises(ValueError, match="expected a tensor on meta"):
        expect_tensor("x", x, torch.float32, **arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_trace_with_sizes_as_symbols(dynamic):
    """Test that messages are formatted only if needed: one about a symbolic size can't be."""

    def step(x, y):
        expect_tensor("x", x, torch.float32, ("rows", "columns"))
        expect_tensor("y", y, (torch.float32, torch.bfloat16), (x.shape[0], None, 2 * x.shape[1]), x.device)
        expect_int("rows", x.shape[0], 0)
        expect_divisible("columns", x.shape[1], 4, "groups of four")
        return x + 1

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=dynamic)
    for rows, columns in ((3, 8), (5, 12)):
        assert compiled(torch.zeros(rows, columns), torch.zeros(rows, 1, 2 * columns)).shape == (rows, columns)


def test_files_to_write(tmp_path, monkeypatch):
    endings = (".png", ".pdf", ".svg")
    for name in ("x.png", "x.PDF", "x.svg"):
        assert check.expect_writable("--out", str(tmp_path / name), endings) == tmp_path / name
    monkeypatch.setattr(check.os, "access", lambda path, mode: False)
    refused(
        f"--out: expected a file that can be written, got {tmp_path}/x.png",
        check.expect_writable, "--out", f"{tmp_path}/x.png", endings,
    )  # fmt: skip


def test_numbers_that_float32_cannot_hold():
    largest = torch.finfo(torch.float32).max
    for value in (2, -largest, largest):
        assert check.expect_float32("x", value) == value
    text = "x: expected a number that float64 can hold, got an int of more digits"
    refused(text, check.expect_float32, "x", 10**400)
    with pytest.raises(ValueError, match="^alpha: expected a number that float"):
        envoi.route(torch.zeros(2, 8), torch.zeros(4, 8), 2, alpha=10**400)
    for value in (1e39, -1e300, math.nan, math.inf, -math.inf):
        refused(f"x: expected a finite number that float32 can hold, got {value}", check.expect_float32, "x", value)
        with pytest.raises(ValueError, match="^alpha: expected a finite number that float32 can hold"):
            envoi.route(torch.zeros(2, 8), torch.zeros(4, 8), 2, alpha=value)
        with pytest.raises(ValueError, match="^rule.routed_scale: expected a finite number"):
            envoi.router.Rule(routed_scale=value)


@pytest.mark.parametrize("name", ["return_logits", "return_dense", "return_counts"])
def test_flags_of_the_router(name):
    with pytest.raises(ValueError, match=f"^{name}: expected True or False, got str 'no'"):
        envoi.route(torch.zeros(2, 8), torch.zeros(4, 8), 2, **{name: "no"})


def test_tensors_of_which_one_has_no_values():
    """The dispatcher takes such a call for one on meta, and returns memory that nothing has written."""
    layer = make(tokens=5)
    for format in ("bf16", "fp8_row", "mxfp4"):
        stored = envoi.experts.state_dict(layer.pack(format))
        for name in ("down", "down.values", "down.sf", "gate_up.sf"):
            if name in stored and not (format == "mxfp4" and name.endswith("sf")):
                experts = envoi.experts.from_state_dict(stored | {name: stored[name].to("meta")})
                with pytest.raises(ValueError, match="expected a tensor on cpu, as tokens is, got one on meta"):
                    envoi.moe(layer.tokens, layer.routing, experts)
    with pytest.raises(ValueError, match="^b: expected a tensor on cpu"):
        envoi.gemm(torch.ones(2, 8), torch.ones(4, 8, device="meta"))
    assert envoi.gemm(torch.ones(2, 8, device="meta"), torch.ones(4, 8, device="meta")).is_meta


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, "float32", None])
def test_dtypes_of_widened_weights(dtype):
    q = envoi.quant.quantize(torch.ones(2, 32), "mxfp8")
    with pytest.raises(ValueError, match="^dtype: expected torch.float32 or torch.float64, got"):
        envoi.quant.dequantize(q, dtype)
    with pytest.raises(ValueError, match="^dtype: expected bfloat16, float16, float32 or float64 of torch, got"):
        envoi.experts.unpack(make().pack("mxfp4"), dtype=dtype)
    with pytest.raises(ValueError, match="^experts: expected ExpertWeights from envoi.experts.pack, got NoneType"):
        envoi.experts.unpack(None)


def test_devices_models_and_layers_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="^device: expected a device of torch such as 'cuda', got str 'foo'"):
        envoi.experts.load(tmp_path / "x", device="foo")
    with pytest.raises(ValueError, match="^device: expected a device of torch"):
        check.expect_device("device", None)
    assert check.expect_device("device", "cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="^state: expected a dict of tensors, .* got NoneType"):
        envoi.experts.from_state_dict(None)
    with pytest.raises(ValueError, match="^layer: expected a MoeLayer, got NoneType"):
        envoi.estimate(None)
    from envoi.integrations import transformers

    for call in (transformers.report, transformers.refresh, transformers.release):
        with pytest.raises(ValueError, match="^model: expected a torch.nn.Module, got NoneType"):
            call(None)


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_128x128", "mxfp4"])
def test_factors_that_do_not_go_with_the_values(scheme):
    q = envoi.quant.quantize(torch.ones(256, 256), scheme)
    with pytest.raises(ValueError, match=r"^q.sf: expected \[.*\], a factor for each group, got "):
        envoi.quant.dequantize(replace(q, sf=q.sf[:-1]))
