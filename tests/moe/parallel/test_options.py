"""Options of ExpertParallel: exchange, num_sms, and the deprecated ones."""

import warnings

import pytest
import torch

from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.opening import check_given, check_options, wanted_by
from envoi.ops.moe.parallel.warm_up import ParallelCall
from envoi.ops.moe.warm_up import without_tensors
from envoi.runtime.devices import Target, limited
from envoi.runtime.program import building
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases

REMOVED = "tokens, L1 and L2 in one launch took 1.02 times as long as in two over 12 layers on 4 GPUs, and was removed"
SIZES = {"max_tokens": 8, "num_topk": 2}
COUNTED = "counted False the group is one of gloo, over which rows are counted"


def opened(rank: int, num_ranks: int, tried: list) -> list[tuple[str, list[str]]]:
    """Open with each of these options, a tuple = those of rank 0 and of all others; return error or way, warnings."""
    found = []
    for options in tried:
        mine = options[min(rank, 1)] if isinstance(options, tuple) else options
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                parallel = cases.open_parallel(make(), "bf16", rank, [4, 8], **mine)
                text = f"{parallel.exchange} {parallel.presum} {parallel.why}"
                assert parallel.results == "bf16"  # counted
                parallel.close()
            except ValueError as error:
                text = str(error)
        found.append((text, [str(w.message) for w in warned if w.category is DeprecationWarning]))
    return found


def described(rank: int, num_ranks: int) -> list[str]:
    """Return what an object is printed as, in a `with` block and after it, and what a call says then."""
    layer = make()
    with cases.open_parallel(layer, "bf16", rank, [3, 8]) as parallel:
        printed = [repr(parallel)]
        parallel.moe(*cases.part_of(layer, rank, [2, len(layer.tokens)]))
    with pytest.raises(ValueError) as caught:
        parallel.moe(layer.tokens, layer.routing)
    return [*printed, repr(parallel), str(caught.value)]


def test_a_with_block_closes_and_an_object_says_what_it_is():
    layer = make()
    sizes = f"num_experts=8, hidden={layer.down.shape[1]}, intermediate={layer.down.shape[2]}"
    for rank, outcome in enumerate(run_ranks(2, described)):
        assert outcome.text == ""
        text = f"ExpertParallel(rank {rank} of 2, {sizes}, bf16, gloo, counted"
        assert outcome.value[:2] == [f"{text})", f"{text}, closed)"]
        assert "expected an open object, got one that was closed" in outcome.value[2]


def test_fused_warns_where_it_does_nothing_and_is_refused_where_it_was_slower():
    tried = [{}, {"fused": None}, {"fused": False}, {"fused": True}, ({"fused": True}, {}), {"fused": "yes"}]
    for rank, outcome in enumerate(run_ranks(2, opened, tried)):
        assert outcome.text == ""
        default, none, false, true, of_rank_0, word = outcome.value
        assert default == none == (COUNTED, [])
        assert false == (COUNTED, ["fused: False is what ExpertParallel does; leave the argument away"])
        assert true == (f"fused: expected None or False, got True; {REMOVED}", [])
        assert word == (f"fused: expected None or False, got 'yes'; {REMOVED}", [])
        text = of_rank_0[0]
        assert text == true[0] if rank == 0 else text == f"rank 0 of the group refused its arguments: {true[0]}"


