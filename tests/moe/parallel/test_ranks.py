"""Experts over real processes: the bits of one rank, whatever the shares; and faults that raise errors in time."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from envoi.epilogues.activation import written
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.opening import CONNECT_TRIES, DEFAULT_TIMEOUT_S
from envoi.quant import FORMATS
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.own import quick_gelu, reglu
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case


def on_one_rank(case: Case) -> torch.Tensor:
    layer = case.build()
    return moe(layer.tokens, layer.routing, layer.pack(case.format))


def random_cases(num_ranks: int, count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        tokens = draw.randint(0, 50)
        layer = {
            "tokens": tokens, "k": draw.randint(1, 8), "seed": number, "masked": draw.choice([0.0, 0.2, 1.0]),
            "hidden": draw.choice([128, 256]), "intermediate": 128, "bias": draw.random() < 0.3,
        }  # fmt: skip
        token_ends = sorted(draw.randint(0, tokens) for _ in range(num_ranks - 1)) + [tokens]
        expert_ends = sorted(draw.sample(range(1, 8), num_ranks - 1)) + [8]
        found.append(Case(draw.choice(list(FORMATS)), layer, token_ends, expert_ends))
    return found


def hot_case(format: str, num_ranks: int) -> Case:
    """Return a layer in which rank 0 has no tokens, and three experts of the last rank but one have all slots."""
    token_ends = [60 * r // (num_ranks - 1) for r in range(num_ranks)]
    return Case(format, {"k": 2}, token_ends, [*range(1, num_ranks - 1), 7, 8], hot=(4, 5, 6))


def all_cases(num_ranks: int, num_random: int) -> list[Case]:
    """Return every format, layers chosen to break an exchange, and random ones."""
    return [
        *map(Case, FORMATS),
        Case("fp8_block128", token_ends=[0] * (num_ranks - 1) + [60]),
        Case("bf16", {"tokens": 0}, [0] * num_ranks),
        Case("mxfp4", {"masked": 1.0}),
        Case("mxfp4_mxfp8", {"tokens": 5}),
        Case("nvfp4", {"tokens": 7, "bias": True}),
        Case("bf16", hot=(5,)),
        hot_case("fp8_block128", num_ranks),
        Case("bf16", {"bias": True, "activation": "swiglu_oai"}),
        Case("mxfp8", {"bias": True, "activation": written(reglu)}),
        Case("bf16", {"activation": written(quick_gelu)}),
        *random_cases(num_ranks, num_random, seed=num_ranks),
    ]


@pytest.mark.parametrize("num_ranks", mostly_slow([2, 3, 4], quick=[4]))
def test_the_bits_of_one_rank(num_ranks):
    tried = [*all_cases(num_ranks, 8), Case("fp8_row", {"limit": 0.5, "k": 8}, expert_ends=[*range(1, num_ranks), 8])]
    outcomes = run_ranks(num_ranks, cases.run_cases, tried)
    assert [outcome.error for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


def test_more_slots_than_a_rank_has_experts():
    case = Case("bf16", {"experts": 24, "k": 16}, expert_ends=[4, 24])
    outcomes = run_ranks(2, cases.run_cases, [case])
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), on_one_rank(case))


def test_three_collectives_and_a_token_once_to_each_rank_that_needs_it():
    for outcome in run_ranks(4, cases.run_counted, {"tokens": 90, "k": 6}):
        assert outcome.text == ""
        seen, (num_tokens, num_slots) = outcome.value
        assert seen == [("dispatch: exchange of counts", 1), ("dispatch", num_tokens), ("combine", num_slots)]
        assert num_tokens < num_slots


def test_what_callers_have_is_taken():
    for outcome in run_ranks(2, cases.as_callers_have_them):
        assert outcome.text == ""
        plain, batched, half, cast = outcome.value
        assert batched.shape == (1, *plain.shape) and half.dtype == torch.float16 and cast.dtype == torch.bfloat16
        assert_same_bits(batched[0], plain)
        assert_same_bits(half, plain.half())
        assert_same_bits(cast, plain)


def test_compiles_as_one_graph():
    assert [(outcome.value, outcome.text) for outcome in run_ranks(2, cases.run_compiled)] == [(True, "")] * 2


def test_several_groups_and_objects_at_once():
    outcomes = run_ranks(4, cases.run_groups)
    want = on_one_rank(Case())
    for pair in (outcomes[:2], outcomes[2:]):
        for call in (0, 2):
            assert_same_bits(torch.cat([outcome.value[call] for outcome in pair]), want)
    assert_same_bits(torch.cat([outcome.value[1] for outcome in outcomes]), want)


@pytest.mark.parametrize(
    ("kind", "step", "timeout_s"),
    [
        pytest.param("dies before", "exchange of counts", 30.0, marks=pytest.mark.slow),
        ("dies within", "combine", 30.0),
        pytest.param("is late", "exchange of counts", 8.0, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_on_every_other(kind, step, timeout_s):
    outcomes = run_ranks(4, cases.fault, kind, timeout_s)
    assert outcomes[1].error == ("" if kind == "is late" else "died")
    for rank in (0, 2, 3):
        error, text, same_again = outcomes[rank].value
        assert error == "PeerTimeout"
        assert "rank 1 is lost or did not answer" in text
        assert step in text
        assert same_again, "it was waited for a second time"
    if kind == "is late":
        assert "rank 1 (this one) was late" in outcomes[1].value[1]


@pytest.mark.parametrize(
    ("what", "seconds"), mostly_slow([("they wait", 4.8), ("not for ever", 11.0)], [("they wait", 4.8)])
)
def test_peers_wait_for_a_rank_that_compiles(what, seconds):
    """Ranks are patient for 4 s of 6, which gloo's own timeout bounds: NCCL has none of ours."""
    outcomes = run_ranks(2, cases.compile_meanwhile, 6.0, seconds)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    if what == "they wait":
        assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), on_one_rank(Case()))
    else:
        assert "rank 1 is lost or did not answer within 6 s" in outcomes[0].value[1]
        assert "rank 1 (this one) was late" in outcomes[1].value[1]


