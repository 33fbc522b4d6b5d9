"""Configurations of compressed-tensors: which of several groups a module belongs to, and how that group is stored.

The rules are that library's (0.20): a module is left as it is if `ignore` names it or its class; else it has the group
of the first target that names it exactly, else by a regular expression, else by its class. Targets of one kind are
taken in alphabetical order, and of groups with one target the last.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envoi.checkpoints.entries import Entries
from envoi.checkpoints.schemes import ALL, MX, MXFP4_PACKED, MXFP8, NV, NVFP4_PACKED, Integers, Stored, fp8

CLASSES = ("Linear", "Module")  # of a module that is an expert's matrix, with its bases in torch
USED = ("quant_method", "format", "config_groups", "ignore", "sparsity_config", "transform_config")
HARMLESS = (
    "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version", "producer", "provider",
    "run_compressed", "dequantize", "use_optimized_inference", "packed_modules_mapping",
)  # fmt: skip
ARGUMENTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "scale_dtype"
)  # fmt: skip
MIXED = "mixed-precision"
FP8_FORMATS = ("float-quantized", "naive-quantized")


class Targets:
    """Targets, or names to ignore: exact names, regular expressions after "re:", classes of modules.

    `of` returns the one that decides for a module, None if there is none.
    """

    def __init__(self, targets: Iterable[str]):
        self.exact = frozenset(targets)
        self.patterns = {name: re.compile(name.removeprefix("re:")) for name in sorted(self.exact) if name[:3] == "re:"}
        self.classes = sorted(name for name in self.exact if name.isidentifier())

    def of(self, module: str, stacked: bool = False) -> str | None:
        """Return the target of a module: a matrix of one expert, or stacked, those of all experts."""
        if module in self.exact:
            return module
        named = next((name for name, pattern in self.patterns.items() if pattern.match(module)), None)
        # A module that holds all experts has a class of its own, or one of a writer, by whichever name.
        return named or next((x for x in self.classes if x in CLASSES or (stacked and "Experts" in x)), None)


def read_groups(file: Path, given: dict[str, Any]) -> Callable[[str, bool], Stored | Integers | None]:
    """Return a function from a module's name, and whether it has all experts' matrices, to how it is stored; None: not
    quantised. Raises ValueError that names the file and the entry for what Envoi doesn't know."""
    path = "quantization_config"
    entries = Entries(file, path, given, USED, HARMLESS)
    sparsity, transforms = entries.get("sparsity_config"), entries.get("transform_config")
    if sparsity is not None and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise entries.error("sparsity_config", "none, or the format 'dense'", sparsity)
    if transforms is not None and not (isinstance(transforms, dict) and not any(transforms.values())):
        raise entries.error("transform_config", "none, since transforms change what weights mean", transforms)
    groups = entries.get("config_groups", {})
    if not isinstance(groups, dict):
        raise entries.error("config_groups", "an object with groups", groups)
    group_of: dict[str, str] = {}
    for name, group in groups.items():
        names = group if isinstance(group, list) else group.get("targets") if isinstance(group, dict) else None
        if not (isinstance(names, list) and all(isinstance(target, str) for target in names)):
            raise ValueError(f"{file}: {path}.config_groups.{name}.targets: expected a list of names, got {names!r}")
        group_of |= dict.fromkeys(names, name)
    try:
        targets, ignored = Targets(group_of), Targets(entries.names("ignore"))
    except re.error as error:
        raise ValueError(f"{file}: {path}: expected regular expressions after 're:', got one with {error}") from None
    known: dict[str, Stored | Integers | None] = {}

    def stored(module: str, stacked: bool) -> Stored | Integers | None:
        target = targets.of(module, stacked)
        if target is None or ignored.of(module, stacked) is not None:
            return None
        name = group_of[target]
        if name not in known:
            known[name] = _scheme(file, f"{path}.config_groups.{name}", groups[name], entries.get("format"))
        return known[name]

    return stored


def is_size(columns: Any) -> bool:
    """Return True for a number of columns that can share a factor."""
    return type(columns) is int and columns > 0


def _scheme(file: Path, path: str, group: Any, whole: Any) -> Stored | Integers | None:
    """Return how a group's weights are stored. whole: the format of all groups that don't name one."""
    used = ("targets", "weights", "format", "input_activations", "output_activations")
    entries = Entries(file, path, group, used)
    weights = entries.get("weights")
    if weights is None:
        return None
    args = Entries(file, f"{path}.weights", weights, ARGUMENTS, ("observer", "observer_kwargs", "zp_dtype"))
    bits, kind, columns = args.get("num_bits", 8), args.get("type", "int"), args.get("group_size")
    symmetric = args.one_of("symmetric", (True, False) if (bits, kind) == (4, "int") else (True,), True)
    args.one_of("dynamic", (False,), False)
    args.one_of("actorder", (False, "weight", "static"))
    strategy = args.get("strategy") or {None: "tensor", -1: "channel"}.get(columns, "group")
    format = entries.get("format") or (None if whole == MIXED else whole)
    found, formats = None, ()
    if (bits, kind, strategy) == (8, "float", "group") and is_size(columns):
        powers = format == "mxfp8-quantized" or (format is None and args.get("scale_dtype") == "torch.uint8")
        found, formats = (MXFP8, ("mxfp8-quantized",)) if powers else (fp8((1, columns)), FP8_FORMATS)
        found = None if powers and columns != MX[1] else found
    elif (bits, kind) == (8, "float") and strategy in ("channel", "tensor", "block"):
        block = args.block("block_structure") if strategy == "block" else None
        found, formats = fp8(block or ((1, ALL) if strategy == "channel" else (ALL, ALL))), FP8_FORMATS
    elif (bits, kind, strategy, columns) == (4, "float", "group", MX[1]):
        found, formats = MXFP4_PACKED, ("mxfp4-pack-quantized",)
    elif (bits, kind, strategy, columns) == (4, "float", "tensor_group", NV[1]):
        found, formats = NVFP4_PACKED, ("nvfp4-pack-quantized",)
    elif (bits, kind) == (4, "int") and (strategy == "channel" or (strategy == "group" and is_size(columns))):
        of_factor = ALL if strategy == "channel" else columns
        found = Integers("compressed-tensors", of_factor, "" if symmetric else "weight_zero_point")
        formats = ("pack-quantized",)
    if found is None or format not in (None, *formats):
        named = "" if columns is None else f" with groups of {columns}"
        raise ValueError(
            f"{file}: {path}: expected 8-bit float weights with a factor a channel, a tensor, a block or a group, "
            f"'mxfp8-quantized' or 'mxfp4-pack-quantized' in groups of {MX[1]} or 'nvfp4-pack-quantized' in groups of "
            f"{NV[1]}, or 4-bit int ones with a factor a channel or a group in 'pack-quantized', got {bits}-bit "
            f"{kind} by {strategy} in {format!r}{named}"
        )
    return found
