"""Reading of quantization_config: how each of a checkpoint's modules is stored, by the rules of who wrote it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from envoi.checkpoints.compressed_tensors import read_groups
from envoi.checkpoints.entries import Entries, Names
from envoi.checkpoints.other_writers import read_auto_round, read_quark
from envoi.checkpoints.schemes import ALL, BLOCK128, E4M3, MX, MXFP4, MXFP8, NV, NVFP4, Integers, Stored, fp8

NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
HARMLESS = (
    "quant_method", "activation_scheme", "kv_cache_scheme", "kv_cache_quant_algo", "modules_to_convert", "dequantize",
    "version", "producer", "is_checkpoint_fp8_serialized", "is_checkpoint_mxfp8_serialized", "expert_dtype",
    "packed_modules_mapping",
)  # fmt: skip
ALGORITHMS = {
    "FP8": (fp8((ALL, ALL)), None),
    "FP8_PER_CHANNEL_PER_TOKEN": (fp8((1, ALL)), None),
    "FP8_PB_WO": (replace(fp8(BLOCK128), spread=True), 128),
    "FP8_BLOCK_SCALES": (fp8(BLOCK128, ("weight_scale_inv", "weight_scale")), 128),
    "MXFP8": (MXFP8, MX[1]),
    "NVFP4": (NVFP4, NV[1]),
    "W4A16_NVFP4": (NVFP4, NV[1]),
    "W4A8_MXFP4_FP8": (MXFP4, MX[1]),
    "W4A16_MXFP4": (MXFP4, MX[1]),
}  # of ModelOpt, with the group_size that may be named beside
MIXED = "MIXED_PRECISION"
AWQ_HARMLESS = (
    "quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", )  # fmt: skip
# How weights were found; g_idx says whether columns were ordered by their activations.
GPTQ_HARMLESS = (
    "quant_method", "desc_act", "sym", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment",
    "model_name_or_path", "model_file_base_name", "model_seqlen", "backend", "use_exllama", "exllama_config",
    "max_input_length", "use_cuda_fp16", "cache_block_outputs", "batch_size", "block_name_to_quantize",
    "module_name_preceding_first_block", "pad_token_id", "tokenizer", "dataset", "modules_in_block_to_quantize",
    "disable_exllama", "lm_head", "mse", "act_group_aware", "parallel_packing",
    "hyb_act", "meta",
)  # fmt: skip


@dataclass(frozen=True)
class Quantisation:
    """Quantiser of a checkpoint, and a function from a module's name, and whether it has the matrices of all experts,
    to how that module is stored; None: not quantised."""

    file: Path
    method: str
    module: Callable[[str, bool], Stored | Integers | None]

    def stored(self, modules: Sequence[str], stacked: bool = False) -> Stored | Integers | None:
        """Return how all of these modules are stored, None if none is quantised. Raises ValueError if they differ."""
        first = None
        for position, name in enumerate(modules):
            found = self.module(name, stacked)
            if position and found != first:
                raise ValueError(
                    f"{self.file}: quantization_config: expected one way of quantising the experts of a layer, got "
                    f"different ones for {modules[0]} and {name}"
                )
            first = found
        return first


def read_entries(file: Path, given: Any) -> Quantisation | None:
    """Read the quantization_config of a file; None without. Raises ValueError that names the file and the entry."""
    if not given:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"{file}: quantization_config: expected an object with quant_method, got {given!r}")
    method = given.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt"):
        method = "modelopt"
    if method not in METHODS:
        names = ", ".join(map(repr, METHODS))
        raise ValueError(f"{file}: quantization_config.quant_method: expected one of {names}, got {method!r}")
    return Quantisation(file, method, METHODS[method](file, given))


def _but(left_out: Names, stored: Stored | Integers, module: str, stacked: bool) -> Stored | Integers | None:
    return None if module in left_out else stored


def _fp8(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    used = ("weight_block_size", "fmt", "scale_fmt", "quant_algo", "moe_quant_algo", *NOT_CONVERTED)
    mixed = given.get("moe_quant_algo") is not None
    used = (*used, "config_groups", "group_size") if mixed else used  # what they say is of the experts
    entries = Entries(file, "quantization_config", given, used, HARMLESS)
    entries.one_of("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"), "e4m3")
    entries.one_of("scale_fmt", ("ue8m0", "float"), "float")
    left_out = entries.modules(*NOT_CONVERTED)
    if mixed:
        entries.one_of("quant_algo", (MIXED,))
        return partial(_but, left_out, _algorithm(entries, entries.get("moe_quant_algo")))
    entries.one_of("quant_algo", ("FP8",))
    block = entries.get("weight_block_size")
    group = (ALL, ALL) if block is None else entries.block("weight_block_size")
    # Without a block, "weight_scale" is what the first FP8 checkpoints call a matrix's factor.
    names = (*(("weight_scale",) if block is None else ()), "weight_scale_inv", "scale")
    names = (*names, "weight_scale") if group == MX else names
    return partial(_but, left_out, Stored({E4M3: group, torch.int8: MX, torch.uint8: MX}, names))


def _mxfp4(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    entries = Entries(file, "quantization_config", given, NOT_CONVERTED, HARMLESS)
    return partial(_but, entries.modules(*NOT_CONVERTED), MXFP4)


def _mxfp8(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    used = ("weight_block_size", "fmt", "scale_fmt", *NOT_CONVERTED)
    entries = Entries(file, "quantization_config", given, used, HARMLESS)
    entries.one_of("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"), "e4m3")
    entries.one_of("scale_fmt", ("ue8m0",))
    if entries.get("weight_block_size") is not None and entries.block("weight_block_size") != MX:
        raise entries.error("weight_block_size", str(list(MX)), entries.get("weight_block_size"))
    return partial(_but, entries.modules(*NOT_CONVERTED), MXFP8)


def _modelopt(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    inline = given.get("quantization")
    given = {**given, **inline} if isinstance(inline, dict) else given
    used = (
        "quantization", "quant_algo", "moe_quant_algo", "group_size", "quantized_layers", "has_zero_point",
        "pre_quant_scale", *NOT_CONVERTED,
    )  # fmt: skip
    mixed = str(given.get("quant_algo")).upper() == MIXED
    more = ("config_groups", *(("weight_block_size", "scale_fmt", "fmt") if mixed else ()))  # of other layers
    entries = Entries(file, "quantization_config", given, used, (*HARMLESS, *more))
    for key in ("has_zero_point", "pre_quant_scale"):
        entries.one_of(key, (False,), False)
    left_out, algorithm = entries.modules(*NOT_CONVERTED), entries.get("quant_algo")
    if mixed:
        if entries.get("moe_quant_algo") is not None:
            return partial(_but, left_out, _algorithm(entries, entries.get("moe_quant_algo")))
        return partial(_layers, entries, left_out, entries.get("quantized_layers", {}))
    return partial(_but, left_out, _algorithm(entries, algorithm))


def _layers(
    entries: Entries, left_out: Names, layers: Any, module: str, stacked: bool
) -> Stored | Integers | None:  # fmt: skip
    """Return how a module is stored by ModelOpt's list: as it or the part of the model that it belongs to is named."""
    if not isinstance(layers, dict) or not layers:
        raise entries.error("quant_algo", f"quantized_layers beside {MIXED!r}", MIXED)
    name = module
    while name and name not in layers:
        name = name.rpartition(".")[0]
    if not name:
        return None
    used = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
    layer = Entries(entries.file, f"{entries.path}.quantized_layers.{name}", layers[name], used)
    for key in ("has_zero_point", "pre_quant_scale"):
        layer.one_of(key, (False,), False)
    return _but(left_out, _algorithm(layer, layer.get("quant_algo")), module, stacked)


