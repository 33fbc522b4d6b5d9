"""Types on the path: saved, loaded, copied, printed."""

import copy
import io
from dataclasses import fields, is_dataclass

import pytest
import torch

import envoi
from envoi.ops.moe.reference import permute
from envoi.quant import FORMATS, SCHEMES, quantize
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.helpers import fresh
from tests.moe.layers import make

LAYER = make(tokens=5, bias=True, activation="swiglu_oai")
THINGS = {
    **{f"weights {format}": LAYER.pack(format) for format in FORMATS},
    **{f"matrix {scheme}": quantize(torch.randn(4, 256), scheme) for scheme in SCHEMES},
    "routing": envoi.route(LAYER.tokens, LAYER.tokens, 2, return_logits=True, return_dense=True, return_counts=True),
    "rows": permute(quantize(LAYER.tokens, "mxfp8"), LAYER.routing.topk_weights, LAYER.routing.topk_ids, 8),
}


def same(got, want) -> bool:
    if isinstance(want, torch.Tensor):
        kind = (got.dtype, got.shape) == (want.dtype, want.shape)
        return kind and torch.equal(got.flatten().view(torch.uint8), want.flatten().view(torch.uint8))
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if is_dataclass(want):
        return type(got) is type(want) and all(same(getattr(got, f.name), getattr(want, f.name)) for f in fields(want))
    return got == want


@pytest.mark.parametrize("name", THINGS)
def test_saved_and_loaded(name):
    file = io.BytesIO()
    torch.save({"layer": [THINGS[name]]}, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True)["layer"][0], THINGS[name])
    assert same(copy.deepcopy(THINGS[name]), THINGS[name])


def test_a_process_that_only_imports_envoi_can_load(tmp_path):
    torch.save(LAYER.pack("fp8_block128"), tmp_path / "experts.pt")
    code = "import sys, torch, envoi; print(torch.load(sys.argv[1]).gate_up.values.dtype)"
    done = fresh.run(code, str(tmp_path / "experts.pt"))
    assert done.stdout.strip() == "torch.float8_e4m3fn", done.stderr


@pytest.mark.parametrize("name", ["weights mxfp4", "weights bf16", "routing"])
def test_what_is_no_device_is_refused(name):
    for dtype in (torch.float16, None, "gpu"):
        with pytest.raises(ValueError, match="device: expected a device of torch such as 'cuda', got"):
            THINGS[name].to(dtype)  # pyright: ignore[reportArgumentType]


def test_a_line_says_what_there_is():
    q = QuantTensor(torch.zeros(4, 256, dtype=torch.float8_e4m3fn), torch.ones(4, 2), (1, 128))
    assert repr(q) == "QuantTensor(values=float8_e4m3fn [4, 256], sf=float32 [4, 2], group=(1, 128))"
    half = torch.zeros(8, 64, 32).bfloat16().to("meta")
    assert repr(ExpertWeights(half, half[:, :, :16], "bf16", swiglu_limit=7.0)) == (
        "ExpertWeights(gate_up=bfloat16 [8, 64, 32] on meta, down=bfloat16 [8, 64, 16] on meta, format='bf16', "
        "swiglu_limit=7.0)"
    )
    routing = Routing(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32), 4)
    assert repr(routing) == "Routing(topk_weights=float32 [3, 2], topk_ids=int32 [3, 2], num_experts=4)"
    for thing in THINGS.values():
        assert len(repr(thing)) < 500 and "tensor(" not in repr(thing)
    assert "QuantTensor(values=uint8 [8, 256, 128], sf=float8_e8m0fnu [8, 256, 8]" in repr(THINGS["weights mxfp4"])
