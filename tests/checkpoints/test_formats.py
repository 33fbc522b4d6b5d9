"""Ways in which writers say and store one format, blocks that don't divide sizes, and entries that aren't known."""

import json

import pytest
import torch

from envoi.experts import from_checkpoint
from tests.checkpoints.files import (
    BLOCK,
    EXPERTS,
    FP4,
    FP4_OF_16,
    FP8,
    GLM,
    M3,
    MODELOPT,
    MX,
    NVFP4,
    QWEN,
    ROW,
    V3,
    WHOLE,
    compressed,
    e8m0,
    floats,
    granite_fp8,
    inverse_scales,
    modelopt_scales,
    mxfp8,
    power_floats,
    separate,
    silu,
    stacked_fp8,
)
from tests.checkpoints.table import error_of
from tests.moe.stored import float_factors, pairs, power_bytes

GROUP32 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
BYTES = GROUP32 | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
HY4 = {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None,
                                                   "exclude_modules": ["lm_head", "*mlp.gate*"]}}  # fmt: skip
ROUND = {
    "bits": 8, "act_bits": 8, "data_type": "mx_fp", "act_data_type": "mx_fp", "group_size": 32, "act_group_size": 32,
    "sym": True, "act_sym": True, "act_dynamic": True, "iters": 0, "autoround_version": "0.12.3",
    "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor",
}  # fmt: skip
SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False,
        "symmetric": None, "ch_axis": -1, "observer_cls": "PerBlockMXObserver"}  # fmt: skip


def quark(weight, **more):
    return {"quant_method": "quark", "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
            "exclude": ["lm_head", "re:.*gate$"], "layer_quant_config": {}, "layer_type_quant_config": {},
            "global_quant_config": {"weight": weight, "input_tensors": weight}, **more}  # fmt: skip


def mxfp4(quantised, weight="weight"):
    return separate(GLM | {"quantization_config": quantised}, values=pairs, factors=power_bytes, group=MX,
                    weight=weight, factor="weight_scale")  # fmt: skip


def fp8(quantised, group, **options):
    return separate(QWEN | {"quantization_config": quantised}, group=group, **{"factor": "weight_scale"} | options)