def _algorithm(entries: Entries, algorithm: Any) -> Stored:
    """Return what one of ModelOpt's algorithms stores, whose group_size is that of `entries`."""
    known = ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    columns = entries.get("group_size")
    if known is None or columns not in (None, known[1]):
        names = [repr(name) + (f" with groups of {size}" if size else "") for name, (_, size) in ALGORITHMS.items()]
        came = repr(algorithm) + ("" if columns is None else f" with groups of {columns}")
        where = f"{entries.file}: {entries.path}.quant_algo"
        raise ValueError(f"{where}: expected one of {', '.join(names)}, got {came}")
    return known[0]


def _awq(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    used = ("bits", "group_size", "zero_point", "version", *NOT_CONVERTED)
    entries = Entries(file, "quantization_config", given, used, AWQ_HARMLESS)
    entries.one_of("bits", (4,))
    entries.one_of("zero_point", (True,))
    version = entries.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise entries.error("version", "'gemm'", version)
    return partial(_but, entries.modules(*NOT_CONVERTED), Integers("awq", _columns(entries), "qzeros"))


def _gptq(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    used = (
        "bits", "group_size", "checkpoint_format", "format", "dynamic", "pack_dtype", "is_marlin_format",
        *NOT_CONVERTED,
    )  # fmt: skip
    entries = Entries(file, "quantization_config", given, used, GPTQ_HARMLESS)
    entries.one_of("bits", (4,))
    if entries.get("dynamic") is not None:
        raise entries.error("dynamic", "none, as modules that differ aren't known", entries.get("dynamic"))
    entries.one_of("pack_dtype", ("int32",), "int32")
    entries.one_of("is_marlin_format", (False,), False)
    forms = "gptq", "gptq_v2"
    form = entries.one_of("checkpoint_format", forms, entries.one_of("format", forms, "gptq"))
    stored = Integers("gptq", _columns(entries), "qzeros", added=1 if form == "gptq" else 0)
    return partial(_but, entries.modules(*NOT_CONVERTED), stored)


def _columns(entries: Entries) -> int:
    """Return how many columns share a factor, of INT4."""
    columns = entries.get("group_size")
    if columns == -1:
        return ALL
    if type(columns) is not int or columns <= 0:
        raise entries.error("group_size", "a number of columns, or -1 for all", columns)
    return columns


METHODS = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "compressed-tensors": read_groups,
    "quark": read_quark,
    "auto-round": read_auto_round,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
