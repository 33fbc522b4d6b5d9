"""Demo: its parts, its figures, and its refusals."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from envoi.integrations.transformers import implementation_name, packed_experts
from envoi.ops.moe.router import route
from envoi.quant import FORMATS
from examples.demo import layer as moe_layer
from examples.demo import model as lm
from examples.demo.__main__ import main
from examples.demo.text import find_model, read_text
from tests.helpers import fresh, ranks

MODEL = find_model(None)
ALLOWED = {"bf16": 1e-3, "fp8_row": 0.02, "fp8_block128": 0.02, "mxfp8": 0.02, "mxfp4": 0.10, "mxfp4_mxfp8": 0.10,
           "mxfp4_fp8": 0.10, "nvfp4": 0.05, "int4": 0.10}  # fmt: skip
CPU = torch.device("cpu")


QUICK = ["fp8_block128", "mxfp4"]
OTHERS = [format for format in FORMATS if format not in ("bf16", *QUICK)]


@pytest.fixture(scope="module", autouse=True)
def server():
    """Start the server of all tests' ranks, lest the demo's own, which imports less, be it."""
    ranks.forking()


@pytest.fixture(scope="module")
def model():
    return lm.load(MODEL, CPU)


@pytest.fixture(scope="module")
def batches():
    """Return four batches of 2048 bytes."""
    return [half for whole in lm.windows(read_text(None, MODEL, 8192).data, CPU) for half in whole.split(4)]


@pytest.fixture(scope="module")
def eager(model, batches):
    """Return the bits per byte of each batch by transformers' own experts."""
    model.set_experts_implementation("eager")
    return [lm.bits_per_byte(model, [batch]) for batch in batches]


@pytest.mark.parametrize("formats", [["bf16"], QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_every_format_costs_no_more_bits_than_promised(model, batches, eager, formats):
    count = 4 if formats == ["bf16"] else 1  # a difference of 0.001 needs more bytes to show
    expected = sum(eager[:count]) / count
    assert expected < 1.8  # an untrained model needs about 4.5
    for format in formats:
        model.set_experts_implementation(implementation_name(format))
        assert abs(lm.bits_per_byte(model, batches[:count]) - expected) < ALLOWED[format], format


def test_the_routers_of_the_model_and_of_envoi_agree(model, batches):
    tokens = lm.moe_inputs(model, batches[0], 1)
    gate = model.model.layers[1].mlp.gate
    with torch.no_grad():
        # The model rounds its logits to bf16; in float32 both agree.
        _, weights, ids = copy.deepcopy(gate).float()(tokens.float())
    ours = route(tokens, gate.weight.detach(), 4, rule="qwen3-moe")
    assert torch.equal(ours.topk_ids.long(), ids)
    torch.testing.assert_close(ours.topk_weights, weights)


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_one_layer_over_three_ranks_has_the_bits_of_one(model, batches, format):
    block = model.model.layers[2].mlp
    tokens = lm.moe_inputs(model, batches[0][:1], 2)
    layer = moe_layer.Layer(tokens, block.gate.weight.detach(), 4, packed_experts(block.experts, format))
    layer = moe_layer.to_device(layer, moe_layer.rank_device(3, 0))
    alone, stages = moe_layer.one_rank(layer)
    together, more_stages, load = moe_layer.many_ranks(layer, 3)
    assert torch.equal(alone.cpu(), together)
    assert set(stages) == {"route", "permute", "experts", "combine"}
    assert set(more_stages) == {"route", "dispatch", "experts", "combine"}
    ids = route(tokens, layer.gate, 4).topk_ids
    assert load.num_tokens_per_expert[-1].tolist() == torch.bincount(ids.flatten(), minlength=16).tolist()
    assert load.expert_offsets == (0, 5, 10, 16)


def broken(tmp_path: Path, change) -> Path:
    """Return a copy of the checkpoint with its tensors changed."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_missing_and_misshapen_tensors_are_refused(tmp_path):
    name = next(name for name in load_file(MODEL / "model.safetensors") if name.endswith("q_proj.weight"))
    with pytest.raises(ValueError, match=r"--model: .* missing keys: .*q_proj"):
        lm.load(broken(tmp_path / "a", lambda tensors: tensors.pop(name)), CPU)

    def shrink(tensors):
        tensors[name] = tensors[name][:100].clone()

    with pytest.raises(ValueError, match="--model: "):
        lm.load(broken(tmp_path / "b", shrink), CPU)


def test_the_whole_demo(tmp_path, capsys):
    arguments = (
        "--bytes", "512", "--ranks", "2", "--formats", "bf16", "--new-bytes", "4", "--device", "cpu",
        "--out", str(tmp_path / "out.png"),
    )  # fmt: skip
    assert main([*arguments]) == 0
    said = capsys.readouterr().out
    for part in ("eager", "envoi bf16", "Continued from 'def '", "give the same bits as one rank",
                 "bf16 checkpoint", "FP8 block-128 checkpoint", "MXFP4 checkpoint",
                 "Its load: bound by rank"):  # fmt: skip
        assert part in said
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_it_is_a_program():
    done = fresh.run_module("examples.demo", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m examples.demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nowhere.txt"), "--text: expected a file, there is none at nowhere.txt"),
        (("--formats", "bf16,int3"), "--formats: expected one of 'bf16'"),
        (("--bytes", "many"), "argument --bytes: invalid int value"),
        (("--ranks", "0"), "--ranks: expected an int of at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*arguments]))  # argparse raises its own
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(said.strip().splitlines()) == 1
    assert message in said
