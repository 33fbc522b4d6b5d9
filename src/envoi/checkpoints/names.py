"""Names of the experts' tensors in published checkpoints.

    {prefix}layers.{layer}.{block}.experts.{expert}.{gate_proj, up_proj, down_proj}.{part}      one matrix a tensor
    {prefix}layers.{layer}.{block}.experts.{expert}.{w1, w3, w2}.{part}
    {prefix}layers.{layer}.{block}.experts.{gate_up_proj, down_proj}{part}                      all experts in a tensor
    {prefix}layers.{layer}.block_sparse_moe.{input_linear, output_linear}.weight
    {prefix}layers.{layer}.{block}.experts.{fc1, fc2}.weight, experts.{w13_weight, w2_weight}

Experts without a gate have up_proj and down_proj, each a tensor.

prefix: "", "model.", "model.language_model." and the like, not "mtp."; block: "mlp", "block_sparse_moe", "ffn", ..
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = r"(?:(?:model|language_model|text_model|backbone|transformer|llm)\.)*layers\.(\d+)\."
SEPARATE = re.compile(
    PREFIX + r"((?:[^.]+\.)*experts\.)(\d+)\.((?:gate|up|down)_proj|w[123])\.(?:weight(?:_packed)?|qweight)"
)
# The last part of the name of gate and up in one tensor, and that of down.
TOGETHER = {"gate_up_proj": "down_proj", "fc1.weight": "fc2.weight", "w13_weight": "w2_weight"}
STACKED = re.compile(
    PREFIX + r"(?:(?:[^.]+\.)*experts\.(?:gate_up_proj(?:_blocks)?|fc1\.weight|w13_weight)"
    r"|block_sparse_moe\.input_linear\.weight)"
)
PROJECTIONS = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "up_proj": ("", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
}
# Last parts of names of tensors beside an expert's weights that change nothing: static scales and zero points of
# activations, which Envoi quantises by what they are; the shape of packed weights. Others that aren't used are refused.
HARMLESS = (
    "input_scale", "input_scale_inv", "input_global_scale", "input_zero_point", "act_scale", "activation_scale",
    "output_scale", "output_zero_point", "weight_shape",
)  # fmt: skip
ROUTERS = ("e_score_correction_bias",)  # tensors of the router that families keep under the experts' name


@dataclass(frozen=True)
class Separate:
    """Experts with a tensor for each matrix: names begin with `base`, then {expert}.{gate, up or down}.

    gate: "" if they have none.
    """

    base: str
    gate: str
    up: str
    down: str
    ids: tuple[int, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Projections of the experts' input: gate and up, or up alone."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def projections(self) -> tuple[str, ...]:
        """All of them, down last."""
        return *self.inputs, self.down

    def name(self, expert: int, projection: str, part: str) -> str:
        """Return the name of a tensor of an expert: its weight, or its factors."""
        return f"{self.base}{expert}.{projection}.{part}"


@dataclass(frozen=True)
class Stacked:
    """Experts in tensors [E, ..]: of gate and up together, and of down. blocks: 32 elements to 16 bytes."""

    gate_up: str
    down: str
    blocks: bool


def find(file_of: Mapping[str, Path], layer: int) -> Separate | Stacked | None:
    """Return how a layer's experts are named; None if it has none.

    file_of: files of tensors by name. Raises ValueError for a layer that has experts under several names.
    """
    separate: dict[tuple[str, str], set[int]] = {}
    first: dict[tuple[str, str], str] = {}
    for name in file_of:
        found = SEPARATE.fullmatch(name)
        if found and int(found[1]) == layer:
            key = name[: found.end(2)], found[4]
            separate.setdefault(key, set()).add(int(found[3]))
            if found[4] in PROJECTIONS:
                first.setdefault(key, name)
        found = STACKED.fullmatch(name)
        if found and int(found[1]) == layer:
            first[name, ""] = name
    for base in [base for base, projection in first if projection == "gate_proj"]:
        first.pop((base, "up_proj"), None)  # beside a gate
    if len(first) > 1:
        one, other, *_ = first.values()
        raise ValueError(
            f"{file_of[one]}: {one}: expected the experts of layer {layer} under one name, got {other} too, in "
            f"{file_of[other]}"
        )
    for base, gate in first:
        if gate:
            # By all projections: what an expert lacks is missed when it is read, and the expert itself never.
            ids = set[int]().union(*(separate.get((base, name), ()) for name in PROJECTIONS[gate]))
            return Separate(base, *PROJECTIONS[gate], tuple(sorted(ids)))
        gate_up = base.removesuffix("_blocks")
        owner, _, last = gate_up.rpartition("experts.")
        down = f"{owner}experts.{TOGETHER[last]}" if owner else gate_up.replace("input_linear", "output_linear")
        return Stacked(gate_up, down, base.endswith("_blocks"))
    return None


def check_beside(file_of: Mapping[str, Path], named: Separate | Stacked, used: Collection[str]) -> None:
    """Raise ValueError for a tensor beside a layer's weights that isn't known, and so may change what they mean.

    used: of separate experts the last parts of the names that are read, of stacked ones the names.
    """
    for name, file in file_of.items():
        separate = isinstance(named, Separate)
        if _foreign_separate(name, named, used) if separate else _foreign_stacked(name, named, used):
            raise ValueError(
                f"{file}: {name}: expected beside the experts' weights only tensors that Envoi knows, got one that may "
                "change what they mean"
            )


def _foreign_separate(name: str, named: Separate, parts: Collection[str]) -> bool:
    if not name.startswith(named.base):
        return False
    expert, _, rest = name[len(named.base) :].partition(".")
    if not expert.isdecimal():
        return expert not in ROUTERS
    projection, _, part = rest.partition(".")
    return projection not in named.projections or not (part in parts or part in HARMLESS)


def _foreign_stacked(name: str, named: Stacked, names: Collection[str]) -> bool:
    base, experts, _ = named.gate_up.rpartition("experts.")
    bases = (base + experts,) if experts else tuple(x.removesuffix("weight") for x in (named.gate_up, named.down))
    if name in names or not name.startswith(bases):
        return False
    rest = next(name[len(base) :] for base in bases if name.startswith(base))
    known = rest in (*ROUTERS, *HARMLESS) or rest.endswith(tuple(f"{end}{part}" for end in "._" for part in HARMLESS))
    return not known


def layers(names: Iterable[str]) -> list[int]:
    """Return the layers that have experts."""
    found = (SEPARATE.fullmatch(name) or STACKED.fullmatch(name) for name in names)
    return sorted({int(match[1]) for match in found if match})
