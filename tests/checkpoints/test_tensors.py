"""Tensors beside an expert's weights, in several files and under several names: known, or refused by name."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from envoi.checkpoints.names import HARMLESS
from envoi.experts import from_checkpoint, unpack
from tests.checkpoints.files import CASES
from tests.checkpoints.table import error_of

SEPARATE, STACKED = "model.layers.1.mlp.experts.", "model.language_model.layers.1.mlp.experts."
ROW = "model.layers.1.mlp.experts.3.up_proj."
FOREIGN = [
    ("glm_fp8", f"{ROW}weight_zero_point"),
    ("glm_fp8", f"{ROW}weight_g_idx"),
    ("glm_fp8", f"{ROW}weight_scale_inv"),  # beside weight_scale, which is the one that is read
    ("deepseek_v3", f"{ROW}pre_quant_scale"),
    ("compressed_nvfp4", f"{ROW}weight_scale_2"),
    ("modelopt_nvfp4", f"{ROW}weight_packed"),
    ("qwen3", f"{ROW}weight_scale"),
    ("qwen3", f"{ROW}lora_A.weight"),
    ("qwen3", f"{SEPARATE}4.post_norm.weight"),
    ("qwen3", f"{SEPARATE}0.act_fn.alpha"),
    ("qwen3", f"{SEPARATE}post_expert_norm.weight"),
    ("qwen3", f"{SEPARATE}scale"),
    ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w2.scale"),
    ("qwen3_5", f"{STACKED}gate_up_proj_scale_inv"),
    ("qwen3_5", f"{STACKED}down_proj_zero_point"),
    ("qwen3_5", f"{STACKED}post_expert_norm.weight"),
    ("gpt_oss", f"{SEPARATE}down_proj_alpha"),
    ("stacked_fp8", f"{SEPARATE}gate_up_proj_zero_point"),
    ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.bias"),
    ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight_scale"),
]
KNOWN = [
    *(("glm_fp8", f"{ROW}{part}") for part in HARMLESS),
    ("qwen3", f"{SEPARATE}e_score_correction_bias"),
    ("qwen3", "model.layers.1.mlp.shared_experts.norm.weight"),
    ("qwen3", "model.layers.2.mlp.experts.0.post_norm.weight"),  # of another layer
    ("qwen3_5", f"{STACKED}gate_up_proj_input_scale"),
    ("granitemoe", "model.layers.1.block_sparse_moe.router.layer.weight"),
    ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.input_scale"),
]


@pytest.mark.parametrize(("case", "name"), FOREIGN)
def test_a_tensor_that_may_change_what_weights_mean(case, name, tmp_path):
    files = CASES[case].make()
    files.tensors[name] = torch.zeros(5)
    files.write(tmp_path)
    message = rf"safetensors: {re.escape(name)}: expected beside the experts' weights only tensors that Envoi knows"
    for experts in (None, [1]):
        with pytest.raises(ValueError, match=message):
            from_checkpoint(tmp_path, 1, experts, requantize=True)


@pytest.mark.parametrize(("case", "name"), KNOWN)
def test_a_tensor_that_changes_nothing(case, name, tmp_path):
    files = CASES[case].make()
    files.tensors[name] = torch.zeros(5)
    assert error_of(from_checkpoint(files.write(tmp_path), 1), files.layers[1]) == 0


def split_in_two(files, folder):
    """Write what ranks of tensor parallelism have: all names in each of two files, with half of each matrix."""
    halves = [{}, {}]
    for name, x in files.tensors.items():
        parts = x.chunk(2, dim=1 if "down_proj" in name else 0) if x.shape[0] > 1 else (x, x)
        for half, part in zip(halves, parts, strict=True):
            half[name] = part.contiguous()
    for rank, half in enumerate(halves):
        save_file(half, folder / f"pytorch_model-TP-{rank:03}.safetensors")


def test_the_same_tensor_in_two_files(tmp_path):
    files = CASES["qwen3"].make()
    split_in_two(files, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    message = r"TP-001.safetensors: \S+: expected each tensor in one file, got one that is in \S+TP-000.safetensors too"
    with pytest.raises(ValueError, match=message):
        from_checkpoint(tmp_path, 1)


def test_an_index_says_which_of_two_files(tmp_path):
    files = CASES["qwen3"].make()
    files.write(tmp_path)
    save_file({name: x + 1 for name, x in files.tensors.items()}, tmp_path / "a-stale.safetensors")
    assert error_of(from_checkpoint(tmp_path, 1), files.layers[1]) == 0


def test_of_two_indices_that_of_other_libraries_is_read(tmp_path):
    files = CASES["qwen3"].make()
    files.write(tmp_path)
    for other in ("consolidated", "a"):
        file = tmp_path / f"{other}.safetensors"
        save_file({name: x + 1 for name, x in files.tensors.items()}, file)
        said = {"weight_map": dict.fromkeys(files.tensors, file.name)}
        (tmp_path / f"{file.name}.index.json").write_text(json.dumps(said))
    assert error_of(from_checkpoint(tmp_path, 1), files.layers[1]) == 0
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"expected one \S+, got a.safetensors.index.json, consolidated.safe"):
        from_checkpoint(tmp_path, 1)


OTHERS = {
    "another prefix": ("model.layers.1.mlp", "language_model.layers.1.mlp"),
    "another block": ("layers.1.mlp.", "layers.1.ffn."),
    "other projections": ("gate_proj", "w1"),
    "stacked too": ("0.gate_proj.weight", "gate_up_proj"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_layer_under_two_names(which, tmp_path):
    files = CASES["qwen3"].make()
    old, new = OTHERS[which]
    ours = {name: x for name, x in files.tensors.items() if name.startswith(SEPARATE)}
    files.tensors |= {name.replace(old, new): x.clone() for name, x in ours.items()}
    files.write(tmp_path)
    both = r"\S+safetensors: \S+: expected the experts of layer 1 under one name, got \S+ too, in \S+safetensors"
    with pytest.raises(ValueError, match=both) as error:
        from_checkpoint(tmp_path, 1)
    assert new in str(error.value)
    if "layers.1." in old:  # other layers aren't concerned
        assert error_of(from_checkpoint(tmp_path, 2), files.layers[2]) == 0


@pytest.mark.parametrize(
    "case", ["qwen3", "tensor_fp8", "glm_fp8", "deepseek_v3", "modelopt_nvfp4", "compressed_mxfp4"]
)
def test_experts_without_a_gate(case, tmp_path):
    files = CASES[case].make()
    files.config = {key: x for key, x in files.config.items() if key != "hidden_act"} | {"mlp_hidden_act": "relu2"}
    files.tensors = {name: x for name, x in files.tensors.items() if "experts." not in name or "gate_proj" not in name}
    experts = from_checkpoint(files.write(tmp_path), 1, [3, 0])
    assert experts.activation == "relu2"
    up, down, *_ = unpack(experts, dtype=torch.float64)
    assert torch.equal(up, files.layers[1].up[[3, 0]])
    assert torch.equal(down, files.layers[1].down[[3, 0]])
    files.config["mlp_hidden_act"] = "silu"
    message = r"experts.0.gate_proj.weight: expected a tensor of this name, as the activation has a gate, got none"
    with pytest.raises(ValueError, match=message):
        from_checkpoint(files.write(tmp_path), 1)


def test_an_order_of_rows_that_is_not_known(tmp_path):
    files = CASES["qwen3_5"].make()
    base = STACKED
    files.tensors[f"{base}w13_weight"] = files.tensors.pop(f"{base}gate_up_proj")
    files.tensors[f"{base}w2_weight"] = files.tensors.pop(f"{base}down_proj")
    with pytest.raises(
        ValueError, match=r"model_type: expected one of 'inkling', .*w13_weight is known, got 'qwen3_5_moe"
    ):
        from_checkpoint(files.write(tmp_path), 1)
