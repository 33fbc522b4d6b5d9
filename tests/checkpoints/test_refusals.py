"""Checkpoints that are incomplete, wrong or unknown: one error, before anything is read where headers show it."""

import gc
import json
from pathlib import Path

import pytest
import torch

from envoi.checkpoints.shards import Shards
from envoi.experts import from_checkpoint
from tests.checkpoints.files import CASES, CHANNELS, V3
from tests.checkpoints.test_from_checkpoint import Counted, counted  # noqa: F401

NAME = "model.layers.1.mlp.experts.3.up_proj"
OSS = "model.layers.1.mlp.experts."


def without(name):
    return lambda files: files.tensors.pop(name)


def put(name, x):
    return lambda files: files.tensors.update({name: x})


def say(**config):
    return lambda files: files.config.update(config)


def quantised_by(**given):
    return say(
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": given | {"targets": ["Linear"]}},
        }
    )


SHARD = r"model-0000\d-of-00002.safetensors"
F8 = torch.float8_e4m3fn
SPOILT = [
    ("deepseek_v3", without(f"{NAME}.weight"),
     rf"{NAME}.weight: expected a tensor of this name .the layer has experts 0 to 4., got none"),
    ("deepseek_v3", without(f"{NAME}.weight_scale_inv"),
     rf"{NAME}.weight_scale_inv: expected a tensor of this name .the factors of {NAME}.weight., got none"),
    ("deepseek_v3", put(f"{NAME}.weight", torch.zeros(128, 128).to(F8)),
     rf"{SHARD}: {NAME}.weight: expected float8_e4m3fn .128, 256., got float8_e4m3fn .128, 128."),
    ("deepseek_v3", put(f"{NAME}.weight", torch.zeros(128, 256).bfloat16()),
     rf"{SHARD}: {NAME}.weight: expected float8_e4m3fn .128, 256., got bfloat16 .128, 256."),
    ("deepseek_v3", put(f"{NAME}.weight_scale_inv", torch.zeros(2, 2)),
     rf"{SHARD}: {NAME}.weight_scale_inv: expected float32 or .* .1, 2., got float32 .2, 2."),
    ("deepseek_v3", put("model.layers.1.mlp.experts.0.gate_proj.weight", torch.zeros(128, 256).to(torch.float8_e5m2)),
     rf"{SHARD}: .*experts.0.gate_proj.weight: expected bfloat16 or .*, got float8_e5m2 .128, 256."),
    ("deepseek_v3", put("model.layers.1.mlp.experts.0.gate_proj.weight", torch.zeros(96, 256).to(F8)),
     r"experts.0.up_proj.weight: expected float8_e4m3fn .96, 256., got float8_e4m3fn .128, 256."),
    ("deepseek_v3", say(n_routed_experts=6),
     r"experts.5.gate_proj.weight: expected a tensor of this name .the layer has experts 0 to 5., got none"),
    ("deepseek_v3", say(n_routed_experts=4), r"config.json: expected 5 experts, as the files have of layer 1, got 4"),
    ("deepseek_v3", say(n_routed_experts=-1), r"config.json: expected 5 experts, as the files have of layer 1, got -1"),
    ("qwen3", put("model.layers.1.mlp.experts.5.up_proj.weight", torch.zeros(128, 256).bfloat16()),
     r"config.json: expected 6 experts, as the files have of layer 1, got 5"),
    ("mixtral", put("model.layers.1.block_sparse_moe.experts.5.w3.weight", torch.zeros(128, 256).bfloat16()),
     r"config.json: expected 6 experts, as the files have of layer 1, got 5"),
    ("qwen3", put("model.layers.1.mlp.experts.5.down_proj.weight", torch.zeros(256, 128).bfloat16()),
     r"config.json: expected 6 experts, as the files have of layer 1, got 5"),
    ("qwen3", put(f"{NAME}.bias", torch.zeros(128)),
     rf"{SHARD}: {NAME}.bias: expected experts without biases, got one"),
    ("deepseek_v3", say(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
     r"config.json: quantization_config.weight_block_size: expected rows and columns of a block, got .128."),
    ("deepseek_v3", say(quantization_config="fp8"),
     r"config.json: quantization_config: expected an object with quant_method, got 'fp8'"),
    ("glm_fp8", quantised_by(weights=CHANNELS | {"strategy": "block", "block_structure": "128"}),
     r"config.json: quantization_config.config_groups.group_0.weights.block_structure: expected rows .*, got '128'"),
    ("gpt_oss", without(f"{OSS}down_proj_scales"),
     rf"{OSS}down_proj_scales: expected a tensor of this name, got none"),
    ("gpt_oss", without(f"{OSS}down_proj_bias"), rf"{OSS}down_proj_bias: expected a bias, as the other .*, got none"),
    ("gpt_oss", put(f"{OSS}down_proj_blocks", torch.zeros(5, 256, 3, 16, dtype=torch.uint8)),
     rf"{SHARD}: {OSS}down_proj_blocks: expected uint8 .5, 256, 4, 16., got uint8 .5, 256, 3, 16."),
    ("gpt_oss", say(num_local_experts=4),
     rf"{OSS}gate_up_proj_blocks: expected uint8 .4, 256, 8, 16., got uint8 .5, 256, 8, 16."),
    ("gpt_oss", put(f"{OSS}gate_up_proj_bias", torch.zeros(5, 3)), rf"{OSS}gate_up_proj_bias: .* .5, 256., got .*5, 3"),
    ("qwen3_5", put("model.language_model.layers.1.mlp.experts.down_proj", torch.zeros(5, 256, 120).bfloat16()),
     r"experts.down_proj: expected bfloat16 .5, 256, 128., got bfloat16 .5, 256, 120."),
    ("deepseek_v3", say(quantization_config={"quant_method": "aqlm"}),
     r"config.json: quantization_config.quant_method: expected one of 'fp8', 'mxfp4', .*, 'modelopt', got 'aqlm'"),
    ("modelopt_nvfp4", without(f"{NAME}.weight_scale_2"),
     rf"{NAME}.weight_scale_2: expected a tensor of this name .the scale of {NAME}.weight., got none"),
    ("compressed_nvfp4", put(f"{NAME}.weight_global_scale", torch.ones(2)),
     rf"{SHARD}: {NAME}.weight_global_scale: expected float32 .. or .1., got float32 .2."),
    ("compressed_nvfp4", put(f"{NAME}.weight_scale", torch.ones(128, 8).to(F8)),
     rf"{SHARD}: {NAME}.weight_scale: expected .* .128, 16., got float8_e4m3fn .128, 8."),
    ("modelopt_nvfp4", say(quantization_config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
     r"config.json: quantization_config.quant_algo: expected quantized_layers beside 'MIXED_PRECISION', got 'MIXED_"),
    ("mixtral_fp8", without("model.layers.1.block_sparse_moe.experts.3.w3.weight_scale"),
     r"experts.3.w3.weight_scale: expected a tensor of this name .the factors of .*w3.weight., got none"),
    ("glm_fp8", quantised_by(weights={"num_bits": 4, "type": "int", "strategy": "group"}, format="pack-quantized"),
     r"config.json: quantization_config.config_groups.group_0: expected 8-bit .* got 4-bit int by group in 'pack-qua"),
    ("qwen3", say(hidden_act="relu"), r"config.json: hidden_act: expected one of 'silu', .*, got 'relu'"),
    ("qwen3", say(hidden_act=None), r"config.json: hidden_act: expected the experts' activation, got none of"),
    ("qwen3", say(hidden_act=["silu"]), r"config.json: hidden_act: expected one of 'silu', .*, got .'silu'."),
    ("qwen3", say(swiglu_limit="7"), r"config.json: swiglu_limit: expected a number, got '7'"),
    ("gpt_oss", say(swiglu_alpha="1.5"), r"config.json: swiglu_alpha: expected a number, got '1.5'"),
    ("qwen3", say(model_type="llama4_text"), r"config.json: model_type: .*got 'llama4': its tokens are multiplied"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILT, ids=[message[:60] for *_, message in SPOILT])
def test_one_error_before_anything_is_read(name, spoil, message, tmp_path, counted):  # noqa: F811
    files = CASES[name].make()
    spoil(files)
    files.write(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_checkpoint(tmp_path, 1, requantize=True)
    assert Counted.read == 0


@pytest.fixture
def folder(tmp_path):
    return CASES["deepseek_v3"].make().write(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_shard(folder, kept):
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:kept])
    size = len(whole[:kept])
    with pytest.raises(ValueError, match=f"{shard}: expected a whole file of safetensors, got one of {size} bytes"):
        from_checkpoint(folder, 1)


def held(folder) -> tuple[int, bool]:
    """Return how many tensors there are, and whether a file of the folder is open."""
    gc.collect()
    tensors = sum(type(x) in (torch.Tensor, torch.nn.Parameter) for x in gc.get_objects())
    return tensors, str(folder) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_read_that_fails_leaves_nothing(name, tmp_path, monkeypatch):
    folder = CASES[name].make().write(tmp_path)
    reads = []

    def failing(original):
        def read(self, *arguments):
            reads.append(arguments)
            if len(reads) == 4:
                raise OSError("the disk is gone")
            return original(self, *arguments)

        return read

    for method in ("read", "read_rows"):
        monkeypatch.setattr(Shards, method, failing(getattr(Shards, method)))
    before = held(folder)
    text = ""
    try:
        from_checkpoint(folder, 1, progress=False)
    except OSError as error:
        text = str(error)
    assert text == "the disk is gone"
    assert held(folder) == before == (before[0], False)


def test_a_shard_that_is_not_there(folder):
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors: expected a file of .*, got no such file"):
        from_checkpoint(folder, 1)


def test_an_index_that_names_the_wrong_shard(folder):
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name = f"{NAME}.weight"
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {said["weight_map"][name]}
    said["weight_map"][name] = other.pop()
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"{said['weight_map'][name]}: {name}: expected this tensor, as the index say"):
        from_checkpoint(folder, 1)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', "[1]"])
def test_an_index_that_is_none(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json: expected (JSON with )?a weight_map"):
        from_checkpoint(folder, 1)


def test_an_index_with_a_file_that_is_no_name(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {f"{NAME}.weight": 3}}))
    with pytest.raises(ValueError, match=f"index.json: {NAME}.weight: expected a weight_map with the name .*, got 3"):
        from_checkpoint(folder, 1)


def test_experts_under_unknown_names(tmp_path):
    files = CASES["qwen3"].make()
    files.tensors = {name.replace(".experts.", ".members."): x for name, x in files.tensors.items()}
    with pytest.raises(ValueError, match=r"expected experts under names that Envoi knows, like model.layers.1.mlp.*"):
        from_checkpoint(files.write(tmp_path), 1)


def test_a_config_that_is_none(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: expected JSON, got"):
        from_checkpoint(folder, 1)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json: expected the checkpoint's configuration, got no such file"):
        from_checkpoint(folder, 1)


def test_folders_without_a_checkpoint(tmp_path):
    for path in (tmp_path / "nowhere", "Qwen/Qwen3-30B-A3B", None):
        with pytest.raises(ValueError, match="path: expected a checkpoint's folder or a file of safetensors on this"):
            from_checkpoint(path, 1)  # pyright: ignore[reportArgumentType]
    (tmp_path / "config.json").write_text(json.dumps(V3))
    with pytest.raises(ValueError, match="expected files of safetensors, got none"):
        from_checkpoint(tmp_path, 1)


@pytest.mark.parametrize(("message", "given"), [
    (r"layer: expected one with experts, which are 1-2, got 0", {"layer": 0}),
    (r"layer: expected one with experts, which are 1-2, got 3", {"layer": 3}),
    (r"layer: expected an int of at least 0, got -1", {"layer": -1}),
    (r"layer: expected an int of at least 0, got '1'", {"layer": "1"}),
    (r"experts: expected an int from 0 to 4 .the checkpoint has 5., got 5", {"experts": range(4, 6)}),
    (r"experts: expected an int from 0 to 4 .the checkpoint has 5., got -1", {"experts": [-1]}),
    (r"experts: expected each expert once, got .1, 1.", {"experts": [1, 1]}),
    (r"experts: expected ids, for instance range.0, 5., or None for all, got 3", {"experts": 3}),
    (r"format: expected one of 'bf16', .*, 'auto', got 'fp4'", {"format": "fp4"}),
])  # fmt: skip
def test_arguments(message, given, folder):
    with pytest.raises(ValueError, match=message):
        from_checkpoint(**({"path": folder, "layer": 1} | given))