def nvfp4(quantised, scales=modelopt_scales, **options):
    return separate(QWEN | {"quantization_config": quantised}, scales=scales, **NVFP4, **options)


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.2.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.1.self_attn.q_proj": {"quant_algo": "MXFP8", "group_size": 32}}}  # fmt: skip
FORMATS = {
    "mxfp8, the method": ("mxfp8", lambda: mxfp8(QWEN, M3, "weight_scale_inv")),
    "mxfp8, without a block": ("mxfp8", lambda: mxfp8(
        QWEN, {"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "kv_cache_quant_algo": None})),
    "mxfp8, written as fp8": ("mxfp8", lambda: mxfp8(
        QWEN, FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0", "fmt": "e4m3"}, "weight_scale_inv")),
    "mxfp8, e8m0": ("mxfp8", lambda: separate(
        QWEN | {"quantization_config": M3}, group=MX, factors=e8m0, factor="weight_scale_inv")),
    "mxfp8, ModelOpt": ("mxfp8", lambda: mxfp8(QWEN, {"quant_method": "modelopt", "quant_algo": "mxfp8"})),
    "mxfp8, ModelOpt inline": ("mxfp8", lambda: mxfp8(QWEN, HY4)),
    "mxfp8, modelopt_mxfp8": ("mxfp8", lambda: mxfp8(QWEN, {
        "quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8", "group_size": 32,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}, "weight_scale_inv")),
    "mxfp8, compressed-tensors": ("mxfp8", lambda: mxfp8(QWEN, compressed(BYTES, "mxfp8-quantized"))),
    "mxfp8, mixed": ("mxfp8", lambda: mxfp8(QWEN, compressed(BYTES, "mixed-precision"))),
    "mxfp8, AutoRound": ("mxfp8", lambda: mxfp8(QWEN, ROUND)),
    "mxfp8, AutoRound, others apart": ("mxfp8", lambda: mxfp8(QWEN, ROUND | {"extra_config": {
        "model.layers.1.self_attn.q_proj": {"bits": 16, "data_type": "float"}, ".*lm_head.*": {"bits": 16}}})),
    "mxfp8, Quark": ("mxfp8", lambda: mxfp8(QWEN, quark(SPEC))),
    "mxfp8, Quark by layers": ("mxfp8", lambda: mxfp8(QWEN, quark(
        SPEC | {"dtype": "fp4"}, layer_quant_config={"*experts*": {"weight": SPEC}}))),
    "mxfp4, Quark": ("mxfp4", lambda: mxfp4(quark(SPEC | {"dtype": "fp4"}))),
    "mxfp4, AutoRound": ("mxfp4", lambda: mxfp4(ROUND | {"bits": 4}, "weight_packed")),
    "mxfp4, ModelOpt": ("mxfp4", lambda: mxfp4(
        {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8", "group_size": 32})),
    "mxfp4, compressed-tensors with FP8": ("mxfp4", lambda: mxfp4(compressed(
        FP4 | {"scale_dtype": "torch.uint8"}, "mxfp4-pack-quantized"), "weight_packed")),
    "nvfp4, ModelOpt by layers": ("nvfp4", lambda: nvfp4(MIXED)),
    "nvfp4, ModelOpt's experts": ("nvfp4", lambda: nvfp4(
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16})),
    "nvfp4 beside FP8": ("nvfp4", lambda: nvfp4(FP8 | {
        "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "scale_fmt": "ue8m0"})),
    "nvfp4, AutoRound": ("nvfp4", lambda: nvfp4(
        ROUND | {"bits": 4, "data_type": "nv_fp", "group_size": 16}, inverse_scales, weight="weight_packed")),
    "nvfp4, mixed": ("nvfp4", lambda: nvfp4(
        compressed(FP4_OF_16, "mixed-precision"), inverse_scales, weight="weight_packed")),
    "fp8, ModelOpt by row": ("fp8_row", lambda: fp8(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ROW, stored_sf=lambda x: x[:, 0])),
    "fp8, ModelOpt by block": ("fp8_block128", lambda: fp8(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, BLOCK, stored_sf=lambda x: x[:, None, :, None])),
    "fp8, ModelOpt by block, as DeepSeek": ("fp8_block128", lambda: fp8(
        {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}, BLOCK,
        factor="weight_scale_inv")),
    "fp8, Quark by row": ("fp8_row", lambda: fp8(
        quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}), ROW, stored_sf=lambda x: x[:, 0])),
    "fp8, Quark by matrix": ("fp8_row", lambda: fp8(
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), WHOLE, stored_sf=lambda x: x.reshape(()))),
    "fp8, compressed-tensors by block": ("fp8_block128", lambda: fp8(compressed(
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}), BLOCK)),
    "fp8, naive": ("fp8_row", lambda: fp8(
        compressed({"num_bits": 8, "type": "float", "strategy": None, "symmetric": True}, "naive-quantized"), WHOLE,
        stored_sf=lambda x: x.reshape(1))),
    "fp8, powers of two in groups": ("mxfp8", lambda: fp8(
        compressed(GROUP32 | {"group_size": 128}), (1, 128), factors=power_floats)),
    "fp8, 32 x 32": ("mxfp8", lambda: fp8(
        FP8 | {"weight_block_size": [32, 32]}, (32, 32), factors=e8m0, factor="scale", inter=96, hidden=224)),
    "partial blocks of powers of two": ("fp8_block128", lambda: separate(V3, inter=192, factors=power_floats)),
    "one partial block": ("fp8_block128", lambda: separate(V3, inter=64)),
    "partial blocks, compressed-tensors": ("fp8_block128", lambda: fp8(compressed(
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}), BLOCK, inter=704)),
    "partial blocks of the hidden size": ("mxfp8", lambda: separate(V3, inter=192, hidden=320, factors=power_floats)),
    "left as they are": ("bf16", lambda: floats(
        QWEN | {"quantization_config": FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.experts", "lm_head"]}})),
    "ignored": ("bf16", lambda: floats(
        QWEN | {"quantization_config": compressed(BYTES, "mxfp8-quantized") | {"ignore": ["re:.*experts.*"]}})),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_kept(name, tmp_path):
    format, make = FORMATS[name]
    files = make()
    files.write(tmp_path)
    for layer, meant in files.layers.items():
        experts = from_checkpoint(tmp_path, layer, progress=False)
        assert (experts.format, error_of(experts, meant)) == (format, 0.0)


@pytest.mark.parametrize("make", [
    lambda: separate(V3, inter=192, hidden=320), lambda: fp8(compressed(GROUP32 | {"group_size": 128}), (1, 128)),
    lambda: fp8(FP8 | {"weight_block_size": [32, 32]}, (32, 32), factor="scale"),
])  # fmt: skip
def test_numbers_that_no_format_holds_are_refused_or_rounded(make, tmp_path):
    files = make()
    files.write(tmp_path)
    with pytest.raises(ValueError, match=r"format: expected one that holds these weights exactly, .*requantize=True"):
        from_checkpoint(tmp_path, 1, progress=False)
    for format, most in (("auto", 2.0**-8), ("fp8_row", 0.04)):
        experts = from_checkpoint(tmp_path, 1, format=format, requantize=True, progress=False)
        assert 0 < error_of(experts, files.layers[1]) < most


def quantised_by(given, make=lambda given: mxfp8(QWEN, given)):
    return lambda: make(given)


def weights(**given):
    return quantised_by(compressed(BYTES | given, "mxfp8-quantized"))


def said(config, **more):
    return quantised_by(config | more)


UNKNOWN = [
    (weights(symmetric=False), r"config_groups.group_0.weights.symmetric: expected True, got False"),
    (weights(dynamic=True), r"config_groups.group_0.weights.dynamic: expected False, got True"),
    (weights(actorder="group"), r"config_groups.group_0.weights.actorder: expected .*, got 'group'"),
    (weights(zero_point=True), r"group_0.weights.zero_point: expected an entry that Envoi knows, got True"),
    (weights(group_size=64), r"group_0: expected 8-bit .*, got 8-bit float by group in 'mxfp8-quantized' with gr"),
    (weights(num_bits=6), r"group_0: expected 8-bit .*, got 6-bit float"),
    (weights(strategy="block"), r"group_0.weights.block_structure: expected rows and columns of a block, got None"),
    (quantised_by(compressed(BYTES, "dense")), r"group_0: expected .* in 'dense' with groups of 32"),
    (quantised_by(compressed(BYTES, "mxfp8-quantized") | {"transform_config": {"config_groups": {"R1": {}}}}),
     r"transform_config: expected none"),
    (quantised_by(compressed(BYTES, "mxfp8-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
     r"sparsity_config: expected none"),
    (quantised_by(compressed(BYTES, "mxfp8-quantized") | {"moe_sparsity_config": {"method": "prune"}}),
     r"moe_sparsity_config: expected an entry that Envoi knows"),
    (quantised_by({"quant_method": "compressed-tensors", "config_groups": {"MXFP8": ["Linear"]}}),
     r"config_groups.MXFP8: expected an object, got .'Linear'."),
    (quantised_by(compressed(BYTES, "mxfp8-quantized") | {"ignore": ["re:.*experts.["]}),
     r"expected regular expressions after 're:'"),
    (said(M3, fmt="e5m2"), r"quantization_config.fmt: expected 'e4m3' or .*, got 'e5m2'"),
    (said(M3, scale_fmt="float"), r"quantization_config.scale_fmt: expected 'ue8m0', got 'float'"),
    (said(M3, weight_block_size=[1, 64]), r"quantization_config.weight_block_size: expected .1, 32., got .1, 64."),
    (said(FP8, fmt="e5m2"), r"quantization_config.fmt: expected 'e4m3' or .*, got 'e5m2'"),
    (said(FP8, scale_fmt="int8"), r"quantization_config.scale_fmt: expected 'ue8m0' or 'float', got 'int8'"),
    (said(FP8, zero_point=True), r"quantization_config.zero_point: expected an entry that Envoi knows, got True"),
    (said(FP8, group_size=64), r"quantization_config.group_size: expected an entry that Envoi knows, got 64"),
    (said(FP8, symmetric=False), r"quantization_config.symmetric: expected an entry that Envoi knows, got False"),
    (said(FP8, weight_block_size=[1, 32], modules_to_not_convert=["model.layers.1.mlp.experts"]),
     r"experts.0.gate_proj.weight: expected bfloat16, .* as quantization_config leaves this module as it is"),
    (said(FP8, weight_block_size=[1, 32], modules_to_not_convert="experts"),
     r"quantization_config.modules_to_not_convert: expected a list of names, got 'experts'"),
    (said(HY4, quant_algo="MXFP8", pre_quant_scale=True), r"quantization_config.pre_quant_scale: expected False"),
    (said(HY4, lora_rank=4), r"quantization_config.lora_rank: expected an entry that Envoi knows, got 4"),
    (said(HY4, exclude_modules=["*mlp.experts*"], quantization=None, quant_algo="MXFP8"),
     r"experts.0.gate_proj.weight: expected bfloat16, .* as quantization_config leaves this module as it is"),
    (quantised_by({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}), r"quant_algo: .*, got 'W4A16_AWQ'$"),
    (quantised_by({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}),
     r"quant_algo: .*, got 'NVFP4' with groups of 32$"),
    (quantised_by({"quant_method": "modelopt"}), r"quant_algo: .*, got None$"),
    (quantised_by(MIXED | {"quantized_layers": {"model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"}}}),
     r"quantized_layers.model.layers.1.mlp.experts.quant_algo: expected one of .*, got 'W4A8_AWQ'"),
    (quantised_by(MIXED | {"quantized_layers": {"model.layers.1.mlp.experts.0.gate_proj": {"quant_algo": "MXFP8"}}}),
     r"expected one way of quantising the experts of a layer, got different ones for .*0.gate_proj and .*0.up_proj"),
    (said(ROUND, sym=False), r"quantization_config.sym: expected True, got False"),
    (said(ROUND, dual_scale=True), r"quantization_config.dual_scale: expected an entry that Envoi knows, got True"),
    (said(ROUND, data_type="int"), r"quantization_config.data_type: expected .*, got 'int of 8 bits in groups of 32'"),
    (said(ROUND, packing_format="auto_round:auto_gptq"), r"packing_format: expected .*, got 'auto_round:auto_gptq'"),
    (said(ROUND, extra_config={"model.layers.1.mlp.experts": {"bits": 4}}),
     r"experts.0.gate_proj.weight: expected .* or uint8 .*, got float8_e4m3fn"),
    (said(quark(SPEC), algo_config=[{"name": "rotation"}]), r"algo_config: expected algorithms of the names awq"),
    (quantised_by(quark(SPEC | {"group_size": 64})), r"global_quant_config.weight: expected .* with groups of 64"),
    (quantised_by(quark(SPEC | {"symmetric": False})), r"global_quant_config.weight.symmetric: expected True, got Fa"),
    (quantised_by(quark([SPEC, SPEC])), r"global_quant_config.weight: expected an object, got"),
    (quantised_by({"quant_method": "torchao", "quant_type": "mxfp8"}), r"quant_method: expected one .*, got 'torchao'"),
    (lambda: nvfp4(MODELOPT, stored_sf=lambda x: x.view(torch.uint8)),
     r"experts.0.gate_proj.weight_scale: expected float8_e4m3fn .128, 16., got uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), UNKNOWN, ids=[message[:70] for _, message in UNKNOWN])
def test_what_is_not_known_is_refused_by_name(make, message, tmp_path):
    make().write(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_checkpoint(tmp_path, 1, requantize=True, progress=False)


def test_modelopt_names_no_group_that_the_file_does_not(tmp_path):
    files = mxfp8(QWEN, None)
    files.write(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP6"}}))
    with pytest.raises(ValueError, match=r"'NVFP4' with groups of 16, .*, got 'MXFP6'$"):
        from_checkpoint(tmp_path, 1)


def test_experts_together_with_one_factor_for_gate_and_one_for_up(tmp_path):
    files = granite_fp8()
    for layer, meant in files.layers.items():
        for name, parts in (("input_linear", 2), ("output_linear", 1)):
            key = f"model.layers.{layer}.block_sparse_moe.{name}.weight_scale"
            rows = files.tensors[key].shape[1] // parts
            files.tensors[key] = float_factors(EXPERTS, parts, seed=layer + parts)
            times = files.tensors[key].double().repeat_interleave(rows, 1)[..., None]
            values = files.tensors[key.removesuffix("_scale")].double() * times
            if parts == 2:
                meant.gate, meant.up = values.chunk(2, dim=1)
            else:
                meant.down = values
    files.config["quantization_config"] = compressed({"num_bits": 8, "type": "float", "strategy": "tensor"})
    files.config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["ParallelExpertsOfSomeWriter"]
    assert error_of(from_checkpoint(files.write(tmp_path), 2), files.layers[2]) == 0


def test_stacked_nvfp4_is_refused(tmp_path):
    files = stacked_fp8()
    files.config = silu("qwen3_moe", num_experts=EXPERTS, quantization_config=MODELOPT)
    for name, x in files.tensors.items():
        if x.dtype == torch.float8_e4m3fn:
            files.tensors[name] = x.view(torch.uint8)
    with pytest.raises(ValueError, match="gate_up_proj: expected experts with a tensor for each matrix, as their fact"):
        from_checkpoint(files.write(tmp_path), 1)