def test_threads_take_turns():
    outcomes = run_ranks(2, cases.by_threads, 2, 40)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(["", ""], "")] * 2


@pytest.mark.slow
def test_a_rank_that_opens_late_is_named_and_told():
    timeout_s = 6.0
    outcomes = run_ranks(3, cases.open_late, timeout_s)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        text, ranks, seconds, again = outcome.value
        assert "opening the group: rank 1 " in text
        assert ("rank 1 (this one) was late" in text) == (rank == 1)
        assert ("the store is gone" not in text, ranks) == (True, [1])
        assert rank != 1 or seconds < timeout_s, "the late rank waited, for ranks that had given up"
        assert again == "right"


def test_a_rank_that_dies_while_the_group_opens_is_named():
    timeout_s = 4.0
    outcomes = run_ranks(3, cases.vanish_while_opening, timeout_s)
    assert outcomes[1].error == "died"
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert "opening the group: rank 1 is lost or did not answer within 4 s" in text
        assert seconds < (CONNECT_TRIES - 1) * timeout_s  # gloo alone would wait as often as it tries


def test_what_a_group_may_be():
    outcomes = run_ranks(4, cases.of_groups)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        found = outcome.value
        kinds = "expected a torch.distributed process group, a DeviceMesh of one dimension or None, got"
        assert found["text"] == f"ValueError: group: {kinds} str 'x'"
        assert found["number"] == f"ValueError: group: {kinds} int 3"
        assert found["ranks"] == f"ValueError: group: {kinds} list"
        assert found["grid"].startswith("ValueError: group: expected a mesh of one dimension, got 2 (dp, ep): ")
        assert 'mesh["ep"] or mesh.get_group("ep")' in found["grid"]
        assert found["mesh of 4"] == found["mesh of 2"] == "right"
        if rank == 3:
            assert found["of others"].startswith("ValueError: group: this rank (3) isn't a member of it")


