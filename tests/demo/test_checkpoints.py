"""Quantised checkpoints of the demo's model: their layout, their numbers, and what they cost."""

import pytest
import torch
from safetensors.torch import load_file

from envoi.experts import from_checkpoint, unpack
from examples.demo import checkpoints
from examples.demo.text import find_model

MODEL = find_model(None)
EXPERT = "model.layers.2.mlp.experts.5.gate_proj"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
STORED = {"FP8 block-128": "fp8_block128", "MXFP4": "mxfp4"}


@pytest.fixture(scope="module", params=STORED)
def written(request, tmp_path_factory):
    """Write a checkpoint; give its layout's name and its folder."""
    folder = tmp_path_factory.mktemp("checkpoints") / "quantised"
    return request.param, checkpoints.write(MODEL, folder, checkpoints.LAYOUTS[request.param])


def meaning(values: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return what stored numbers mean, in float64."""
    if values.dtype == torch.int8:
        codes = values.view(torch.uint8).int()
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        wide = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.float64)[codes]
    else:
        wide = values.double()
    rows, columns = (size // count for size, count in zip(wide.shape, sf.shape, strict=True))
    return wide * sf.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def test_every_number_is_the_nearest(written):
    name, _ = written
    weight = load_file(MODEL / "model.safetensors")[f"{EXPERT}.weight"].clone()
    weight[:, :128] = 0  # blocks without a largest number
    weight[0, 128:136] = torch.tensor([8.0, -7.9, 6.1, -5.1, 2.4, -0.3, 0.2, -0.0])
    values, sf = checkpoints.LAYOUTS[name].quantise(weight)
    got = meaning(values, sf)
    assert got[:, :128].eq(0).all()
    if name == "MXFP4":
        # The largest number is 8, so the factor is 2.
        assert (got[0, 128:136] / 2).tolist() == [4.0, -4.0, 3.0, -3.0, 1.0, 0.0, 0.0, 0.0]
        grid = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.float64)
        factors = sf.double().repeat_interleave(32, 1)
        best = (weight.double()[..., None] - factors[..., None] * grid).abs().amin(-1)
        assert torch.equal((weight.double() - got).abs(), best)
    else:
        factors = sf.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        error = (got - weight.double()).abs()
        # Half a step: 2^-4 of the number, and 2^-10 factors where e4m3 has no more exponents.
        assert (error <= torch.maximum(weight.double().abs() * 2**-4, factors * 2**-10) * 1.0001).all()


def test_envoi_reads_every_number(written):
    _, folder = written
    stored = load_file(folder / "model.safetensors")
    ending = ".weight_scale_inv" if f"{EXPERT}.weight_scale_inv" in stored else ".scale"
    gate_up, down, *_ = unpack(from_checkpoint(folder, 2), dtype=torch.float32)
    names = [EXPERT.replace("gate", part) for part in ("gate", "up", "down")]
    parts = [meaning(stored[f"{name}.weight"], stored[name + ending]).float() for name in names]
    assert torch.equal(gate_up[5], torch.cat(parts[:2]))
    assert torch.equal(down[5], parts[2])
