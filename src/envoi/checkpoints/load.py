"""Loading of one layer's packed experts from a checkpoint's files, without arithmetic where a format allows it.

config.json -> count, activation, scheme      headers -> every tensor checked      tensors -> [E, ..] -> pack
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from envoi.check import expect_choice, expect_device, expect_int
from envoi.checkpoints.config import Config, read_config
from envoi.checkpoints.keys import ACTIVATIONS
from envoi.checkpoints.names import Separate, Stacked, find, layers
from envoi.checkpoints.separate import read_separate
from envoi.checkpoints.shards import Shards
from envoi.checkpoints.stacked import read_stacked
from envoi.ops.moe.packing import AUTO, pack
from envoi.progress import Progress
from envoi.quant.formats import FORMATS
from envoi.types import ExpertWeights, has_gate


def from_checkpoint(
    path: str | Path,
    layer: int,
    experts: Iterable[int] | None = None,
    format: str = AUTO,
    *,
    device: torch.device | str = "cpu",
    requantize: bool = False,
    progress: bool = True,
) -> ExpertWeights:
    """Load the experts of one layer from a published checkpoint, as it stores them.

    path: its folder, with config.json and files of safetensors.
    experts: which ones, in this order, for instance a rank's share `range(32, 64)`; None: all. Only their bytes are
        read.
    format: as `envoi.experts.pack` has it: "auto" keeps what the file stores, fp16 and fp32 weights as bf16 if that
        changes none; another one is refused where it can't hold a quantised file's numbers exactly. With
        requantize=True either rounds them. Float weights go into any format that is named, "bf16" too.
    device: where the packed weights go. One expert at a time is on the host beside them.
    progress: show a bar on stderr if it takes longer than two seconds.

    bf16, fp16 and fp32 experts; FP8 with a factor per block, of which the last may be smaller, group, channel or tensor
    (DeepSeek-V3, Kimi-K2, Qwen3-FP8, MiniMax-M2, GLM, Mixtral-FP8, compressed-tensors, ModelOpt, Quark); MXFP8
    (MiniMax-M3, ModelOpt, compressed-tensors, Quark, AutoRound); MXFP4 (DeepSeek-V4, gpt-oss, the same writers); NVFP4
    (ModelOpt, compressed-tensors, AutoRound; where the scale of a matrix divides, its reciprocal is rounded to
    float32); INT4 with a factor per group or row, with or without zero points (compressed-tensors, as Kimi-K2 has it;
    AWQ; GPTQ whose groups are of neighbouring columns). Where several ways of quantising are mixed, each module has its
    own. Scales of activations aren't used, as activations are quantised by what they are, or not at all.

    The activation and its limits are those that config.json gives for the layer, if Envoi knows all keys about experts'
    arithmetic in it (`envoi.checkpoints.keys`), and all tensors beside an expert's weights.

    Raises ValueError that names the file, the tensor or key, what was expected and what came, before anything is read
    if the headers show it.
    """
    expect_int("layer", layer, 0)
    expect_choice("format", format, (*FORMATS, AUTO))
    if not (isinstance(path, str | Path) and Path(path).exists()):
        raise ValueError(f"path: expected a checkpoint's folder or a file of safetensors on this machine, got {path!r}")
    config = read_config(Path(path) if Path(path).is_dir() else Path(path).parent, layer)
    with Shards(path) as shards:
        return load_layer(
            shards, config, layer, experts, format, device=expect_device("device", device), requantize=requantize,
            progress=progress,
        )  # fmt: skip


def load_layer(
    shards: Shards, config: Config, layer: int, experts: Iterable[int] | None = None, format: str = AUTO, *,
    device: torch.device, requantize: bool = False, progress: bool = False,
) -> ExpertWeights:  # fmt: skip
    """Load the experts of one layer from opened files: see `from_checkpoint`."""
    named = find(shards.file_of, layer)
    if named is None:
        have = _ranges(layers(shards.file_of))
        if not have:
            example = f"model.layers.{layer}.mlp.experts.0.gate_proj.weight"
            raise ValueError(f"{shards.path}: expected experts under names that Envoi knows, like {example}, got none")
        raise ValueError(f"{shards.path}: layer: expected one with experts, which are {have}, got {layer}")
    count = config.num_experts or _count(shards, named)
    if isinstance(named, Separate) and count < _count(shards, named):
        have = _count(shards, named)
        raise ValueError(f"{config.file}: expected {have} experts, as the files have of layer {layer}, got {count}")
    _check_gate(shards, config, named)
    _check_sizes(shards, config, named)
    ids = _expect_ids(experts, count)
    read: Callable = read_separate if isinstance(named, Separate) else read_stacked
    with Progress(len(ids), quiet=not progress) as bar:
        tensors = read(shards, config, named, ids, count, device, lambda e: bar.step(f"layer {layer}, expert {e}"))
    # Separate ones are read so.
    layout = "concat" if isinstance(named, Separate) else config.gate_up_layout(named.gate_up)
    return pack(
        **tensors._asdict(), format=format, gate_up_layout=layout, activation=config.activation,
        swiglu_limit=config.swiglu_limit, requantize=requantize,
    )  # fmt: skip


def _count(shards: Shards, named: Separate | Stacked) -> int:
    if isinstance(named, Separate):
        return max(named.ids) + 1
    return shards.header(named.gate_up + ("_blocks" if named.blocks else ""))[1][0]


def _check_gate(shards: Shards, config: Config, named: Separate | Stacked) -> None:
    """Raise ValueError if config.json and the files disagree on whether the experts have a gate."""
    gated = isinstance(named, Stacked) or bool(named.gate)
    if gated == has_gate(config.activation):
        return
    if gated:
        raise ValueError(
            f"{config.file}: {', '.join(ACTIVATIONS)}: expected an activation of gate and up, as the files have both, "
            f"got {config.activation!r}, of up alone"
        )
    name = named.name(named.ids[0], "gate_proj", "weight") if isinstance(named, Separate) else ""
    raise ValueError(f"{shards.path}: {name}: expected a tensor of this name, as the activation has a gate, got none")


def _check_sizes(shards: Shards, config: Config, named: Separate | Stacked) -> None:
    """Raise ValueError if config.json gives the experts another hidden or intermediate size than the files have."""
    up = named.gate_up if isinstance(named, Stacked) else named.up
    for what, given, matrix in (("hidden", config.hidden, named.down), ("intermediate", config.intermediate, up)):
        if isinstance(named, Stacked):
            names = [matrix + "_blocks" * named.blocks]
        else:
            names = [named.name(named.ids[0], matrix, part) for part in ("weight_packed", "qweight", "weight")]
        name = next((name for name in names if name in shards.file_of), None)
        if given is None or name is None:  # a matrix that isn't there is missed where it is read
            continue
        (key, size), shape = given, shards.header(name)[1]
        sizes = shape[1:] if isinstance(named, Stacked) else shape[:1]
        if name.endswith("qweight"):  # transposed, with the one side or the other by eights
            sizes = *shape[1:], *(8 * columns for columns in shape[1:])
        if matrix == up and isinstance(named, Stacked):
            sizes = [rows / 2 for rows in sizes]  # of gate and up
        if size not in sizes:
            raise ValueError(f"{config.file}: {key}: expected the {what} size of {name} {list(shape)}, got {size}")


def _expect_ids(experts: Iterable[int] | None, count: int) -> Sequence[int]:
    if experts is None:
        return range(count)
    if isinstance(experts, (str, int)) or not isinstance(experts, Iterable):
        raise ValueError(f"experts: expected ids, for instance range(0, {count}), or None for all, got {experts!r}")
    ids = list(experts)
    for expert in ids:
        expect_int("experts", expert, 0, count - 1, f"the checkpoint has {count}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"experts: expected each expert once, got {ids}")
    return ids


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: 1-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
