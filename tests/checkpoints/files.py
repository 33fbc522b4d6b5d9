"""Small checkpoints in the layouts of published ones, and what they mean in float64.

Names, dtypes and shapes are those of the families' published files; nothing here uses the product's readers, packers or
quantisers. Layer 0 is dense in families that begin so, and every layer has shared experts and a router beside.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.moe.stored import e4m3, float_factors, meaning, pairs, power_bytes, seeded

EXPERTS, HIDDEN, INTER, LAYERS = 5, 256, 128, (1, 2)
ROW, BLOCK, MX, NV, WHOLE = (1, 0), (128, 128), (1, 32), (1, 16), (0, 0)
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass
class Meaning:
    """Weights of a layer in float64: gate, up [E, I, H], down [E, H, I], biases [E, I], [E, I], [E, H] or None."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


@dataclass
class Files:
    """Tensors of a checkpoint to be, by name, its config, and its layers' meanings."""

    config: dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: dict[int, Meaning] = field(default_factory=dict)

    def write(self, folder: Path, shards: int = 2) -> Path:
        """Write config.json, shards and their index; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        names, weight_map = sorted(self.tensors), {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = names[shard::shards]
            save_file({name: self.tensors[name].contiguous() for name in part}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def group_of(group, rows, columns):
    return group[0] or rows, group[1] or columns


def quantised(values: Callable, factors: Callable, group, seed: int, rows: int, columns: int):
    """Return random values [rows, columns] and factors of a matrix, and what they mean."""
    sides = group_of(group, rows, columns)
    x = values(rows, columns // (2 if values is pairs else 1), seed=seed)
    sf = factors(-(-rows // sides[0]), -(-columns // sides[1]), seed=seed + 1)
    return x, sf, meaning(x, sf, sides)


def beside(config: dict, prefix: str, block: str) -> Files:
    """Return the tensors of a model that aren't its experts, small ones and one of another type."""
    files = Files(copy.deepcopy(config))
    files.tensors[f"{prefix}embed_tokens.weight"] = torch.zeros(8, HIDDEN).bfloat16()
    for layer in (0, *LAYERS):
        base = f"{prefix}layers.{layer}."
        files.tensors[f"{base}self_attn.q_proj.weight"] = torch.zeros(8, 8).bfloat16()
        if layer:
            files.tensors[f"{base}{block}.gate.weight"] = torch.zeros(EXPERTS, HIDDEN).bfloat16()
            for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
                files.tensors[f"{base}{block}.shared_experts.{name}.weight"] = torch.zeros(8, 8).bfloat16()
        files.tensors[f"mtp.layers.{layer}.{block}.experts.0.gate_proj.weight"] = torch.zeros(3, 3).bfloat16()
    return files


def separate(
    config, *, prefix="model.", block="mlp", inter=INTER, hidden=HIDDEN, names=("gate_proj", "up_proj", "down_proj"),
    weight="weight", factor="weight_scale_inv", values=e4m3, factors=float_factors, group=BLOCK, stored=lambda x: x,
    stored_sf=lambda x: x, scales=None,
) -> Files:  # fmt: skip
    """Make a checkpoint with a tensor for each matrix.

    stored, stored_sf: change the tensors' types or shapes last. scales: adds the tensors of a matrix's scale beside, by
    the last parts of their names, and returns what it multiplies by.
    """
    files = beside(config | ({"hidden_size": hidden} if "hidden_size" in config else {}), prefix, block)
    shapes = (inter, hidden), (inter, hidden), (hidden, inter)
    for layer in LAYERS:
        meant = []
        for part, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            each = []
            for expert in range(EXPERTS):
                base = f"{prefix}layers.{layer}.{block}.experts.{expert}.{name}."
                seed = 1000 * layer + 10 * expert + 3 * part
                if factors is None:
                    x = torch.randn(*shape, generator=seeded(seed)).to(values)
                    files.tensors[base + weight] = x
                    each.append(x.double())
                    continue
                x, sf, means = quantised(values, factors, group, seed, *shape)
                files.tensors[base + weight], files.tensors[base + factor] = stored(x), stored_sf(sf)
                if scales is not None:
                    more, times = scales(seed)
                    files.tensors |= {base + part: y for part, y in more.items()}
                    means = means * times
                each.append(means)
            meant.append(torch.stack(each))
        files.layers[layer] = Meaning(*meant)
    return files


def floats(config, dtype=torch.bfloat16, **options) -> Files:
    return separate(config, values=dtype, factors=None, **options)


