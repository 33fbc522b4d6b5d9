"""Experts that vLLM's load balancer moves: what it is handed in each format, on stand-ins of each release."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from envoi.experts import pack
from envoi.integrations.vllm import balance, loading, select
from envoi.ops.moe.op import tensors_of
from tests.helpers.ranks import run_ranks
from tests.integrations import agreeing
from tests.integrations.test_engines import E
from tests.integrations.test_vllm import (  # noqa: F401  # a fixture
    IDS,
    KEYS,
    X,
    called,
    config,
    kernel,
    made,
    process_again,
    processed,
    selector,
    vllm,
    with_biases,
)

MOVES = {"enable_eplb": True}
ORDER = [2, 0, 2, 1]  # expert 2 has two places, and expert 3 none


@pytest.fixture
def alone(vllm, monkeypatch):  # noqa: F811
    """Make this process the only rank; return what more ranks say, to which tests add: a form and why there is none."""
    others: list[tuple[Any, str]] = []

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [mine, *others]

    vllm["vllm.distributed.parallel_state"].get_ep_group = lambda: SimpleNamespace(cpu_group=None)
    monkeypatch.setattr(balance, "dist", SimpleNamespace(get_world_size=lambda group: 1, all_gather_object=gather))
    monkeypatch.setattr("envoi.ops.moe.packing.implementation", lambda device: "hopper")
    return others


def balanced(found: dict[str, Any], format: str, given: dict[str, Any]) -> Any:
    """Return vLLM's layer of these tensors, all of them parameters, with load balancing on."""
    kind = found["vllm.model_executor.layers.fused_moe.routed_experts"].RoutedExperts
    kind.get_expert_weights = lambda self: [x.view(torch.uint8).view(E, -1) for x in given.values()]
    return processed(found, format, given, has_bias="down_bias" in given, parallel=MOVES)


@pytest.mark.parametrize("format", KEYS)
def test_all_that_is_packed_moves_with_the_experts(vllm, format, alone):  # noqa: F811
    given = with_biases(format)
    moved = {name: x[ORDER].clone() for name, x in given.items()}
    want = called(kernel(processed(vllm, format, moved, has_bias="down_bias" in given)), moved, X, IDS)
    layer = balanced(vllm, format, given)
    first = called(kernel(layer), given, X, IDS)
    places = [x.data_ptr() for x in layer.get_expert_weights()]
    assert len(set(places)) == len(places), "a tensor that is moved twice is in its old place"
    for x in layer.get_expert_weights():
        x.copy_(x[ORDER])
    out = called(kernel(layer), given, X, IDS)
    assert torch.equal(out, want) and not torch.equal(out, first)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_views_need_no_help(vllm, format, alone):  # noqa: F811
    given = {name: x for name, x in with_biases(format).items() if "bias" not in name}
    alone.append((None, ""))  # perhaps of a rank where vLLM's kernels run the layer
    layer = balanced(vllm, format, given)
    assert len(layer.get_expert_weights()) == len(given)


def test_weights_loaded_anew_are_followed_once(vllm, alone):  # noqa: F811
    given = with_biases("mxfp4")
    layer = balanced(vllm, "mxfp4", given)
    count = len(layer.get_expert_weights())
    process_again(layer, given)
    assert len(layer.get_expert_weights()) == count


def test_ranks_that_pack_in_other_forms_are_an_error(vllm, alone):  # noqa: F811
    alone.append((("mxfp4", "rows"), ""))
    with pytest.raises(RuntimeError, match="in different orders, .*start with ENVOI_VLLM=0"):
        balanced(vllm, "mxfp4", with_biases("mxfp4"))


@pytest.mark.parametrize("format", KEYS)
def test_a_rank_that_cant_pack_is_an_error_on_the_others(vllm, format, alone):  # noqa: F811
    alone.append((None, "ValueError: out of memory"))
    with pytest.raises(RuntimeError, match="can't pack the experts of rank 1 of 2: ValueError: out of memory"):
        balanced(vllm, format, with_biases(format))


