"""Configurations of Quark and of AutoRound, as far as their weights are in formats that Envoi has."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from envoi.checkpoints.entries import Entries, Names
from envoi.checkpoints.schemes import ALL, MX, MXFP4, MXFP4_PACKED, MXFP8, NV, NVFP4_PACKED, Stored, fp8

QUARK_HARMLESS = (
    "quant_method", "version", "quant_mode", "softmax_quant_spec", "kv_cache_quant_config", "kv_cache_post_rope",
    "kv_cache_group", "log_severity_level", "min_kv_scale",
)  # fmt: skip
QUARK_SPEC = ("dtype", "qscheme", "group_size", "scale_format", "is_dynamic", "symmetric", "ch_axis", "block_size",
              "is_scale_quant")  # fmt: skip
QUARK_FOLDED = ("awq", "smooth", "autosmoothquant", "gptq")  # algorithms whose weights are used as they are stored
AUTO_ROUND_USED = ("bits", "data_type", "group_size", "sym", "packing_format", "extra_config")
AUTO_ROUND_HARMLESS = (
    "quant_method", "act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "iters", "seqlen",
    "nsamples", "batch_size", "lr", "minmax_lr", "low_gpu_mem_usage", "autoround_version", "block_name_to_quantize",
    "to_quant_block_names", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning", "scale_dtype",
    "super_bits", "super_group_size", "gradient_accumulate_steps", "amp", "static_kv_dtype", "static_attention_dtype",
    "backend",
)  # fmt: skip


def read_quark(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | None]:
    """Return a function from a module's name to how Quark has stored it: see `quantisation.Quantisation`."""
    path = "quantization_config"
    used = ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export", "algo_config")
    entries = Entries(file, path, given, used, QUARK_HARMLESS)
    left_out = entries.modules("exclude")
    harmless = ("pack_method", "kv_cache_group", "min_kv_scale", "weight_merge_groups")
    export = Entries(file, f"{path}.export", entries.get("export", {}), ("weight_format",), harmless)
    export.one_of("weight_format", ("real_quantized",), "real_quantized")
    algorithms = entries.get("algo_config", [])
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if not isinstance(algorithm, dict) or algorithm.get("name") not in QUARK_FOLDED:
            raise entries.error("algo_config", f"algorithms of the names {', '.join(QUARK_FOLDED)}", algorithm)

    def stored(module: str, stacked: bool) -> Stored | None:
        if module in left_out:
            return None
        named, where = None, "global_quant_config"
        for pattern in entries.get("layer_quant_config", {}):
            if named is None and fnmatchcase(module, pattern):
                named, where = entries.get("layer_quant_config")[pattern], f"layer_quant_config.{pattern}"
        if named is None and "Linear" in entries.get("layer_type_quant_config", {}):
            named, where = entries.get("layer_type_quant_config")["Linear"], "layer_type_quant_config.Linear"
        return _quark(file, f"{path}.{where}", entries.get("global_quant_config", {}) if named is None else named)

    return stored


def _quark(file: Path, path: str, given: Any) -> Stored | None:
    tensors = ("weight", "input_tensors", "output_tensors", "bias")
    weight = Entries(file, path, given, tensors, ("target_device", "name")).get("weight")
    if weight is None:
        return None
    harmless = ("round_method", "scale_type", "observer_cls", "scale_calculation_mode", "zero_point_type")
    spec = Entries(file, f"{path}.weight", weight, QUARK_SPEC, harmless)
    spec.one_of("is_dynamic", (False,), False)
    spec.one_of("symmetric", (True,))
    spec.one_of("is_scale_quant", (False,), False)
    dtype, scheme, columns = spec.get("dtype"), spec.get("qscheme"), spec.get("group_size")
    powers = spec.get("scale_format") == "e8m0"
    if (dtype, scheme) == ("fp8_e4m3", "per_tensor"):
        return fp8((ALL, ALL))
    if (dtype, scheme) == ("fp8_e4m3", "per_channel") and spec.one_of("ch_axis", (0,), 0) == 0:
        return fp8((1, ALL))
    if (dtype, scheme) == ("fp8_e4m3", "per_block"):
        return fp8(spec.block("block_size"))
    if scheme in (None, "per_group") and columns == MX[1] and powers and dtype in ("fp8_e4m3", "fp4"):
        spec.one_of("ch_axis", (-1, 1), -1)
        return MXFP4 if dtype == "fp4" else MXFP8
    raise ValueError(
        f"{file}: {path}.weight: expected 'fp8_e4m3' per tensor, channel or block, or 'fp8_e4m3' or 'fp4' in groups of "
        f"{MX[1]} with 'e8m0' factors, got {dtype!r} {scheme} with groups of {columns} and "
        f"{spec.get('scale_format')!r} factors"
    )


def read_auto_round(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | None]:
    """Return a function from a module's name to how AutoRound has stored it: see `quantisation.Quantisation`."""
    path = "quantization_config"
    entries = Entries(file, path, given, AUTO_ROUND_USED, AUTO_ROUND_HARMLESS)
    entries.one_of("packing_format", ("auto_round:llm_compressor", "llm_compressor"))
    own = entries.get("extra_config", {})
    try:
        named = {pattern: (Names((pattern,)), re.compile(f"(?:{pattern})$")) for pattern in own}
    except re.error as error:
        raise entries.error("extra_config", "names or regular expressions of modules", str(error)) from None

    def stored(module: str, stacked: bool) -> Stored | None:
        settings = {key: given.get(key) for key in ("bits", "data_type", "group_size", "sym")}
        for pattern, (names, expression) in named.items():
            if module in names or expression.match(module):
                changes = Entries(file, f"{path}.extra_config.{pattern}", own[pattern], settings, AUTO_ROUND_HARMLESS)
                settings |= {key: value for key, value in changes.given.items() if key in settings}
        return _auto_round(Entries(file, path, settings, settings))

    return stored


def _auto_round(entries: Entries) -> Stored | None:
    entries.one_of("sym", (True,), True)
    bits, kind, columns = (entries.get(key) for key in ("bits", "data_type", "group_size"))
    kind = str(kind).removesuffix("_rceil")
    if type(bits) is int and bits >= 16:
        return None
    if bits == 8 and kind in ("mx_fp", "mx_fp8", "mx_fp8e4m3") and columns == MX[1]:
        return MXFP8
    if bits == 4 and kind in ("mx_fp", "mx_fp4", "mx_fp4e2m1") and columns == MX[1]:
        return MXFP4_PACKED
    if bits == 4 and kind in ("nv_fp", "nv_fp4") and columns == NV[1]:
        return NVFP4_PACKED
    raise entries.error(
        "data_type", f"'mx_fp' of 8 or 4 bits in groups of {MX[1]}, or 'nv_fp' of 4 bits in groups of {NV[1]}",
        f"{kind} of {bits} bits in groups of {columns}",
    )  # fmt: skip
