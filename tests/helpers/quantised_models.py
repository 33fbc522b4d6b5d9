"""Small models of transformers saved with quantised experts, in the layouts of published checkpoints."""

import json
from pathlib import Path

import safetensors.torch
import torch

from tests.helpers.transformers_models import build
from tests.moe.stored import pairs, power_bytes

# What has no kernel on a CPU stays in bf16: attention, routers, dense and shared experts.
REST = [".*self_attn.*", "lm_head", ".*mlp.gate", ".*shared_experts.*", r"model.layers.\d+.mlp.\w+_proj"]
WIDER = {"hidden_size": 256}  # so that a row has two blocks
SIZES: dict[str, dict] = {"gpt_oss": {}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
       "modules_to_not_convert": REST}  # fmt: skip


def save(name: str, folder: Path, quantise, config: dict) -> Path:
    """Save a model after quantise(name, tensor) has given the tensors to store in place of each of its experts'."""
    build(name.split()[0], **SIZES.get(name, WIDER)).save_pretrained(folder)
    file, said = folder / "model.safetensors", folder / "config.json"
    stored = {}
    for key, x in safetensors.torch.load_file(file).items():
        stored |= quantise(key, x) if ".experts." in key else {key: x}
    safetensors.torch.save_file(stored, file, {"format": "pt"})
    said.write_text(json.dumps({**json.loads(said.read_text()), **config}))
    return folder


def fp8_blocks(name: str, folder: Path, powers: bool = False) -> Path:
    """Save a model with FP8 experts, a factor per 128 x 128, float32 or a power of two in UE8M0."""

    def quantise(key, x):
        sf = _blocks(x).abs().amax((1, 3)) / 448
        sf = torch.exp2(sf.log2().ceil()) if powers else sf
        values = (_blocks(x) / sf[:, None, :, None]).view(x.shape).to(torch.float8_e4m3fn)
        return {key: values, f"{key}_scale_inv": sf.to(torch.float8_e8m0fnu) if powers else sf}

    more = {"scale_fmt": "ue8m0"} if powers else {}
    return save(name, folder, quantise, {"quantization_config": FP8 | more})


def fp8_matrices(name: str, folder: Path) -> Path:
    """Save a model with FP8 experts, a factor a matrix."""

    def quantise(key, x):
        sf = x.float().abs().amax() / 448
        return {key: (x.float() / sf).to(torch.float8_e4m3fn), f"{key}_scale_inv": sf.reshape(1, 1)}

    return save(name, folder, quantise, {"quantization_config": FP8 | {"weight_block_size": None}})