def test_a_rank_that_cant_pack_says_so_to_the_others(vllm, alone, monkeypatch):  # noqa: F811
    def fail(*arguments, **named):
        raise ValueError("out of memory")

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        said.append(mine)
        found[:] = [mine]

    said: list[Any] = []
    monkeypatch.setattr(balance.dist, "all_gather_object", gather)
    monkeypatch.setattr("envoi.integrations.engines.pack", fail)
    with pytest.raises(RuntimeError, match="ENVOI_VLLM=0; ValueError: out of memory"):
        balanced(vllm, "mxfp4", with_biases("mxfp4"))
    assert [form for form, _ in said] == [None] and "ValueError: out of memory" in said[0][1]


def test_ranks_agree_or_all_hear_why_not():
    first, last = (outcome.value for outcome in run_ranks(2, agreeing.agree))
    orders = "Envoi keeps the experts of ranks in different orders, and load balancing would move them: start with "
    assert first == ["", "Envoi can't pack the experts of rank 1 of 2: ValueError: no room", f"{orders}ENVOI_VLLM=0"]
    assert last == ["", "no room", f"{orders}ENVOI_VLLM=0"]


def test_a_rank_where_vllms_kernels_run_a_layer_hears_of_the_others(vllm, alone):  # noqa: F811
    layer = balanced(vllm, "mxfp4", with_biases("mxfp4"))
    layer.moe_config = kernel(layer).moe_config

    def choose_vllms(layer: Any) -> None:
        layer.quant_method.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace())

    layer.quant_method.process_weights_after_loading = choose_vllms
    loading.follow(layer, vars_of(vllm))
    layer.quant_method.process_weights_after_loading(layer)  # all ranks have vLLM's order
    alone.append((("mxfp4", "rows"), ""))
    with pytest.raises(RuntimeError, match="in different orders"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
def test_a_layer_whose_peers_move_more_than_parameters_cant_give_way(vllm, format, alone, monkeypatch):  # noqa: F811
    def fail(*arguments, **named):
        raise ValueError("out of memory")

    monkeypatch.setattr("envoi.integrations.engines.pack", fail)
    with pytest.raises(RuntimeError, match="load balancing would move them .*ENVOI_VLLM=0; ValueError: out of memory"):
        balanced(vllm, format, with_biases(format))


def test_elastic_ranks_are_refused(vllm, caplog, monkeypatch):  # noqa: F811
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_elastic_ep=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    vllm["vllm.config"].get_current_vllm_config_or_none = lambda: settings
    caplog.set_level(logging.INFO)
    made(vllm, "bf16", with_biases("bf16"))
    select._choose("mxfp4", {"moe_config": config(vllm)}, None, vars_of(vllm))
    assert "elastic expert parallelism" in caplog.text


def vars_of(found: dict[str, Any]) -> Any:
    from envoi.integrations.names import found_names
    from envoi.integrations.vllm.used import ALL

    return found_names(ALL)


def test_rows_of_experts_are_all_their_memory():
    padded = torch.arange(48, dtype=torch.uint8).view(2, 3, 8)[:, :, :5]
    rows = balance.by_expert("sf", padded)
    assert rows.shape == (2, 21) and rows[1, 0] == 24
    with pytest.raises(RuntimeError, match="sf with experts' memory in turns"):
        balance.by_expert("sf", torch.zeros(4, 3, 2).transpose(0, 1))


def test_what_lies_over_parameters_isnt_moved_twice():
    gate_up, down = torch.randn(2, 32, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    bias = torch.randn(2, 32).bfloat16()
    packed = pack(gate_up, down, gate_up_bias=bias, down_bias=torch.zeros(2, 16).bfloat16())
    found = list(balance.beside(packed, [gate_up.view(2, -1), down.view(2, -1)]))
    held = [x for x in tensors_of(packed) if x is not None]
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in held[1:2] + held[3:]] and len(held) == 4
