"""Agreement of `from_checkpoint` and the adapter, for every experts class of the installed transformers: on activation,
clamp, order of rows, numbers and refusals.

Each class is built small from its own configuration's defaults. Its config.json is what that configuration writes, and
the names in its files are the sources of transformers' own conversions.
"""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping as mapping

from envoi.checkpoints.activation import read_activation
from envoi.checkpoints.config import COUNTS
from envoi.checkpoints.keys import unknown
from envoi.experts import from_checkpoint, unpack
from envoi.integrations.transformers import packed_experts, recognise_activation, unserved
from tests.integrations import classes

pytestmark = pytest.mark.usefixtures("registered")

ALL = classes.names()
LAYER = 1
# What 5.17 has, and what newer releases have more; a class that is in neither list has to be looked at.
OF_5_17 = """
Afmoe AXK1 AXK2 Cohere2Moe DeepseekOcr2Text DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DiffusionGemmaText Dots1
Ernie4_5_Moe Ernie4_5_VLMoeMoe ExaoneMoe FlexOlmo Gemma4Text Glm4Moe Glm4MoeLite Glm4vMoeText Glm5NextText GlmMoeDsa
GptOss GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA HunYuanMoEV1 HYV3 HYV4 Inkling Jamba KimiLinear Laguna
Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Mistral4 Mixtral NemotronH Olmoe OpenAIPrivacyFilter Phimoe
Qwen2Moe Qwen3_5Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen4ExpText
SolarOpen Zaya
"""
NEWER = """
Aria BailingHybrid Beam Dots3Note Flint Inkling2 Kolibri1 MistralLarge4Text MuseSpark UnlimitedOcrText
"""


def conversions(model_type):
    """Return sources and operations of a family's conversions to its experts' parameters, by the parameter's name."""
    found, family = {}, model_type.removesuffix("_text")
    for one in (one for name in (model_type, family, f"{family}_mm_model") for one in mapping(name) or ()):
        for target in one.target_patterns:
            if re.search(r"(?<!shared_)experts\\?\.(gate_up|up|down)_proj$", target):
                sources = [pattern.replace("\\", "").lstrip(".^") for pattern in one.source_patterns]
                operations = {type(operation).__name__ for operation in getattr(one, "operations", ())}
                found.setdefault(target.rpartition(".")[2], (sources, operations))
    return found


def files_of(module, model_type):
    """Return the tensors of a layer under the names, and in the order of rows and axes, of the family's files."""
    found, tensors = conversions(model_type), {}
    for name, weight in module.named_parameters():
        sources, operations = found.get(name, ([f"mlp.experts.{name}"], ()))
        x = weight.detach()
        x = x.mT if "Transpose" in operations else x
        x = torch.stack(x.chunk(2, dim=1), dim=2).flatten(1, 2) if "Interleave" in operations else x
        for source, part in zip(sources, x.chunk(len(sources), dim=1) if len(sources) > 1 else [x], strict=True):
            source = f"mlp.{source}" if source.startswith("experts.") else source
            each = enumerate(part) if "*" in source else [("", part)]
            tensors |= {source.replace("*", str(e), 1): y.clone(memory_format=torch.contiguous_format) for e, y in each}
    return {f"model.layers.{LAYER}.{name}": x for name, x in tensors.items()}


def write(kind, folder):
    """Write what a small checkpoint of the family has; return its folder."""
    config = kind.module.config.config
    config.to_json_file(folder / "config.json", use_diff=True)  # as save_pretrained has it
    said = json.loads((folder / "config.json").read_text())
    count = next(kind.module.parameters()).shape[0]
    sizes = classes.SIZES | dict.fromkeys(COUNTS, count)
    said |= {key: size for key, size in sizes.items() if key in said}
    (folder / "config.json").write_text(json.dumps(said))
    save_file(files_of(kind.module, config.model_type), folder / "model.safetensors")
    return folder


def test_every_class_is_in_a_list():
    known = {f"{name}Experts" for name in (OF_5_17 + NEWER).split()}
    assert len(OF_5_17.split()) == 55
    assert len(known) == 65
    found = {name for _, name in ALL}
    assert {f"{name}Experts" for name in OF_5_17.split()} <= found <= known


@pytest.mark.parametrize(("code", "name"), ALL, ids=[name for _, name in ALL])
def test_both_ways_agree(code, name, tmp_path):
    kind = classes.build(code, name)
    write(kind, tmp_path)
    refused = unserved(kind.module)
    if refused is not None:
        with pytest.raises(ValueError, match="each expert's output is normalised"):
            from_checkpoint(tmp_path, LAYER)
        return
    experts = from_checkpoint(tmp_path, LAYER)
    assert (experts.activation, experts.swiglu_limit) == recognise_activation(kind.module)
    for got, want in zip(unpack(experts), unpack(packed_experts(kind.module)), strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize(("code", "name"), ALL, ids=[name for _, name in ALL])
def test_a_configuration_says_what_its_class_computes(code, name, tmp_path):
    """Also where a key is missing, and the class has a default for it: the default is known, or the key is demanded."""
    kind = classes.build(code, name)
    config = kind.module.config.config.to_dict()
    assert list(unknown(config)) == []
    family = config["model_type"].removesuffix("_text")
    if unserved(kind.module) is not None:
        return
    meant = recognise_activation(kind.module)
    assert read_activation(tmp_path, family, config, LAYER) == meant
    for key in config:
        try:
            said = read_activation(tmp_path, family, {k: x for k, x in config.items() if k != key}, LAYER)
        except ValueError as error:
            assert key in str(error) or "expected the experts' activation" in str(error)
        else:
            assert said == meant, key


OTHER = {
    "hidden_act": "gelu", "hidden_activation": "silu", "swiglu_limit": 3.0, "swiglu_alpha": 1.25, "mlp_up_softcap": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(("code", "name"), ALL, ids=[name for _, name in ALL])
def test_other_settings_than_the_defaults(code, name, tmp_path):
    """A setting that a class follows is read, and one that it ignores is refused."""
    kind = classes.build(code, name)
    config = kind.module.config.config
    if unserved(kind.module) is not None:
        return
    for key in [key for key in OTHER if key in config.to_dict()]:
        changed = copy.deepcopy(config)
        setattr(changed, key, OTHER[key])
        found = recognise_activation(classes.class_of(code, name)(classes.Small(changed)).bfloat16())
        said = changed.to_dict()
        try:
            assert read_activation(tmp_path, said["model_type"].removesuffix("_text"), said, LAYER) == found, key
        except ValueError as error:
            assert f"{key}: expected" in str(error)
            assert found == recognise_activation(kind.module)
