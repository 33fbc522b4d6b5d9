"""Shared experts of a checkpoint: what docs/shared_experts.md shows first runs as it stands, but for the device."""

import re
from pathlib import Path

import torch

import envoi
from tests.checkpoints.files import EXPERTS, HIDDEN, V3, separate
from tests.checkpoints.test_from_checkpoint import mlp
from tests.helpers.accuracy import relative_error

PAGE = Path(__file__).parents[2] / "docs" / "shared_experts.md"
SHARED = 4  # expert of the files whose tensors are taken for the shared one's


def test_the_example_of_an_fp8_checkpoint(tmp_path):
    files = separate(V3)
    given = {"envoi": envoi, "torch": torch, "path": files.write(tmp_path)}
    for name in ("gate_proj", "up_proj", "down_proj"):
        base = f"model.layers.1.mlp.experts.{SHARED}.{name}."
        given[name] = {part: files.tensors[base + part] for part in ("weight", "weight_scale_inv")}
    tokens = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(0)).mul(0.05).bfloat16()
    weights, ids = torch.tensor([[0.5, 0.25]] * 6), torch.tensor([[3, 0]] * 6, dtype=torch.int32)
    given |= {"tokens": tokens, "routing": envoi.Routing(weights, ids, EXPERTS)}
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(example.replace('"cuda"', '"cpu"'), given)
    of = {expert: mlp(tokens.double(), files.layers[1], expert, False, None) for expert in (3, 0, SHARED)}
    assert relative_error(given["out"], 0.5 * of[3] + 0.25 * of[0] + of[SHARED]) < 0.07