MISTAKES = {
    "id": "topk_ids: expected ids from 0 to 7, or -1 for a masked slot, got 99 at token 3, slot 1",
    "dtype": "tokens: expected bfloat16 or float16 [num_tokens, 256], got float32",
    "gradient": "tokens: expected a tensor without gradients",
    "meta": "tokens: expected a tensor on cpu, got one on meta, which has no values",
    "sparse": "routing.topk_ids: expected a dense tensor, got one in sparse_coo",
    "batched": "routing.topk_ids: expected ids from 0 to 7",
    "routing": "routing: expected an envoi.Routing, got tuple",
    "many": "tokens: expected at most 70 of them (max_tokens), got 71",
    "num_experts": "routing.num_experts: expected 8 over all ranks, got 16",
    "k": "num_topk: expected the same on every rank, got 3 on rank 0, 2 on rank 1",
    "timeout": "timeout_s: expected a positive number of seconds up to 2000, got -1.0",
    "two timeouts": "timeout_s: expected the same on every rank, got 10 on rank 0, 20 on rank 1",
    "max_tokens": "max_tokens: expected an int of at least 1, got 0",
    "hidden": "experts: expected the same on every rank, got hidden=256",
    "format": "experts: expected the same on every rank, got hidden=256",
}


def test_one_ranks_mistake_is_an_error_on_all():
    outcomes = run_ranks(4, cases.mistakes, list(MISTAKES))
    for number, (kind, message) in enumerate(MISTAKES.items()):
        for rank, outcome in enumerate(outcomes):
            error, text, seconds = outcome.value[number]
            assert error == "ValueError", f"{kind}, rank {rank}: {error} {text}"
            assert message in text
            assert seconds < DEFAULT_TIMEOUT_S  # no rank was waited for
            if kind not in ("k", "hidden", "format", "two timeouts") and rank != 1:
                assert text.startswith("rank 1 of the group refused its arguments")


def test_refusals_without_a_group():
    packed = make().pack()
    with pytest.raises(ValueError, match="group: expected an initialised torch.distributed"):
        ExpertParallel(packed)
    with pytest.raises(ValueError, match="experts: expected ExpertWeights from envoi.experts.pack, got list"):
        ExpertParallel([packed])
    with pytest.raises(ValueError, match="timeout_s: expected a positive number of seconds up to 2000, got 0"):
        ExpertParallel(packed, timeout_s=0)
    with pytest.raises(ValueError, match="presum: expected True, False or None, got 2"):
        ExpertParallel(packed, presum=2)


@pytest.mark.gpu(2)
def test_the_same_over_nccl():
    tried = [Case(format) for format in FORMATS] + random_cases(2, 8, seed=5)
    outcomes = run_ranks(2, cases.run_on_gpus, tried, backend="nccl")
    for number, case in enumerate(tried):
        assert all(outcome.value[number][1] == "nccl" for outcome in outcomes)
        layer = cases.to(case.build(), "cuda")
        routing = layer.routing.__class__(
            layer.routing.topk_weights.cuda(), layer.routing.topk_ids.cuda(), layer.routing.num_experts
        )
        want = moe(layer.tokens, routing, layer.pack(case.format)).cpu()
        assert_same_bits(torch.cat([outcome.value[number][0] for outcome in outcomes]), want)


def transformed(rank: int, num_ranks: int) -> list[tuple[str, bool]]:
    """Refuse a call under each mode and transform, where peers exchange nothing; then make a right one."""
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = cases.open_parallel(layer, "bf16", rank, ends)
    tokens, routing = cases.part_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)])
    want, found = parallel.moe(tokens, routing), []
    given = tokens.clone().requires_grad_()

    def fake() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            parallel.moe(given, routing)

    calls = (
        fake,
        lambda: torch.func.grad(lambda x: parallel.moe(x, routing).float().sum())(tokens),
        lambda: torch.func.jvp(lambda x: parallel.moe(x, routing), (tokens,), (tokens,)),
        lambda: make_fx(lambda x: parallel.moe(x, routing))(given),
    )
    for call in calls:
        text = ""
        try:
            call()
        except ValueError as error:
            text = str(error)
        found.append((text, torch.equal(parallel.moe(tokens, routing), want)))
    return found


def test_refusals_of_calls_that_are_traced_or_transformed():
    for outcome in run_ranks(2, transformed):
        assert not outcome.error, outcome.text
        for text, right_again in outcome.value:
            assert "tokens: expected a tensor without gradients" in text
            assert right_again
