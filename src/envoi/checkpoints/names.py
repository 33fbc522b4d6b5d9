"""Names of the experts' tensors in published checkpoints.

    {prefix}layers.{layer}.{block}.experts.{expert}.{gate_proj, up_proj, down_proj}.{part}      one matrix a tensor
    {prefix}layers.{layer}.{block}.experts.{expert}.{w1, w3, w2}.{part}
    {prefix}layers.{layer}.{block}.experts.{gate_up_proj, down_proj}{part}                      all experts in a tensor
    {prefix}layers.{layer}.block_sparse_moe.{input_linear, output_linear}.weight

prefix: "", "model.", "model.language_model." and the like, not "mtp."; block: "mlp", "block_sparse_moe", "ffn", ..
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = r"(?:(?:model|language_model|text_model|backbone|transformer)\.)*layers\.(\d+)\."
SEPARATE = re.compile(PREFIX + r"((?:[^.]+\.)*experts\.)(\d+)\.(gate_proj|w1)\.weight(?:_packed)?")
STACKED = re.compile(
    PREFIX + r"(?:(?:[^.]+\.)*experts\.gate_up_proj|block_sparse_moe\.input_linear\.weight)(?:_blocks)?"
)
PROJECTIONS = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}


@dataclass(frozen=True)
class Separate:
    """Experts with a tensor for each matrix: names begin with `base`, then {expert}.{gate, up or down}."""

    base: str
    gate: str
    up: str
    down: str
    ids: tuple[int, ...]

    def name(self, expert: int, projection: str, part: str) -> str:
        """Return the name of a tensor of an expert: its weight, or its factors."""
        return f"{self.base}{expert}.{projection}.{part}"


@dataclass(frozen=True)
class Stacked:
    """Experts in tensors [E, ..]: of gate and up together, and of down. blocks: 32 elements to 16 bytes."""

    gate_up: str
    down: str
    blocks: bool


def find(names: Iterable[str], layer: int) -> Separate | Stacked | None:
    """Return how a layer's experts are named; None if it has none."""
    separate: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = SEPARATE.fullmatch(name)
        if found and int(found[1]) == layer:
            base = name[: found.end(2)]
            separate.setdefault((base, found[4]), []).append(int(found[3]))
        found = STACKED.fullmatch(name)
        if found and int(found[1]) == layer:
            blocks = name.endswith("_blocks")
            gate_up = name.removesuffix("_blocks")
            down = gate_up.replace("gate_up_proj", "down_proj").replace("input_linear", "output_linear")
            return Stacked(gate_up, down, blocks)
    if not separate:
        return None
    (base, gate), ids = next(iter(separate.items()))
    return Separate(base, *PROJECTIONS[gate], tuple(sorted(ids)))


def layers(names: Iterable[str]) -> list[int]:
    """Return the layers that have experts."""
    found = (SEPARATE.fullmatch(name) or STACKED.fullmatch(name) for name in names)
    return sorted({int(match[1]) for match in found if match})
