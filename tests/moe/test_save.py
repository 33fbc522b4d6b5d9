"""Packed experts moved, mapped, saved, loaded, and in state dicts."""

import json

import pytest
import safetensors.torch
import torch
from torch.utils import _pytree as pytree

import envoi
from envoi.quant import FORMATS
from envoi.types import ExpertWeights
from tests.moe.layers import make
from tests.test_types import same

LAYER = make(tokens=5, bias=True, activation="swiglu_oai")
PLAIN = make(tokens=5)
PACKED = {format: LAYER.pack(format) for format in FORMATS} | {"no bias": PLAIN.pack("fp8_row")}


@pytest.mark.parametrize("name", PACKED)
def test_a_file_holds_everything(name, tmp_path):
    envoi.experts.save(PACKED[name], tmp_path / "experts.safetensors")
    assert same(envoi.experts.load(tmp_path / "experts.safetensors"), PACKED[name])
    tensors = safetensors.torch.load_file(tmp_path / "experts.safetensors")
    assert {"gate_up", "gate_up.values"} & set(tensors)


@pytest.mark.parametrize("name", PACKED)
def test_a_modules_state_dict_holds_everything(name, tmp_path):
    state = {"head.weight": torch.ones(2), **envoi.experts.state_dict(PACKED[name], "layers.0.experts.")}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert same(envoi.experts.from_state_dict(state, "layers.0.experts."), PACKED[name])


def test_tensors_that_share_memory_are_saved(tmp_path):
    flat = torch.randn(4 * 64 * 32 * 3).bfloat16()
    experts = ExpertWeights(flat[: 4 * 64 * 32 * 2].view(4, 128, 32), flat[4 * 64 * 32 * 2 :].view(4, 32, 64), "bf16")
    envoi.experts.save(experts, tmp_path / "x")
    assert same(envoi.experts.load(tmp_path / "x"), experts)


@pytest.mark.parametrize("name", PACKED)
def test_trees_of_tensors(name):
    leaves, spec = pytree.tree_flatten(PACKED[name])
    assert all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    assert same(pytree.tree_unflatten(leaves, spec), PACKED[name])
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(PACKED[name])[0]]
    assert paths[0] in (".gate_up", ".gate_up.values")
    sizes = pytree.tree_map(lambda x: None if x is None else x.shape, PACKED[name])
    assert sizes.down_bias == (None if name == "no bias" else (8, 256))


def test_experts_are_an_input_of_an_exported_program(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, tokens, routing, experts):
            return envoi.moe(tokens, routing, experts)

    experts = PLAIN.pack("fp8_block128")  # torch 2.11 can't write UE8M0 down
    torch.export.save(torch.export.export(Layer(), (PLAIN.tokens, PLAIN.routing, experts)), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    others = make(tokens=5, seed=1).pack("fp8_block128")
    for given in (experts, others):
        got = loaded(PLAIN.tokens, PLAIN.routing, given)
        assert torch.equal(got, envoi.moe(PLAIN.tokens, PLAIN.routing, given))


@pytest.mark.parametrize("name", PACKED)
def test_moved(name):
    moved = PACKED[name].to("meta")
    assert {x.device.type for x in pytree.tree_leaves(moved) if x is not None} == {"meta"}
    assert (moved.format, moved.order) == (PACKED[name].format, PACKED[name].order)
    assert same(PACKED[name].to("cpu"), PACKED[name])
    matrix = PACKED[name].gate_up
    assert matrix.to("meta").device.type == "meta"
    assert LAYER.routing.to("meta").topk_ids.device.type == "meta"


def test_weights_packed_on_a_cpu_get_the_order_of_the_gpu_they_move_to(monkeypatch, tmp_path):
    packed = PLAIN.pack("mxfp4")
    before = packed.gate_up.values.clone()
    envoi.experts.save(packed, tmp_path / "x")
    monkeypatch.setattr("envoi.ops.moe.packing.implementation", lambda device: "hopper")
    want = PLAIN.pack("mxfp4")
    assert (packed.order, want.order) == ("rows", "fragments")
    assert same(packed.to("cpu"), want)
    assert torch.equal(packed.gate_up.values, before)  # they are still there, in their order
    assert same(envoi.experts.load(tmp_path / "x"), want)
    assert same(want.to("cpu"), want)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"gate_up": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="model.safetensors: expected a file that envoi.experts.save wrote"):
        envoi.experts.load(path)
    with pytest.raises(ValueError, match="state: expected a tensor 'a.envoi' of envoi.experts.state_dict, got none"):
        envoi.experts.from_state_dict({"a.gate_up": torch.ones(2)}, "a.")


def test_wrong_arguments_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "experts.safetensors", None):
        with pytest.raises(ValueError, match=f"path: expected a file in a folder that exists, got {path}"):
            envoi.experts.save(PACKED["mxfp4"], path)
    for write in (envoi.experts.state_dict, lambda experts: envoi.experts.save(experts, tmp_path / "x")):
        with pytest.raises(ValueError, match="experts: expected ExpertWeights from envoi.experts.pack, got dict"):
            write({})
    with pytest.raises(ValueError, match=f"{tmp_path}: expected a file that envoi.experts.save wrote, got a folder"):
        envoi.experts.load(tmp_path)
    for path in (tmp_path / "none", 3, None):
        with pytest.raises(ValueError, match="path: expected a file that envoi.experts.save wrote, on this"):
            envoi.experts.load(path)  # pyright: ignore[reportArgumentType]
    nowhere = PACKED["mxfp4"].to("meta")
    with pytest.raises(ValueError, match="experts: expected weights with memory, got some on meta"):
        envoi.experts.save(nowhere, tmp_path / "x")
    state = {name: x.to("meta") for name, x in envoi.experts.state_dict(PACKED["mxfp4"]).items()}
    with pytest.raises(ValueError, match="state: expected tensors with memory, got"):
        envoi.experts.from_state_dict(state)
    envoi.experts.save(PACKED["mxfp4"], tmp_path / "x")
    with pytest.raises(ValueError, match="device: expected a device of torch such as .cuda., got str .gpu."):
        envoi.experts.load(tmp_path / "x", "gpu")


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "experts.safetensors"
    envoi.experts.save(PACKED["mxfp4"], path)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="experts.safetensors: expected a whole file of safetensors, got one"):
            envoi.experts.load(path)


