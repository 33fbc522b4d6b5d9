"""Which of several ways of quantising a module has: by compressed-tensors' rule, and by lists of names."""

import random

import pytest
import torch
from compressed_tensors.utils.match import is_match, match_targets

from envoi.checkpoints.compressed_tensors import Targets
from envoi.checkpoints.entries import Names
from envoi.experts import from_checkpoint
from tests.checkpoints.files import CHANNELS, FP4_OF_16, GLM, NVFP4, inverse_scales, separate
from tests.checkpoints.table import error_of

PIECES = [
    "model",
    "layers",
    "1",
    "10",
    "mlp",
    "experts",
    "0",
    "3",
    "gate_proj",
    "down_proj",
    "self_attn",
    "shared_experts",
]
PATTERNS = [
    "re:.*self_attn.*", "re:.*mlp.experts.*", r"re:.*mlp\.(?:.*\.)?(gate|up|down)_proj$", "re:.*shared_experts.*",
    r"re:model\.layers\.1\..*", r"re:.*experts\.\d+\.gate_proj", "re:experts", "re:.*", "re:(?!.*experts)", "Linear",
    "Module", "Embedding", "lm_head", "re:.*gate$", "re:.*layers.[0-9].mlp.*",
]  # fmt: skip


def drawn(seed):
    """Return a module's name, targets and names to ignore, some of them exact."""
    source = random.Random(seed)
    names = [".".join(source.choices(PIECES, k=source.randint(1, 5))) for _ in range(4)]
    names.append("model.layers.1.mlp.experts.3.gate_proj")
    return source.choice(names), *(source.sample(PATTERNS + names, k=source.randint(0, 6)) for _ in range(2))


@pytest.mark.parametrize("seed", range(0, 3000, 500))
def test_targets_are_those_of_compressed_tensors(seed):
    module = torch.nn.Linear(1, 1)
    for number in range(seed, seed + 500):
        name, targets, ignore = drawn(number)
        want = match_targets(name, module, targets)
        assert Targets(targets).of(name) == (want[0] if want else None), (name, targets)
        assert (Targets(ignore).of(name) is not None) == is_match(name, module, ignore), (name, ignore)


@pytest.mark.parametrize(("pattern", "module", "named"), [
    ("layers.1*", "layers.10.mlp", False), ("layers.1*", "layers.1.mlp", True), ("layers.1*", "layers.1", True),
    ("*.mlp.experts.*", "model.layers.1.mlp.experts.0.w1", True), ("*lm_head", "lm_head", True),
    ("gate", "layers.1.mlp.gate", True), ("gate", "layers.1.mlp.experts.0.gate_proj", False),
    ("mlp.experts", "layers.1.mlp.experts.0.w1", True), ("re:.*gate$", "layers.1.mlp.gate", True),
    ("re:gate", "layers.1.mlp.gate", False), ("model.layers.*.mlp.router", "model.layers.3.mlp.router", True),
    ("*mlp.gate*", "model.layers.1.mlp.gate_proj", False), ("model.layers.1", "model.layers.1.mlp.experts.0.w1", True),
    ("model.layers.1", "model.layers.10.mlp.experts.0.w1", False), ("w1", "layers.1.mlp.experts.0.w1", True),
])  # fmt: skip
def test_lists_of_modules(pattern, module, named):
    assert (module in Names([pattern])) is named
    assert (module in Names(["other.layer", pattern])) is named


def groups(*given):
    """Return a configuration of mixed precision: FP8 and NVFP4 groups by their targets."""
    kinds = {"fp8": {"format": "float-quantized", "weights": CHANNELS},
             "nvfp4": {"format": "nvfp4-pack-quantized", "weights": FP4_OF_16}}  # fmt: skip
    named = {f"group_{n}": kinds[kind] | {"targets": targets} for n, (kind, targets) in enumerate(given)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named, "ignore": []}


def nvfp4(config, **more):
    return separate(
        GLM | {"quantization_config": config | more}, weight="weight_packed", scales=inverse_scales, **NVFP4
    )


EXPERTS = r"re:.*mlp\.(?:.*\.)?(gate|up|down)_proj$"


@pytest.mark.parametrize("given", [
    [("fp8", ["re:.*self_attn.*"]), ("nvfp4", ["re:.*mlp.experts.*"])],
    [("fp8", ["re:.*self_attn.*"]), ("nvfp4", [EXPERTS])],
    [("fp8", ["re:.*shared_experts.*"]), ("nvfp4", ["re:.*mlp.experts.*"])],
    [("fp8", ["Linear"]), ("nvfp4", ["re:.*experts.*"])],
    [("nvfp4", ["Linear"]), ("fp8", ["re:.*self_attn.*", "lm_head"])],
    [("fp8", ["re:.*mlp.experts.*"]), ("nvfp4", [
        f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(5) for p in ("gate", "up", "down")])],
])  # fmt: skip
def test_the_group_of_the_experts(given, tmp_path):
    files = nvfp4(groups(*given))
    experts = from_checkpoint(files.write(tmp_path), 1, progress=False)
    assert (experts.format, error_of(experts, files.layers[1])) == ("nvfp4", 0)


def test_layers_have_their_own_groups(tmp_path):
    config = groups(("fp8", ["re:.*layers.1.*"]), ("nvfp4", ["re:.*layers.2.*"]))
    files, other = nvfp4(config), separate(GLM, factor="weight_scale", group=(1, 0))
    files.tensors = {k: x for k, x in files.tensors.items() if ".layers.1." not in k or "experts" not in k}
    files.tensors |= {k: x for k, x in other.tensors.items() if ".layers.1." in k}
    files.write(tmp_path)
    for layer, format, meant in ((1, "fp8_row", other.layers[1]), (2, "nvfp4", files.layers[2])):
        experts = from_checkpoint(tmp_path, layer, progress=False)
        assert (experts.format, error_of(experts, meant)) == (format, 0)


def test_quantised_experts_that_no_group_names_are_refused(tmp_path):
    files = nvfp4(groups(("nvfp4", ["re:.*self_attn.*"])))
    with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight_packed: expected bfloat16, .* doesn't name it"):
        from_checkpoint(files.write(tmp_path), 1)