def fp4(name: str, folder: Path) -> Path:
    """Save a model with FP4 experts: pairs in int8 and a UE8M0 factor per 1 x 32, as DeepSeek-V4 has them."""

    def quantise(key, x):
        values = pairs(x.shape[0], x.shape[1] // 2, seed=_seed(key)).view(torch.int8)
        sf = power_bytes(x.shape[0], x.shape[1] // 32, seed=_seed(key)).view(torch.float8_e8m0fnu)
        return {key: values, f"{key}_scale_inv": sf}

    dtype = {"expert_dtype": "fp4"}  # where V4 has it, and where V4.1 and transformers since 5.23 do
    return save(name, folder, quantise, {"quantization_config": FP8 | {"scale_fmt": "ue8m0"} | dtype, **dtype})


def compressed_fp8(name: str, folder: Path, strategy: str, leave: str = "-") -> Path:
    """Save a model with FP8 experts of compressed-tensors: a bf16 factor a channel or a matrix; leave: not those."""

    def quantise(key, x):
        if leave in key:
            return {key: x}
        amax = x.float().abs().amax(1, keepdim=True) if strategy == "channel" else x.float().abs().amax().reshape(1)
        sf = (amax / 448).bfloat16()
        return {key: (x.float() / sf.float()).clamp(-448, 448).to(torch.float8_e4m3fn), f"{key}_scale": sf}

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    tokens = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return save(name, folder, quantise, _compressed("float-quantized", weights, tokens))


def compressed_blocks(name: str, folder: Path, inter: int = 192) -> Path:
    """Save a model with FP8 experts of compressed-tensors in blocks of 128 x 128, the last of which are smaller."""

    def quantise(key, x):
        whole = torch.zeros(*(-(-size // 128) * 128 for size in x.shape))
        whole[: x.shape[0], : x.shape[1]] = x
        sf = _blocks(whole).abs().amax((1, 3)) / 448
        values = (_blocks(whole) / sf[:, None, :, None]).view(whole.shape).to(torch.float8_e4m3fn)
        return {key: values[: x.shape[0], : x.shape[1]].contiguous(), f"{key}_scale": sf}

    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    SIZES[f"{name} {inter}"] = WIDER | {"moe_intermediate_size": inter}
    return save(f"{name} {inter}", folder, quantise, _compressed("float-quantized", weights, None))


def compressed_mxfp8(name: str, folder: Path) -> Path:
    """Save a model with MXFP8 experts of compressed-tensors: E4M3 and UE8M0 bytes per 1 x 32."""

    def quantise(key, x):
        exponent = (x.float().unflatten(1, (-1, 32)).abs().amax(2) / 448).log2().ceil()
        values = (x.float().unflatten(1, (-1, 32)) / exponent.exp2()[..., None]).flatten(1).to(torch.float8_e4m3fn)
        return {key: values, f"{key}_scale": (exponent + 127).to(torch.uint8)}

    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return save(name, folder, quantise, _compressed("mxfp8-quantized", weights, None))


def compressed_groups(name: str, folder: Path, targets: list[tuple[str, list[str]]]) -> Path:
    """Save `compressed_fp8` by channel with a group for each (strategy, targets); attention is in FP8 by matrix."""
    compressed_fp8(name, folder, "channel")
    file, said = folder / "model.safetensors", folder / "config.json"
    stored = {}
    for key, x in safetensors.torch.load_file(file).items():
        stored[key] = x
        if "self_attn" in key and key.endswith("_proj.weight"):
            sf = x.float().abs().amax().reshape(1) / 448
            stored |= {key: (x.float() / sf).to(torch.float8_e4m3fn), f"{key}_scale": sf.bfloat16()}
    safetensors.torch.save_file(stored, file, {"format": "pt"})
    config = json.loads(said.read_text())
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$", "re:.*layers.[0-9]+.mlp.[a-z]+_proj$"]
    config["quantization_config"]["config_groups"] = {
        f"group_{n}": {"targets": names, "weights": fp8 | {"strategy": strategy}, "format": "float-quantized"}
        for n, (strategy, names) in enumerate(targets)
    }
    said.write_text(json.dumps(config))
    return folder


def _compressed(format: str, weights: dict, tokens: dict | None) -> dict:
    config = {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_experts.*", r"re:.*mlp.\w+_proj$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": tokens}},
    }  # fmt: skip
    return {"quantization_config": config}


def compressed_int4(name: str, folder: Path) -> Path:
    """Save a model with INT4 experts of compressed-tensors, as Kimi-K2 has them: a bf16 factor for 32 columns."""

    def quantise(key, x):
        key, (rows, columns) = key.removesuffix("weight"), x.shape
        return {
            f"{key}weight_packed": pairs(rows, columns // 2, seed=_seed(key)).view(torch.int32),
            f"{key}weight_scale": torch.full((rows, columns // 32), 0.01).bfloat16(),
            f"{key}weight_shape": torch.tensor([rows, columns]),
        }

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return save(name, folder, quantise, _compressed("pack-quantized", weights, None))


def compressed_nvfp4(name: str, folder: Path) -> Path:
    """Save a model with NVFP4 experts of compressed-tensors: pairs, E4M3 factors, and what a matrix is divided by."""

    def quantise(key, x):
        key, (rows, columns) = key.removesuffix("weight"), x.shape
        return {
            f"{key}weight_packed": pairs(rows, columns // 2, seed=_seed(key)),
            f"{key}weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
            f"{key}weight_global_scale": torch.tensor([100.0]),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return save(name, folder, quantise, _compressed("nvfp4-pack-quantized", weights, None))


def mxfp4_blocks(folder: Path) -> Path:
    """Save gpt-oss with its blocks and scales."""

    def quantise(key, x):
        if key.endswith("_bias"):
            return {key: x}
        blocks = pairs(x.shape[0], x.shape[2], x.shape[1] // 32, 16, seed=_seed(key))
        return {f"{key}_blocks": blocks, f"{key}_scales": power_bytes(*blocks.shape[:3], seed=_seed(key))}

    rest = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": rest}}
    return save("gpt_oss", folder, quantise, config)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.float().view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)


def _seed(key: str) -> int:
    return sum(map(ord, key))
