"""Tilings of the Hopper router: what fits, who waits for whom, and calls that are several launches."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from envoi.ops.moe.router import host
from envoi.ops.moe.router.choose_tiling import CACHED_BYTES, apart_candidates, candidates, choose_shares, choose_tiling
from envoi.ops.moe.router.kernel_hopper_choice import choice_kernel
from envoi.ops.moe.router.presets import PRESETS
from envoi.ops.moe.router.spec import block_sum
from envoi.ops.moe.router.tiling import CHOICE_BYTES, MAX_ELEMENTS, TILE, choice_of, rest_of, two_widths
from envoi.runtime import workspace
from envoi.runtime.devices import SHARED_BYTES
from tools.kernel_cases import router as cases
from tools.kernel_cases.router import Case

NUM_SMS = 132
NAMES = (
    "x_desc", "y_desc", "num_tokens", "hidden", "alpha", "routed_scale", "k", "logit_bias", "expert_bias", "token_ids",
    "hash_table", "vocabulary", "weights", "ids", "logits", "dense", "histogram", "counts", "offsets", "counter",
    "sums", "counters", "rest_first", "rest_parts", "rest_steps", "tiling", "spec",
)  # fmt: skip
SIZES = [
    *((m, 128, 2048, "qwen3-moe") for m in (1, 64, 65, 1600, 8448, 8556, 16384)),
    *((m, 256, 7168, "deepseek-v3") for m in (1, 227, 4096, 4224, 4259, 5706, 16384)),
    (10817, 256, 3072, "minimax-m2"), (2567, 160, 6144, "qwen3-coder-480b"), (9000, 160, 5120, "deepseek-v2"),
    (6000, 288, 4096, "step-3.7"), (12000, 384, 7168, "kimi-k2"), (15932, 512, 2048, "qwen3-next"),
    (3256, 160, 6144, "qwen3-coder-480b"), (15082, 160, 6144, "qwen3-coder-480b"), (9000, 192, 4096, "minimax-m2"),
    (8192, 512, 4096, "nemotron-super-v3"), (8192, 896, 7168, "kimi-k3"), (70000, 64, 16, "olmoe"),
]  # fmt: skip


def call_of(m, n, hidden, rule, everything=False):
    return cases.call_of(Case("", m, n, hidden, PRESETS[rule].num_topk, rule, everything=everything))


def spec_of(m, n, hidden, rule):
    return replace(call_of(m, n, hidden, rule).spec, gluon=True)


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_every_candidate_fits(m, n, hidden, rule):
    for tiling in candidates(m, hidden, spec_of(m, n, hidden, rule), NUM_SMS):
        gate = 2 * tiling.gate_slots * tiling.width * tiling.block_k
        assert gate + 2 * tiling.num_stages * tiling.tile * tiling.block_k < SHARED_BYTES
        assert tiling.steps_in_block * tiling.block_k == block_sum(hidden), "blocks along K depend on the tiling"
        assert tiling.parts_n * tiling.turns * tiling.width >= n
        assert tiling.num_stages >= 2
        assert tiling.parts_k * tiling.steps_each * tiling.block_k >= hidden
        assert tiling.tile % tiling.rows_per_cta == 0
        if tiling.all_parts_wait:
            assert -(-m // tiling.tile) * tiling.parts <= NUM_SMS, "a CTA waits for one that can't start"
        if tiling.parts == 1:
            run = tiling.block_n if tiling.rest_n or tiling.turns > 1 else tiling.columns
            of_run = gate * tiling.block_n // tiling.width
            assert of_run >= 4 * tiling.tile * run * tiling.turns, "no room for the logits"
        if tiling.turns > 1:
            stages = 2 * tiling.num_stages * tiling.block_n * tiling.block_k
            boards = [tiling.boards - 1 - turn for turn in range(tiling.turns)]
            assert min(boards) >= 0, "the last turn's logits begin before the stages"
            assert min(boards[:-1]) * 4 * tiling.tile * tiling.run >= stages, "logits in stages that are still filled"


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_shares_are_all_rows(m, n, hidden, rule):
    spec = spec_of(m, n, hidden, rule)
    shares = choose_shares(m, hidden, spec, NUM_SMS)
    assert sum(share.num_rows for share in shares) == m
    assert all(share.num_rows % TILE == 0 for share in shares[:-1])
    for share in shares:
        assert share.tiling.apart or share.tiling == choose_tiling(share.num_rows, hidden, spec, NUM_SMS)[0]


@pytest.mark.parametrize(("n", "parts", "widths"), [
    (160, 1, (128, 32)), (160, 2, (64, 16)), (384, 1, (256, 128)), (384, 2, (128, 64)), (288, 1, (256, 32)),
    (130, 1, (128, 32)), (192, 1, (128, 64)), (96, 1, (64, 32)), (896, 1, (512, 0)), (128, 1, (64, 0)),
    (256, 1, (128, 0)), (200, 1, (128, 0)), (72, 1, (64, 32)), (16, 1, (8, 0)), (1, 2, (0, 0)),
])  # fmt: skip
def test_two_widths(n, parts, widths):
    assert two_widths(n, parts) == widths


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_boxes_divide_what_is_loaded(m, n, hidden, rule):
    for tiling in candidates(m, hidden, spec_of(m, n, hidden, rule), NUM_SMS):
        assert tiling.rows_per_cta % tiling.box_m == 0
        assert tiling.block_n % tiling.box_n == tiling.rest_n % tiling.box_n == 0
        last = n - (tiling.parts_n * tiling.turns - 1) * tiling.width
        assert last > 0, "a part or turn has no expert"
        assert tiling.box_n == tiling.width or -last % tiling.box_n < 16, "rows of the gate are loaded that don't exist"
        assert tiling.num_first == tiling.num_stages or not tiling.single_fill


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_sums_of_parts_along_k_stay_in_the_l2(m, n, hidden, rule):
    tiling, _ = choose_tiling(m, hidden, spec_of(m, n, hidden, rule), NUM_SMS)
    assert tiling.parts_k == 1 or 2 * m * hidden + tiling.sum_bytes(m) < CACHED_BYTES


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_tiles_that_only_multiply_fit(m, n, hidden, rule):
    """Check their columns, their memory beside that of CTAs that choose, and the registers of both."""
    spec = spec_of(m, n, hidden, rule)
    for tiling in apart_candidates(m, hidden, spec, NUM_SMS):
        assert (tiling.parts_n - 1) * tiling.width < n <= tiling.parts_n * tiling.width
        assert tiling.parts_k == tiling.num_sets == 1 and not tiling.all_parts_wait and not tiling.polls_sums
        most = tiling.options.get("maxnreg")
        beside = CHOICE_BYTES if most else 0
        assert tiling.num_stages * 2 * tiling.block_k * (tiling.tile + tiling.width) + beside < SHARED_BYTES
        choice = choice_of(spec, True)
        assert tiling.rows_per_cta % choice.rows_per_pass == 0, "a CTA that chooses waits for one tile"
        assert choice.rows_per_pass * choice.columns <= 2 * MAX_ELEMENTS * choice.num_warps
        if most:
            left = 65536 - 32 * (tiling.num_warps + 4) * most
            assert left >= 32 * choice.num_warps * choice.options["maxnreg"]


@pytest.mark.parametrize(("n", "k", "rule", "registers"), [
    (512, 10, "qwen3-next", 64), (160, 8, "qwen3-coder-480b", 64), (384, 8, "kimi-k2", 64),
    (288, 8, "glm-5.3-flash", 64), (512, 22, "nemotron-super-v3", 80), (256, 8, "glm-5", 80),
    (256, 6, "deepseek-v4-flash", 104), (160, 6, "deepseek-v2", 104), (256, 8, "deepseek-v3", 104),
    (896, 16, "kimi-k3", 128),
])  # fmt: skip
def test_a_choice_of_many_rows_has_few_registers(n, k, rule, registers):
    """Check that as many warps choose at a time as can; outputs of all experts need more registers."""
    spec = replace(call_of(2000, n, 4096, rule).spec, k=k)
    assert choice_of(spec, True, 64.0).options["maxnreg"] == registers
    assert choice_of(spec, True, 63.9).options["maxnreg"] == max(registers, 104)
    assert choice_of(replace(spec, want_dense=True), False, 64.0).options["maxnreg"] >= 104


def test_few_rows_and_few_experts_are_one_launch():
    for m, n in ((1023, 512), (4000, 128)):
        shares = choose_shares(m, 2048, spec_of(m, n, 2048, "qwen3-next"), NUM_SMS)
        assert not any(share.tiling.apart for share in shares)


@pytest.mark.parametrize(("m", "n", "hidden", "num_sms"), [
    (4661, 512, 2048, 132), (12000, 288, 4096, 132), (1024, 512, 2048, 132), (5000, 896, 2048, 108),
    (2048, 256, 512, 132), (11501, 160, 5120, 132), (12713, 384, 7168, 132), (2500, 512, 2100, 132),
    (1300, 256, 8000, 78), (8448, 512, 2048, 132), (1100, 160, 6200, 132), (9001, 896, 7168, 132),
])  # fmt: skip
def test_a_cta_multiplies_one_tile_after_the_other(m, n, hidden, num_sms):
    """Check that whole tiles and parts of the rest are all the work, and each CTA has as many of them as another."""
    call = call_of(m, n, hidden, "qwen3-next")
    for tiling in apart_candidates(m, hidden, replace(call.spec, gluon=True), num_sms):
        products, choice = host.hopper_launches(call, host.empty_outputs(call), num_sms, tiling)
        num_tiles, steps = -(-m // tiling.rows_per_cta) * tiling.parts, -(-hidden // tiling.block_k)
        rest = rest_of(m, hidden, tiling, num_sms)
        work = {(tile, 0): range(steps) for tile in range(rest.first)}
        for tile, part in product(range(rest.first, num_tiles), range(rest.parts)):
            work[tile, part] = range(part * rest.steps, min((part + 1) * rest.steps, steps))
        assert sum(map(len, work.values())) == num_tiles * steps
        assert products[1] == (num_tiles if tiling.single_fill else min(len(work), num_sms),)
        if rest.parts > 1:
            blocks = {k // tiling.steps_in_block for (tile, part), ks in work.items() if part for k in ks}
            assert len(blocks) == rest.sets - 1, "blocks of a part that isn't the first have sets of their own"
            assert rest.steps % tiling.steps_in_block == rest.first % tiling.parts == 0
            assert len(work) <= -(-num_tiles // num_sms) * num_sms, "one round more"
        if not tiling.single_fill:
            assert min(map(len, work.values())) > tiling.num_stages, "a tile is counted after a round of stages"
        cut = dict(zip(NAMES, products[2], strict=True))["rest_parts"]
        assert cut == (rest.parts if tiling.cuts else None), "code for parts along K that there are none of"
        given = dict(zip(choice_kernel.arg_names, choice[2], strict=True))
        assert given["rest_row"] == min(rest.first // tiling.parts * tiling.rows_per_cta, m)
        assert len(given["sums"]) == (m + (rest.sets - 1) * (m - given["rest_row"])) * tiling.columns
        assert given["tiling"].adds_sets == (rest.sets > 1)


def test_products_and_choice_share_sums_and_counters(monkeypatch):
    taken = []
    monkeypatch.setattr(
        workspace, "counters", lambda count, device: taken.append(torch.zeros(count, dtype=torch.int32)) or taken[-1]
    )
    call = call_of(4661, 512, 2048, "qwen3-next", everything=True)
    outputs = host.empty_outputs(call)
    products, choice = host.hopper_launches(call, outputs, NUM_SMS)
    assert [kernel.fn.__name__ for kernel, *_ in (products, choice)] == ["router_kernel", "choice_kernel"]
    given = dict(zip(NAMES, products[2], strict=True))
    tiling, sums = given["tiling"], given["sums"]
    assert products[1] == (min(-(-4661 // tiling.tile) * tiling.parts, NUM_SMS),)
    assert sums.numel() >= 4661 * 512
    assert len(taken) == 1 and taken[0].numel() == 2 * -(-4661 // tiling.tile) + 513
    assert given["counters"] is choice[2][1] is taken[0] and choice[2][0] is sums
    assert choice[2][2:5] == (4661, tiling.tile, tiling.parts)
    assert given["weights"] is given["counts"] is None
    assert any(x is outputs["weights"] for x in choice[2])
    assert choice[1] == (-(-4661 // choice[2][-2].rows_per_pass),)
    assert all(options["launch_pdl"] for *_, options in (products, choice))


def launches_of(m, n, hidden, rule):
    """Return the launches of a call with all outputs, as dicts of their arguments, and the outputs."""
    call = call_of(m, n, hidden, rule, everything=True)
    outputs = host.empty_outputs(call)
    found = host.hopper_launches(call, outputs, NUM_SMS)
    return [(grid, dict(zip(NAMES, given, strict=True)), options) for _, grid, given, options in found], outputs


def test_several_launches_have_their_rows_and_one_histogram(monkeypatch):
    taken = []
    monkeypatch.setattr(
        workspace, "counters", lambda count, device: taken.append(torch.zeros(count, dtype=torch.int32)) or taken[-1]
    )
    (first, second), outputs = launches_of(8600, 128, 4096, "qwen3-moe")
    assert len(taken) == 1, "the launches need one histogram"
    assert [given["num_tokens"] for _, given, _ in (first, second)] == [8448, 152]
    assert [grid for grid, _, _ in (first, second)] == [(132,), (96,)]
    assert all(options["launch_pdl"] for _, _, options in (first, second))
    assert second[2]["launch_cooperative_grid"]
    for name in ("weights", "ids", "logits", "dense"):
        assert [len(given[name]) for _, given, _ in (first, second)] == [8448, 152]
        assert second[1][name].storage_offset() == 8448 * outputs[name].shape[1]
    assert first[1]["histogram"].data_ptr() == second[1]["histogram"].data_ptr()
    assert first[1]["counter"] is first[1]["counts"] is first[1]["offsets"] is None
    assert second[1]["counter"].data_ptr() == second[1]["histogram"].data_ptr() - 4
    assert second[1]["counts"] is outputs["counts"][0]


def test_hashed_rows_are_divided_like_tokens():
    call = cases.call_of(Case("", 8600, 128, 4096, 8, "deepseek-v3", hashed=True))
    found = host.hopper_launches(call, host.empty_outputs(call), NUM_SMS)
    assert [len(given[9]) for _, _, given, _ in found] == [given[2] for _, _, given, _ in found]


@pytest.mark.parametrize(("m", "n", "hidden", "rule"), SIZES)
def test_sums_in_any_order_are_chosen_only_if_they_may_be(m, n, hidden, rule):
    spec = spec_of(m, n, hidden, rule)
    kept, free = (choose_shares(m, hidden, spec, NUM_SMS, promised) for promised in (True, False))
    assert not any(share.tiling.one_sum for share in kept)
    assert free == kept or (len(free) == 1 and free[0].tiling.one_sum and free[0].tiling.apart)


def test_the_call_says_whether_a_sum_is_in_any_order():
    call = call_of(12360, 256, 7168, "deepseek-v3")
    for promised in (True, False):
        found = host.hopper_launches(replace(call, batch_invariant=promised), host.empty_outputs(call), NUM_SMS)
        assert any(given[-2].one_sum for *_, given, _ in found[:1]) != promised


@pytest.mark.parametrize("num_sms", [132, 78])
@pytest.mark.parametrize(
    ("m", "n", "hidden"), [(4661, 512, 2048), (1385, 256, 6144), (12360, 256, 7168), (1100, 160, 6200)]
)
def test_parts_of_a_sum_in_any_order_have_a_set_each(m, n, hidden, num_sms):
    for tiling in apart_candidates(m, hidden, spec_of(m, n, hidden, "qwen3-next"), num_sms, one_sum=True):
        rest, steps = rest_of(m, hidden, tiling, num_sms), -(-hidden // tiling.block_k)
        assert rest.sets == rest.parts and (rest.parts - 1) * rest.steps < steps <= rest.parts * rest.steps
        assert rest.parts == 1 or min(rest.steps, steps - (rest.parts - 1) * rest.steps) > tiling.num_stages
        most = tiling.options.get("maxnreg", 255)
        assert most >= tiling.block_n // 2 + 26, "the assembler refuses"
