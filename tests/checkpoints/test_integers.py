"""INT4 experts of compressed-tensors, AWQ and GPTQ: files packed here, integer by integer, as their formats say."""

import copy
from dataclasses import dataclass, field

import pytest
import torch

from envoi.experts import from_checkpoint, unpack
from tests.checkpoints.files import EXPERTS, HIDDEN, INTER, LAYERS, Files, beside
from tests.moe.stored import seeded

NAMES = ("gate_proj", "up_proj", "down_proj")
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: nibble i has column order_map[i] of eight
QWEN = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "hidden_act": "silu"}
ARGUMENTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip


@dataclass
class Form:
    """How a checkpoint stores INT4: its quantization_config, columns that share a factor (0: all), the dtype."""

    writer: str
    config: dict
    columns: int
    dtype: torch.dtype = torch.float16
    zeros: bool = True
    stored_less: int = 0  # subtracted from zero points when stored
    lowest: int = 0
    changes: dict = field(default_factory=dict)


def compressed(columns=32, symmetric=True, **changes) -> dict:
    strategy = {} if columns else {"strategy": "channel", "group_size": None}
    args = {**ARGUMENTS, "group_size": columns, "symmetric": symmetric, **strategy, **changes}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def gptq(columns=128, **more) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": columns, "desc_act": False, "sym": True,
            "damp_percent": 0.01, "true_sequential": True, **more}  # fmt: skip


def awq(columns=128, **more) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": columns, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["gate"], **more}  # fmt: skip


BF16 = torch.bfloat16
FORMS = {
    "kimi-k2": Form("compressed-tensors", compressed(), 32, BF16, zeros=False),
    "compressed, zero points": Form("compressed-tensors", compressed(128, symmetric=False), 128, BF16),
    "compressed, rows": Form("compressed-tensors", compressed(0), 0, BF16, zeros=False),
    "awq": Form("awq", awq(), 128), "awq, 32": Form("awq", awq(32), 32, BF16),
    "gptq": Form("gptq", gptq(), 128, stored_less=1, lowest=1),
    "gptq, 32": Form("gptq", gptq(32, desc_act=True, static_groups=False), 32, stored_less=1, lowest=1),
    "gptq, v2": Form("gptq", gptq(64, checkpoint_format="gptq_v2", sym=False), 64),
    "gptq, rows": Form("gptq", gptq(-1, checkpoint_format="gptq"), 0, stored_less=1, lowest=1),
}  # fmt: skip