GATHERED = SIZES | {"exchange": "gathered"}
NAMED = {"hosts": ["a", "b"]}
SUMS = {"exchange": "sums"}
ACCEPTED = [
    {"exchange": "counted"} | SIZES, GATHERED, SIZES | {"exchange": "gathered+sums"}, SUMS,
    SIZES | NAMED | {"exchange": "hosts"}, SIZES | {"exchange": "hosts+sums", "hosts": ["a", "a"]},
    {"exchange": "rows", "num_sms": 3}, {"results": "fp8_1x128"},
]  # fmt: skip
OLD = [
    ({"presum": False}, "rows", 'presum: is deprecated; pass exchange="rows" instead'),
    ({"presum": True}, "sums", 'presum: is deprecated; pass exchange="sums" instead'),
    (SIZES | NAMED, "hosts", 'hosts: without exchange is deprecated; pass exchange="hosts" too'),
    (SIZES | NAMED | {"presum": True}, "hosts+sums", 'presum: is deprecated; pass exchange="hosts+sums" instead'),
]
WRONG = [
    ({"exchange": "x"}, "exchange: expected one of 'auto', 'rows', "),
    ({"exchange": ["rows"]}, "exchange: expected one of 'auto', 'rows', "),
    ({"exchange": "gathered"}, "exchange: expected max_tokens and num_topk with 'gathered', got None"),
    ({"exchange": "hosts"} | NAMED, "exchange: expected max_tokens and num_topk with 'hosts', got None"),
    (NAMED | {"max_tokens": 8}, "exchange: expected max_tokens and num_topk with 'hosts', got None"),
    (GATHERED | NAMED, 'hosts: expected None, or exchange "hosts" or "hosts+sums", got exchange \'gathered\''),
    (GATHERED | {"presum": True}, "presum: expected None with exchange 'gathered', which says it, got True"),
    ({"results": "fp8"}, "results: expected one of 'bf16', 'fp8_1x128', got 'fp8'"),
    ({"results": None}, "results: expected one of 'bf16', 'fp8_1x128', got None"),
    (SUMS | {"results": "fp8_1x128"}, "results: expected 'bf16' where sums are sent back, got 'fp8_1x128'"),
    (SIZES | {"exchange": "hosts+sums", "results": "fp8_1x128"}, "results: expected 'bf16' where sums are"),
    (GATHERED | {"results": "fp8_1x128"}, "results: expected 'bf16' with exchange 'gathered', got 'fp8_1x128'"),
    ({"exchange": "counted", "results": "fp8_1x128"}, "results: expected 'bf16' with exchange 'counted', got"),
    (({"results": "fp8_1x128"}, {}), "sizes: expected the same on every rank, got max_tokens=None"),
    ({"num_sms": 0}, "num_sms: expected an int of at least 1, got 0"),
    (({"exchange": "rows"}, {"exchange": "sums"}), "sizes: expected the same on every rank, got max_tokens=None"),
]


def test_over_gloo_rows_are_counted_whatever_is_asked_and_wrong_options_are_refused():
    tried = [*ACCEPTED, *(given for given, *_ in [*OLD, *WRONG])]
    for outcome in run_ranks(2, opened, tried):
        assert outcome.text == ""
        found = iter(outcome.value)
        for given in ACCEPTED:
            assert next(found) == (COUNTED, []), given
        for given, _, warning in OLD:
            assert next(found) == (COUNTED, [warning]), given
        for given, message in WRONG:
            text, _ = next(found)
            assert message in text, given


def test_groups_of_128_have_to_divide_the_hidden_size():
    experts = make(hidden=192).pack()
    with pytest.raises(ValueError, match="^results 'fp8_1x128': hidden: expected a multiple of 128 .*, got 192$"):
        check_options(experts, 1.0, None, None, "auto", None, None, None, None, "fp8_1x128")


def test_old_arguments_mean_an_exchange():
    for given, way, _ in OLD:
        assert wanted_by("auto", given.get("hosts"), given.get("presum"), None)[0] == way


def test_wrong_tokens_beside_an_out_are_a_refusal_which_peers_hear_of():
    with pytest.raises(ValueError, match="^tokens: expected tensor, got str 'x'$"):
        check_given(torch.empty(1, 8), None, "x", torch.device("cpu"))


@pytest.mark.parametrize("hosts", [(), ("a", "b", "b", "a")], ids=["memory", "hosts"])
def test_num_sms_bounds_the_grids_of_loops(hosts):
    experts = without_tensors(make(experts=2).pack("bf16"))
    call = ParallelCall(SharedLayout(4, 8, 64, 2, 256, "bf16"), 2, 1, (0, 2, 4, 6, 8), 1.0, experts, hosts)
    grids = []
    for most in (132, 3):
        with limited(most), building(Target("sm_90", 132)) as builder:
            call(64)
        grids.append({launch.kernel.fn.__name__: launch.grid for launch in builder.launches})
    for kernel in ("pull_kernel", "send_rows_kernel"):
        assert [grid[kernel] for grid in grids] == [(8 * 132,), (8 * 3,)]
    assert grids[1]["gemm_kernel"] == (3,) and grids[0]["gemm_kernel"] > (3,)