def gpt_oss(blocks: bool) -> Files:
    """Make gpt-oss: gate and up rows in turn, biases; MXFP4 blocks, or transposed bf16 matrices."""
    config = {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "hidden_act": "silu", "swiglu_limit": 7.0}
    if blocks:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.mlp.router"],
        }
    files = beside(config, "model.", "mlp")
    for layer in LAYERS:
        base = f"model.layers.{layer}.mlp.experts."
        meant = {}
        for name, rows, columns in (("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER)):
            seed = 100 * layer + rows
            bias = torch.randn(EXPERTS, rows, generator=seeded(seed)).bfloat16()
            files.tensors[f"{base}{name}_bias"] = bias
            if blocks:
                x = pairs(EXPERTS, rows, columns // 32, 16, seed=seed)
                sf = power_bytes(EXPERTS, rows, columns // 32, seed=seed + 1)
                files.tensors[f"{base}{name}_blocks"], files.tensors[f"{base}{name}_scales"] = x, sf
                means = meaning(x.flatten(-2), sf, MX)
            else:
                x = torch.randn(EXPERTS, columns, rows, generator=seeded(seed)).bfloat16()
                files.tensors[base + name] = x
                means = x.double().transpose(1, 2)
            meant[name] = means, bias.double()
        (both, both_bias), (down, down_bias) = meant["gate_up_proj"], meant["down_proj"]
        biases = both_bias[:, 0::2], both_bias[:, 1::2], down_bias
        files.layers[layer] = Meaning(both[:, 0::2], both[:, 1::2], down, biases)
    return files


def stacked(config, *, prefix="model.", names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
            transposed=False) -> Files:  # fmt: skip
    """Make a bf16 checkpoint with all experts of a layer in a tensor, all gate rows before all up rows."""
    files = beside(config, prefix, "mlp")
    for layer in LAYERS:
        both = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=seeded(layer)).bfloat16()
        down = torch.randn(EXPERTS, HIDDEN, INTER, generator=seeded(layer + 9)).bfloat16()
        for name, x in zip(names, (both, down), strict=True):
            files.tensors[f"{prefix}layers.{layer}.{name}"] = x.transpose(1, 2) if transposed else x
        files.layers[layer] = Meaning(*both.double().chunk(2, dim=1), down.double())
    return files


def stacked_fp8() -> Files:
    """Make what transformers writes for FP8 experts that it holds together: factors of 128 x 128 blocks beside."""
    files = beside(silu("qwen3_moe", num_experts=EXPERTS, quantization_config=FP8), "model.", "mlp")
    for layer in LAYERS:
        base = f"model.layers.{layer}.mlp.experts."
        meant = []
        for name, rows, columns in (("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER)):
            x = e4m3(EXPERTS, rows, columns, seed=layer + rows)
            sf = float_factors(EXPERTS, rows // 128, columns // 128, seed=layer + rows + 1)
            files.tensors[base + name], files.tensors[f"{base}{name}_scale_inv"] = x, sf
            meant.append(meaning(x, sf, BLOCK))
        files.layers[layer] = Meaning(*meant[0].chunk(2, dim=1), meant[1])
    return files


def granite_fp8() -> Files:
    """Make Granite 4 as compressed-tensors writes it: all experts in a tensor, factors of rows [E, rows, 1] beside."""
    config = silu("granitemoehybrid", num_local_experts=EXPERTS, quantization_config=compressed(CHANNELS))
    files = beside(config, "model.", "block_sparse_moe")
    for layer in LAYERS:
        base = f"model.layers.{layer}.block_sparse_moe."
        meant = []
        for name, rows, columns in (("input_linear", 2 * INTER, HIDDEN), ("output_linear", HIDDEN, INTER)):
            x, sf = e4m3(EXPERTS, rows, columns, seed=layer + rows), bf16_factors(EXPERTS, rows, 1, seed=layer + rows)
            files.tensors[f"{base}{name}.weight"], files.tensors[f"{base}{name}.weight_scale"] = x, sf
            meant.append(meaning(x, sf, (1, columns)))
        files.layers[layer] = Meaning(*meant[0].chunk(2, dim=1), meant[1])
    return files


def silu(family: str, **more) -> dict:
    return {"model_type": family, "hidden_act": "silu", "hidden_size": HIDDEN, **more}


def compressed(weights: dict, format: str = "float-quantized") -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def modelopt_scales(seed):
    """Scales as ModelOpt writes them, numbers: of the weights, and of activations."""
    scale = torch.rand((), generator=seeded(seed)) * 1e-3 + 1e-4
    return {"weight_scale_2": scale, "input_scale": torch.tensor(0.01)}, scale.double()


def static_scales(seed):
    """Scale of activations beside FP8 weights; nothing multiplies by it."""
    return {"input_scale": torch.tensor(0.02)}, 1.0


def inverse_scales(seed):
    """Scales as compressed-tensors writes them, one element: what has been multiplied."""
    scale = torch.rand(1, generator=seeded(seed)) * 1e4 + 1e3
    return {"weight_global_scale": scale, "input_global_scale": torch.ones(1) * 300}, (1.0 / scale).double()


def nvfp4_factors(*shape, seed=0):
    """E4M3 factors, none negative: 0, subnormal and normal ones."""
    return torch.randint(0, 0x7F, shape, generator=seeded(seed)).to(torch.uint8).view(torch.float8_e4m3fn)


def e8m0(*shape, seed=0):
    return power_bytes(*shape, seed=seed).view(torch.float8_e8m0fnu)


def power_floats(*shape, seed=0):
    return torch.exp2(power_bytes(*shape, seed=seed).float() - 127)


def bf16_factors(*shape, seed=0):
    return float_factors(*shape, seed=seed).bfloat16()


def mxfp8(config, quantised, factor="weight_scale", **options) -> Files:
    """Make a checkpoint in MXFP8 whose quantization_config is `quantised`."""
    whole = config | {"quantization_config": quantised}
    return separate(whole, group=MX, factors=power_bytes, factor=factor, **options)


W123 = {"names": ("w1", "w3", "w2")}
V4 = {"prefix": "", "block": "ffn", "factor": "scale", **W123}
V3 = silu("deepseek_v3", n_routed_experts=EXPERTS, quantization_config=FP8)
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
V4_CONFIG = silu("deepseek_v4", n_routed_experts=EXPERTS, swiglu_limit=10.0)
UE8M0 = FP8 | {"scale_fmt": "ue8m0"}
QWEN = silu("qwen3_moe", num_experts=EXPERTS)
NVFP4 = {"values": pairs, "factors": nvfp4_factors, "group": NV, "factor": "weight_scale"}
FP4_OF_16 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
M3 = FP8 | {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head", "gate"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4_OF_16}}}  # fmt: skip
GLM = silu("glm4_moe", n_routed_experts=EXPERTS)


@dataclass
class Case:
    """Layout of published checkpoints: which they are, how they store experts, and a maker of a small one."""

    published: str
    stored: str
    make: Callable[[], Files]


CASES = {
    "deepseek_v3": Case(
        "DeepSeek-V3, R1, V3.2, Kimi-K2", "FP8, a float32 factor per 128 x 128", lambda: separate(V3)),
    "deepseek_v31": Case(
        "DeepSeek-V3.1", "FP8, a power of two in float32 per 128 x 128",
        lambda: separate(V3 | {"quantization_config": UE8M0}, factors=power_floats)),
    "qwen3_fp8": Case(
        "Qwen3-30B-A3B-FP8, 235B-A22B-FP8, Qwen3-Next-FP8", "FP8, a bf16 factor per 128 x 128",
        lambda: separate(QWEN | {"quantization_config": FP8}, factors=bf16_factors)),
    "minimax_m2": Case(
        "MiniMax-M2", "FP8, a float32 factor per 128 x 128",
        lambda: separate(silu("minimax_m2", num_local_experts=EXPERTS, quantization_config=FP8),
                         block="block_sparse_moe", **W123)),
    "deepseek_v4": Case(
        "DeepSeek-V4", "MXFP4 pairs in int8, UE8M0 per 1 x 32",
        lambda: separate(V4_CONFIG | {"expert_dtype": "fp4", "quantization_config": UE8M0}, values=pairs, factors=e8m0,
                         group=MX, stored=lambda x: x.view(torch.int8), **V4)),
    "deepseek_v4_base": Case(
        "DeepSeek-V4 Base", "FP8, UE8M0 per 128 x 128",
        lambda: separate(V4_CONFIG | {"expert_dtype": "fp8", "quantization_config": UE8M0}, factors=e8m0, **V4)),
    "gpt_oss": Case("gpt-oss-20b, 120b", "MXFP4 blocks, UE8M0 bytes per 1 x 32, biases", lambda: gpt_oss(True)),
    "glm_fp8": Case(
        "GLM-4.5-FP8, 4.6-FP8; compressed-tensors by channel", "FP8, a bf16 or float32 factor a row",
        lambda: separate(GLM | {"quantization_config": compressed(CHANNELS)}, factor="weight_scale", group=ROW,
                         factors=bf16_factors)),
    "tensor_fp8": Case(
        "compressed-tensors by tensor", "FP8, a factor a matrix",
        lambda: separate(QWEN | {"quantization_config": compressed(CHANNELS | {"strategy": "tensor"})}, group=WHOLE,
                         factor="weight_scale", stored_sf=lambda x: x.reshape(1))),
    "mixtral_fp8": Case(
        "Mixtral-8x7B-FP8, 8x22B-FP8", "FP8, a factor a matrix",
        lambda: separate(
            silu("mixtral", num_local_experts=EXPERTS,
                 quantization_config={"quant_method": "fp8", "activation_scheme": "static"}),
            block="block_sparse_moe", group=WHOLE, factor="weight_scale", stored_sf=lambda x: x.reshape(1),
            scales=static_scales, **W123)),
    "modelopt_fp8": Case(
        "ModelOpt, FP8", "FP8, a factor a matrix",
        lambda: separate(QWEN | {"quantization_config": MODELOPT | {"quant_algo": "FP8"}}, group=WHOLE,
                         factor="weight_scale", stored_sf=lambda x: x.reshape(()), scales=static_scales)),
    "compressed_mxfp4": Case(
        "compressed-tensors, mxfp4-pack-quantized", "MXFP4 pairs, UE8M0 bytes per 1 x 32",
        lambda: separate(silu("kimi_k2", n_routed_experts=EXPERTS,
                              quantization_config=compressed(FP4, "mxfp4-pack-quantized")),
                         values=pairs, factors=power_bytes, group=MX, weight="weight_packed", factor="weight_scale")),
    "modelopt_nvfp4": Case(
        "ModelOpt, NVFP4", "NVFP4 pairs, E4M3 per 1 x 16, a float32 scale a matrix",
        lambda: separate(QWEN | {"quantization_config": MODELOPT}, scales=modelopt_scales, **NVFP4)),
    "compressed_nvfp4": Case(
        "compressed-tensors, nvfp4-pack-quantized", "NVFP4 pairs, E4M3 per 1 x 16, the inverse of a scale a matrix",
        lambda: separate(GLM | {"quantization_config": compressed(FP4_OF_16, "nvfp4-pack-quantized")},
                         weight="weight_packed", scales=inverse_scales, **NVFP4)),
    "minimax_m3": Case(
        "MiniMax-M3 MXFP8 and others of the method mxfp8", "FP8, UE8M0 bytes per 1 x 32",
        lambda: mxfp8(silu("minimax_m2", num_local_experts=EXPERTS), M3, "weight_scale_inv", block="block_sparse_moe",
                      **W123)),
    "modelopt_mxfp8": Case(
        "MXFP8 by ModelOpt, compressed-tensors, Quark, AutoRound", "FP8, UE8M0 bytes per 1 x 32",
        lambda: mxfp8(QWEN, {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]})),
    "granite_fp8": Case(
        "Granite 4 in FP8, compressed-tensors by channel", "FP8 [E, 2I, H], a factor a row [E, 2I, 1]", granite_fp8),
    "partial_fp8": Case(
        "FP8 blocks where 128 doesn't divide the intermediate size", "FP8, a float32 factor per 128 x 128",
        lambda: separate(V3, inter=192)),
    "stacked_fp8": Case("FP8 experts written by transformers", "FP8 [E, 2I, H], a factor per 128 x 128", stacked_fp8),
    "qwen3": Case("Qwen3-MoE, OLMoE, DeepSeek-V2, GLM-4.5", "bf16, a tensor a matrix", lambda: floats(QWEN)),
    "mixtral": Case(
        "Mixtral, Phi-3.5-MoE", "bf16, a tensor a matrix",
        lambda: floats(silu("mixtral", num_local_experts=EXPERTS), block="block_sparse_moe", **W123)),
    "jamba": Case(
        "Jamba", "bf16, a tensor a matrix",
        lambda: floats(silu("jamba", num_experts=EXPERTS), block="feed_forward")),
    "lfm2": Case(
        "LFM2-MoE", "bf16, a tensor a matrix",
        lambda: floats({"model_type": "lfm2_moe", "num_experts": EXPERTS}, block="feed_forward", **W123)),
    "unquantised": Case(
        "layers that a quantised checkpoint leaves in bf16", "bf16 beside FP8",
        lambda: floats(GLM | {"quantization_config": compressed(CHANNELS)})),
    "qwen3_5": Case(
        "Qwen3.5-MoE", "bf16 [E, 2I, H]",
        lambda: stacked({"model_type": "qwen3_5_moe", "text_config": silu("qwen3_5_moe_text", num_experts=EXPERTS)},
                        prefix="model.language_model.")),
    "qwen3_vl": Case(
        "Qwen3-VL-MoE", "bf16 [E, H, 2I]",
        lambda: stacked({"model_type": "qwen3_vl_moe", "text_config": silu("qwen3_vl_moe_text", num_experts=EXPERTS)},
                        prefix="model.language_model.", transposed=True)),
    "granitemoe": Case(
        "GraniteMoE", "bf16 [E, 2I, H]",
        lambda: stacked(silu("granitemoe", num_local_experts=EXPERTS),
                        names=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"))),
    "gpt_oss_bf16": Case("gpt-oss in bf16", "bf16 [E, H, 2I], rows in turn, biases", lambda: gpt_oss(False)),
}  # fmt: skip