def words(x: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack integers 0 to 15, eight neighbours along a dimension into one int32: the one at places[i] in bits 4 i .."""
    x = x.movedim(dim, -1).long()
    found = torch.zeros(*x.shape[:-1], x.shape[-1] // 8, dtype=torch.long)
    for i, place in enumerate(places):
        found |= x[..., place::8] << 4 * i
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32).movedim(-1, dim).contiguous()


def matrix(form: Form, rows: int, columns: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a matrix's tensors, by the last part of their names, and what they mean in float64."""
    source, group = seeded(seed), form.columns or columns
    q = torch.randint(0, 16, (rows, columns), generator=source)
    shape = rows, columns // group
    zeros = torch.full(shape, 8)
    if form.zeros:
        zeros = torch.randint(form.lowest, 16, shape, generator=source)
    sf = (torch.rand(shape, generator=source) * 0.02 + 1e-4).to(form.dtype)
    meant = (q - zeros.repeat_interleave(group, 1)).double() * sf.double().repeat_interleave(group, 1)
    if form.writer == "compressed-tensors":
        tensors = {"weight_packed": words(q, 1), "weight_scale": sf, "weight_shape": torch.tensor([rows, columns])}
        return tensors | ({"weight_zero_point": words(zeros, 0)} if form.zeros else {}), meant
    order = AWQ_PLACES if form.writer == "awq" else tuple(range(8))
    tensors = {"scales": sf.T.contiguous(), "qzeros": words((zeros - form.stored_less).T, 1, order)}
    if form.writer == "awq":
        return tensors | {"qweight": words(q.T, 1, order)}, meant
    groups = torch.arange(columns, dtype=torch.int32) // group
    return tensors | {"qweight": words(q.T, 0), "g_idx": groups}, meant


def files_of(form: Form, config: dict = QWEN) -> Files:
    files = beside({**config, "quantization_config": copy.deepcopy(form.config)}, "model.", "mlp")
    for layer in LAYERS:
        meant = {name: [] for name in NAMES}
        for expert in range(EXPERTS):
            for part, name in enumerate(NAMES):
                sizes = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
                tensors, means = matrix(form, *sizes, 1000 * layer + 10 * expert + part)
                base = f"model.layers.{layer}.mlp.experts.{expert}.{name}."
                files.tensors |= {base + key: x for key, x in tensors.items()}
                meant[name].append(means)
        files.layers[layer] = {name: torch.stack(each) for name, each in meant.items()}  # pyright: ignore
    return files


@pytest.mark.parametrize("name", FORMS)
def test_every_number_is_kept(name, tmp_path):
    form = FORMS[name]
    files = files_of(form)
    folder = files.write(tmp_path)
    for layer, ids in ((1, range(EXPERTS)), (2, [3, 1]), (1, [])):
        experts = from_checkpoint(folder, layer, ids)
        assert (experts.format, experts.gate_up.sf.dtype) == ("int4", form.dtype if len(ids) else BF16)
        gate_up, down, *_ = unpack(experts, dtype=torch.float64)
        gate, up = gate_up.chunk(2, 1)
        for got, part in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
            assert torch.equal(got, files.layers[layer][part][list(ids)])


def test_zero_points_of_8_are_none(tmp_path):
    form = Form("gptq", gptq(), 128, stored_less=1, lowest=8)
    files = files_of(form)
    for key, x in files.tensors.items():
        if key.endswith("qzeros"):
            x.fill_(0x77777777)
    experts = from_checkpoint(files.write(tmp_path), 1)
    assert experts.gate_up.zeros is experts.down.zeros is None


def test_other_formats_round_if_told_to(tmp_path):
    folder = files_of(FORMS["kimi-k2"]).write(tmp_path)
    with pytest.raises(ValueError, match=r"expected numbers that the scheme of 'mxfp4' holds exactly"):
        from_checkpoint(folder, 1, format="mxfp4")
    wide = from_checkpoint(folder, 1, format="bf16", requantize=True)
    want = unpack(from_checkpoint(folder, 1), dtype=torch.float64)
    for got, means in zip(unpack(wide, dtype=torch.float64)[:2], want[:2], strict=True):
        assert torch.equal(got, means.bfloat16().double())


FIRST = "model.layers.1.mlp.experts.0.gate_proj."


def refused(tmp_path, form, change, match):
    files = files_of(form)
    change(files)
    with pytest.raises(ValueError, match=match):
        from_checkpoint(files.write(tmp_path), 1)


def set_config(**changes):
    def change(files):
        files.config["quantization_config"] |= changes

    return change


def set_weights(**changes):
    def change(files):
        files.config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes

    return change


@pytest.mark.parametrize(("name", "change", "match"), [
    ("gptq", set_config(bits=8), "bits: expected 4"),
    ("gptq", set_config(dynamic={"-:.*": {}}), "dynamic: expected none"),
    ("gptq", set_config(checkpoint_format="marlin"), "checkpoint_format: expected 'gptq' or 'gptq_v2'"),
    ("gptq", set_config(is_marlin_format=True), "is_marlin_format: expected False"),
    ("gptq", set_config(group_size=0), "group_size: expected a number of columns"),
    ("gptq", set_config(rotation="hadamard"), "rotation: expected an entry that Envoi knows"),
    ("awq", set_config(version="gemv"), "version: expected 'gemm', got 'gemv'"),
    ("awq", set_config(zero_point=False), "zero_point: expected True"),
    ("kimi-k2", set_weights(num_bits=3), "got 3-bit int"),
    ("kimi-k2", set_weights(actorder="group"), "actorder: expected"),
    ("kimi-k2", set_config(format="marlin-24"), "'pack-quantized', got 4-bit int by group in 'marlin-24'"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_entries_that_change_the_numbers_are_refused(name, change, match, tmp_path):
    refused(tmp_path, FORMS[name], change, match)


def test_columns_in_the_order_of_activations_are_refused(tmp_path):
    def reorder(files):
        files.tensors[f"{FIRST}g_idx"] = files.tensors[f"{FIRST}g_idx"].flip(0)

    refused(tmp_path, FORMS["gptq, 32"], reorder, r"gate_proj\.g_idx: expected groups of neighbouring columns")


def test_a_zero_point_that_readers_take_for_two_is_refused(tmp_path):
    def wrap(files):
        files.tensors[f"{FIRST}qzeros"][0, 0] = -1

    refused(tmp_path, FORMS["gptq"], wrap, r"gate_proj\.qzeros: expected zero points less 1 of at most 14, got 15")


def without(name):
    return lambda files: files.tensors.pop(FIRST + name)


def replaced(name, f):
    def change(files):
        files.tensors[FIRST + name] = f(files.tensors[FIRST + name])

    return change


@pytest.mark.parametrize(("name", "change", "match"), [
    ("awq", without("qzeros"), r"gate_proj\.qzeros: expected a tensor of this name \(the zero points of"),
    ("awq", without("scales"), r"gate_proj\.scales: expected a tensor of this name"),
    ("awq", replaced("scales", torch.Tensor.float), r"gate_proj\.scales: expected .*got float32"),
    ("awq", replaced("qweight", lambda x: x[:-8]), r"expected int32|whole groups"),
    ("gptq", replaced("g_idx", lambda x: x[:-1]), r"gate_proj\.g_idx: expected"),
    ("kimi-k2", replaced("weight_scale", lambda x: x[:, :-1]), r"gate_proj\.weight_scale: expected"),
    ("kimi-k2", replaced("weight_shape", lambda x: x + 1), r"gate_proj\.weight_shape: expected \[128, 256\]"),
    ("kimi-k2", lambda files: files.tensors.update({f"{FIRST}weight_g_idx": torch.zeros(4)}), "weight_g_idx"),
    ("kimi-k2", lambda files: files.tensors.update({f"{FIRST}bias": torch.zeros(4)}), "bias"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name, change, match, tmp_path):
    refused(tmp_path, FORMS[name], change, match)
