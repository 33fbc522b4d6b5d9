"""Loading of published checkpoints: what every layout means, which bytes are read, what the layer computes."""

import json
import sys

import pytest
import safetensors
import torch
from torch.nn.functional import silu

import envoi
from envoi import progress
from envoi.experts import from_checkpoint
from tests.checkpoints.files import CASES, EXPERTS, HIDDEN, Meaning
from tests.checkpoints.table import error_of, load
from tests.helpers.accuracy import assert_same_bits, relative_error


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a case once, and gives its folder and its layers' meanings."""
    kept = {}

    def write(name):
        if name not in kept:
            files = CASES[name].make()
            kept[name] = files.write(tmp_path_factory.mktemp(name)), files.layers
        return kept[name]

    return write


@pytest.mark.parametrize("name", CASES)
def test_some_experts(name, written):
    folder, layers = written(name)
    whole, rounded = load(folder, 2, progress=False)
    assert (error_of(whole, layers[2]) == 0) == (not rounded)
    for ids in (range(1, 3), [4, 0, 2], [], range(EXPERTS)):
        got = from_checkpoint(folder, 2, ids, requantize=rounded)
        sizes = got.num_local_experts, got.hidden, got.intermediate - got.padding
        assert sizes == (len(ids), HIDDEN, layers[2].gate.shape[1]), ids
        for part, all_of_it in zip(envoi.experts.unpack(got), envoi.experts.unpack(whole), strict=True):
            assert part is all_of_it is None or torch.equal(part, all_of_it[list(ids)]), ids


def mlp(tokens, meant: Meaning, expert: int, oai: bool, limit) -> torch.Tensor:
    gate, up = tokens @ meant.gate[expert].T, tokens @ meant.up[expert].T
    if meant.biases is not None:
        gate, up = gate + meant.biases[0][expert], up + meant.biases[1][expert]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = (up + 1) * gate * torch.sigmoid(1.702 * gate) if oai else silu(gate) * up
    y = h @ meant.down[expert].T
    return y if meant.biases is None else y + meant.biases[2][expert]


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_what_the_file_means(name, written):
    folder, layers = written(name)
    experts, _ = load(folder, 1, progress=False)
    source = torch.Generator().manual_seed(0)
    tokens = torch.randn(12, HIDDEN, generator=source).mul(0.05).bfloat16()
    ids = torch.rand(12, EXPERTS, generator=source).argsort(1)[:, :2].to(torch.int32)
    weights = torch.rand(12, 2, generator=source)
    got = envoi.moe(tokens, envoi.Routing(weights, ids, EXPERTS), experts)
    oai = name.startswith("gpt_oss")
    limit = 7.0 if oai else 10.0 if name.startswith("deepseek_v4") else None
    assert (experts.activation, experts.swiglu_limit) == ("swiglu_oai" if oai else "swiglu", limit)
    want = torch.stack([
        sum(w * mlp(token, layers[1], e, oai, limit) for w, e in zip(ws, es.tolist(), strict=True))
        for token, ws, es in zip(tokens.double(), weights.double(), ids, strict=True)
    ])  # fmt: skip
    assert relative_error(got, want) < {"bf16": 0.01, "mxfp4": 0.01, "nvfp4": 0.01}.get(experts.format, 0.07)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_mxfp8", "nvfp4"])
def test_bf16_experts_go_into_any_format(format, written):
    folder, layers = written("qwen3")
    got = from_checkpoint(folder, 1, range(2), format)
    want = envoi.experts.pack(
        torch.cat((layers[1].gate, layers[1].up), dim=1)[:2].bfloat16(), layers[1].down[:2].bfloat16(), format
    )
    assert got.format == format
    assert_same_bits(got.gate_up.values, want.gate_up.values)
    assert_same_bits(got.down.sf, want.down.sf)


class Counted:
    """A file of safetensors that counts the bytes of the tensors, and parts of tensors, that it gives out."""

    read = 0
    names: set = set()  # noqa: RUF012

    def __init__(self, *given, **options):
        self.file = real_safe_open(*given, **options)

    def __enter__(self):
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_tensor(self, name):
        return self.note(name, self.file.get_tensor(name))

    def get_slice(self, name):
        return CountedSlice(self, name)

    def note(self, name, x):
        Counted.read += x.nbytes
        Counted.names.add(name)
        return x


class CountedSlice:
    def __init__(self, owner, name):
        self.owner, self.name, self.part = owner, name, owner.file.get_slice(name)

    def __getitem__(self, index):
        return self.owner.note(self.name, self.part[index])

    def __getattr__(self, name):
        return getattr(self.part, name)


real_safe_open = safetensors.safe_open


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(safetensors, "safe_open", Counted)
    Counted.read, Counted.names = 0, set()
    return Counted


@pytest.mark.parametrize("name", CASES)
def test_only_the_bytes_of_those_experts_are_read(name, written, counted):
    folder, _ = written(name)
    files = CASES[name].make()
    _, rounded = load(folder, 1, progress=False)
    Counted.read, Counted.names = 0, set()
    ids = [1, 2, 4]
    from_checkpoint(folder, 1, ids, requantize=rounded)
    one_of_each = [f".experts.{expert}." for expert in ids]
    layer = {key: x for key, x in files.tensors.items() if "layers.1." in key and "mtp" not in key}
    layer = {key: x for key, x in layer.items() if not key.endswith(("input_scale", "input_global_scale"))}
    theirs = {key: x for key, x in layer.items() if any(part in key for part in one_of_each)}
    share = 1.0
    if not theirs:
        theirs = {key: x for key, x in layer.items() if ".experts." in key or "put_linear" in key}
        share = len(ids) / EXPERTS
    needed = sum(x.nbytes for x in theirs.values()) * share
    assert counted.names == set(theirs)
    assert needed <= counted.read <= needed * 1.001


@pytest.mark.parametrize("index", [True, False])
def test_one_file_with_and_without_an_index(index, tmp_path):
    files = CASES["glm_fp8"].make()
    files.write(tmp_path, shards=1)
    if not index:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert error_of(from_checkpoint(tmp_path, 1), files.layers[1]) == 0
    assert error_of(from_checkpoint(next(tmp_path.glob("*.safetensors")), 1), files.layers[1]) == 0


def test_a_bar_for_what_takes_long(written, capsys, monkeypatch):
    folder, _ = written("qwen3")
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    from_checkpoint(folder, 1, [2, 4])
    said = capsys.readouterr().err
    assert "[0/2] layer 1, expert 2" in said
    assert "[1/2] layer 1, expert 4" in said
    from_checkpoint(folder, 1, progress=False)
    assert capsys.readouterr().err == ""


def test_what_modelopt_says_in_a_file_of_its_own(tmp_path):
    files = CASES["modelopt_nvfp4"].make()
    del files.config["quantization_config"]
    files.write(tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    experts = from_checkpoint(tmp_path, 1)
    assert experts.format == "nvfp4"
    assert error_of(experts, files.layers[1]) == 0


def test_what_was_loaded_is_packed_for_its_device(written, packs_for_hopper):
    folder, layers = written("gpt_oss")
    experts = from_checkpoint(folder, 1)
    assert experts.order == "fragments"
    assert error_of(experts, layers[1]) == 0