SPOILT = {
    "expected experts written as version 1, got 2": lambda state, meta: meta.update(version=2),
    "expected a tensor gate_up.sf, got none": lambda state, meta: state.pop("gate_up.sf"),
    "expected a tensor down.values, got none":
        lambda state, meta: [state.pop("down.values"), state.pop("down.sf")]
        + [meta["fields"].pop(f"down.{name}") for name in ("group", "scales_at_most_2", "order")],
    "down.values: expected float8_e4m3fn .8, 256, 128., got float8_e4m3fn .8, 128, 128.":
        lambda state, meta: state.update({"down.values": state["down.values"][:, :128]}),
    "down.sf: expected float32 .8, 2, 1., got float32 .8, 1, 1.":
        lambda state, meta: state.update({"down.sf": state["down.sf"][:, :1]}),
    "down_bias: expected float32 .8, 256., got bfloat16 .8, 256.":
        lambda state, meta: state.update(down_bias=state["down_bias"].bfloat16()),
    "format: expected one of .*, got 'fp2'": lambda state, meta: meta["fields"].update(format="fp2"),
    "expected a tensor down_bias, got none": lambda state, meta: state.pop("down_bias"),
    "expected a tensor gate_up_bias beside the other bias, got none":
        lambda state, meta: [state.pop("gate_up_bias"), meta.pop("tensors")],
    "gate_up: expected .num_experts, rows, hidden., got .8, 256.":
        lambda state, meta: state.update({"gate_up.values": state["gate_up.values"][:, :, 0]}),
    "envoi: expected fields that this release knows, got 'router'": lambda state, meta: meta["fields"].update(router=1),
    "envoi: expected a description with fields, got None": lambda state, meta: meta.pop("fields"),
    "envoi: expected the names of its tensors, got None": lambda state, meta: meta.update(tensors=None),
    "format: expected text, got None": lambda state, meta: meta["fields"].pop("format"),
    "down.order: expected one of 'rows', 'fragments', 'fp8_fragments', got 'x'":
        lambda state, meta: meta["fields"].update({"down.order": "x"}),
    "gate_up.group: expected two numbers, got 3": lambda state, meta: meta["fields"].update({"gate_up.group": 3}),
    "gate_up_layout: expected 'interleaved' or 'concat'": lambda state, meta: meta["fields"].update(gate_up_layout="x"),
    "swiglu_limit: expected None or a positive number, got -1":
        lambda state, meta: meta["fields"].update(swiglu_limit=-1),
    "down.group: expected .128, 128., got .1, 32.": lambda state, meta: meta["fields"].update({"down.group": [1, 32]}),
}  # fmt: skip


@pytest.mark.parametrize("message", SPOILT)
def test_spoilt_states_are_refused(message):
    state = envoi.experts.state_dict(PACKED["fp8_block128"])
    meta = json.loads(bytes(state["envoi"].tolist()))
    SPOILT[message](state, meta)
    state["envoi"] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"state: {message}"):
        envoi.experts.from_state_dict(state)


ODD = [None, 3, "x", [1], [1, 2, 3], {"a": 1}, -1.5, True]


@pytest.mark.parametrize("name", PACKED)
def test_descriptions_that_nothing_wrote_are_refused_or_change_nothing(name, tmp_path):
    """Every field gone, or with an odd value; every tensor gone, short or another one."""
    path = tmp_path / "experts.safetensors"
    state = envoi.experts.state_dict(PACKED[name])
    meta = json.loads(bytes(state.pop("envoi").tolist()))
    spoilt = [(json.dumps(meta | {"fields": without(meta["fields"], key)}), state) for key in meta["fields"]]
    spoilt += [
        (json.dumps(meta | {"fields": meta["fields"] | {key: odd}}), state)
        for key in meta["fields"]
        for odd in ODD
        if key != "swiglu_limit" or odd not in (None, 3)  # which are limits
    ]
    spoilt += [(text, state) for text in ("{", "[]", "3", "{}", '{"version": 1}', '{"version": 1, "fields": []}')]
    for key, x in state.items():
        spoilt += [(json.dumps(meta), other) for other in (
            without(state, key), state | {key: x[:1].clone()}, state | {key: torch.zeros(3)})]  # fmt: skip
    refused = 0
    for text, tensors in spoilt:
        safetensors.torch.save_file(tensors, path, {"format": "pt", "envoi": text})
        try:
            assert same(envoi.experts.load(path), PACKED[name])
        except ValueError as error:
            assert str(error).startswith(f"{path}: "), error
            refused += 1
    assert refused > len(spoilt) / 2


def without(given: dict, key: str) -> dict:
    return {name: value for name, value in given.items() if name != key}


def test_a_promise_about_scales_is_looked_up():
    packed = PLAIN.pack("mxfp4")
    packed.gate_up.sf.view(torch.uint8)[0, 0, 0] = 140
    assert packed.gate_up.scales_at_most_2
    again = envoi.experts.from_state_dict(envoi.experts.state_dict(packed))
    assert (again.gate_up.scales_at_most_2, again.down.scales_at_most_2) == (False, True)
