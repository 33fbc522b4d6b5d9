"""Pairs of tiles without a GPU: the order of tiles, which configs take them, where they are chosen, the kernels."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from envoi.epilogues import epilogue, library, pairs, quantize, round_bf16
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import pairs_up
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.gemm.hopper.config import Config, Problem, shared_bytes, why_not
from envoi.ops.gemm.hopper.tile_scheduler import corner_in_expert, tile_in_pairs, units_in_pairs
from envoi.ops.moe import choose
from envoi.runtime.devices import SHARED_BYTES
from tests.helpers.slow import mostly_slow
from tools.kernel_cases import gemm_hopper as hopper_cases
from tools.kernel_cases.gemm_hopper import Case
from tools.machine_code.compile import compile_launch

LAYOUTS = ("interleaved", "concat")
IN_PAIRS = {layout: library.expert_l1("swiglu", None, False, "fp8_1x128", layout, True).ir for layout in LAYOUTS}
IN_BF16 = {layout: library.expert_l1("swiglu", None, False, None, layout).ir for layout in LAYOUTS}
PAIRED = lower(IN_PAIRS["interleaved"], torch.bfloat16, "gluon", False, False, frozenset(), paired=True)
STORED = lower(IN_BF16["interleaved"], torch.bfloat16, "gluon", False, True, frozenset())
PROBLEM = Problem(64 * 192, 4096, 4096, 1, num_groups=64, scaled=True)
SQUARE, WIDE = (
    Config(64, 2, 128, 128, stages, wide_tail_tiles=wide, paired_tiles=True, epilogue_columns=128)
    for stages, wide in ((6, False), (5, True))
)
ALONE = Config(64, 1, 128, 256, 4, paired_tiles=True, epilogue_columns=128)


# The order of tiles


def units_of(cta: int, num_ctas: int, num_pairs: int) -> list[int]:
    """Return the tiles of a CTA in its order, as the kernel's roles walk them."""
    return [tile_in_pairs.fn(u, cta, num_ctas) for u in range(units_in_pairs.fn(num_pairs, cta, num_ctas))]


@pytest.mark.parametrize(("num_ctas", "num_pairs"), [(1, 0), (1, 5), (4, 6), (4, 8), (132, 7), (132, 132), (7, 1000)])
def test_a_ctas_tiles_are_pairs(num_ctas, num_pairs):
    found = [units_of(cta, num_ctas, num_pairs) for cta in range(num_ctas)]
    want = [[tile for p in range(cta, num_pairs, num_ctas) for tile in (2 * p, 2 * p + 1)] for cta in range(num_ctas)]
    assert found == want


def shares_of(config: Config, counts: list[int], N: int, num_ctas: int) -> list[list[tuple[int, int, int, int]]]:
    """Return each consumer's shares in its order: (expert, first row, end of the expert's rows, first column)."""
    begins = [sum(counts[:e]) for e in range(len(counts))]
    tiles = [-(-count // config.block_m) for count in counts]
    pairs_before = [0]
    for token_tiles in tiles:
        pairs_before.append(pairs_before[-1] + token_tiles * (N // config.block_n))
    found: list[list[tuple[int, int, int, int]]] = []
    for cta, part in product(range(num_ctas), range(config.consumers_per_tile)):
        found.append([])
        for tile in units_of(cta, num_ctas, pairs_before[-1]):
            e = max(e for e in range(len(counts)) if pairs_before[e] <= tile // 2)
            x, y = corner_in_expert.fn(tile // 2 - pairs_before[e], tiles[e], begins[e], config)
            y += tile % 2 * config.block_y
            end = begins[e] + counts[e]
            box_x, box_y = part, 0
            if config.wide_tail_tiles and x + config.rows_per_consumer >= end:
                box_x, box_y = 0, part
            row, column = x + box_x * config.rows_per_consumer, y + box_y * config.y_pitch
            if row < end:
                found[-1].append((e, row, end, column))
    return found


@pytest.mark.parametrize("num_ctas", [1, 7, 132])
@pytest.mark.parametrize("N", [512, 1536])
@pytest.mark.parametrize("config", [SQUARE, WIDE, ALONE], ids=lambda config: config.label())
def test_every_group_is_one_consumers(config, N, num_ctas):
    counts = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 0, 321]
    h = config.rows_per_consumer
    seen = []
    for shares in shares_of(config, counts, N, num_ctas):
        for first, second in zip(shares[::2], shares[1::2], strict=True):
            assert first[:3] == second[:3] and second[3] == first[3] + 128 and first[3] % 256 == 0
            e, row, end, column = first
            seen += [(e, r, column) for r in range(row, min(row + h, end))]
    rows = [(e, r) for e, count in enumerate(counts) for r in range(sum(counts[:e]), sum(counts[: e + 1]))]
    assert sorted(seen) == [(e, r, column) for e, r in rows for column in range(0, N, 256)]


# Which epilogues and configs


@epilogue
def not_rounded(acc):
    gate, up = pairs(acc)
    return quantize(gate * up, "fp8_e4m3", group=128)


@epilogue
def not_alone(acc):
    gate, up = pairs(acc)
    h = round_bf16(gate * up)
    return quantize(h, "fp8_e4m3", group=128), h


@epilogue
def not_halved(acc):
    return quantize(round_bf16(acc), "fp8_e4m3", group=128)


@pytest.mark.parametrize("ep", [not_rounded, not_alone, not_halved, library.store], ids=lambda ep: ep.ir.name)
def test_epilogues_that_pairs_cant_quantise(ep):
    assert not pairs_up(ep.ir)
    with pytest.raises(ValueError, match="pairs of chunks can be quantised if the only output is a tile rounded to bf"):
        lower(ep.ir, torch.bfloat16, "gluon", False, False, frozenset(), paired=True)


@pytest.mark.parametrize(
    ("config", "problem", "words"),
    [
        (SQUARE, PROBLEM, ""),
        (WIDE, PROBLEM, ""),
        (ALONE, PROBLEM, ""),
        (SQUARE, replace(PROBLEM, N=4352), ""),
        (WIDE, replace(PROBLEM, N=4352), "wide_tail_tiles: expected a grouped GEMM with N a multiple of 512, got 4352"),
        (SQUARE, replace(PROBLEM, N=4224), "paired_tiles: expected a grouped GEMM with N a multiple of 256, got 4224"),
        (SQUARE, replace(PROBLEM, num_groups=0), "paired_tiles: expected a grouped GEMM with N a"),
        (replace(SQUARE, paired_tiles=False), PROBLEM, "paired_tiles: expected True for this epilogue, got False"),
        (replace(SQUARE, epilogue_columns=64), PROBLEM, "epilogue_columns: expected a multiple of 128"),
        (replace(SQUARE, pingpong=True), PROBLEM, "paired_tiles: expected tokens on the M side, no pingpong and one"),
        (replace(ALONE, swap_ab=True), PROBLEM, "epilogue_columns: expected a multiple of 128"),
    ],
)
def test_configs(config, problem, words):
    why = why_not(problem, config, PAIRED)
    assert why.startswith(words) if words else why == ""


@pytest.mark.parametrize("rows", [1, 16, 64, 96, 192, 384, 1536])
@pytest.mark.parametrize("N", [256, 512, 2816, 4096])
def test_candidates(rows, N):
    problem = replace(PROBLEM, M=64 * rows, N=N)
    found = candidates(problem, PAIRED)
    assert found and all(config.paired_tiles for config in found)
    assert all(shared_bytes(problem, config, PAIRED) <= SHARED_BYTES for config in found)
    assert not any(config.paired_tiles for config in candidates(problem, STORED))


# Where they are chosen


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(choose, "num_sms", lambda device: 132)


def chosen(M: int, N: int = 4096, layout: str = "concat", format: str = "fp8_block128", grouping=EXPERTS_ROWS) -> bool:
    given = hopper_cases.inputs(Case("x", "expert_l1", M, N, 4096, format, num_experts=64, write_tail=False))
    if choose.why_not_pairs(given.a, given.b, IN_PAIRS[layout]):
        return False
    rows = grouping.likely_rows(given.a.shape[0])
    return choose.pairs_pay(given.b, IN_PAIRS[layout], IN_BF16[layout], rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chosen_where_tokens_are_many(layout, on_hopper):
    assert all(chosen(64 * rows, layout=layout) for rows in (192, 256, 768, 2048))
    assert not chosen(64 * 12, layout=layout)  # weights take the M side
    assert not chosen(64 * 192, N=4224, layout="interleaved")
    assert not chosen(64 * 192, format="fp8_row") and not chosen(64 * 192, format="bf16")


# The kernels


@pytest.mark.compiles
@pytest.mark.default_triton  # under others a kernel may spill
@pytest.mark.parametrize(
    ("num_experts", "name", "config"),
    mostly_slow(
        product((8, 256), ("expert_l1_pairs", "expert_l1_pairs_concat", "expert_l1_pairs_oai"), (SQUARE, WIDE, ALONE)),
        quick=[],  # the gate has one of each
    ),
    ids=lambda value: value.label() if isinstance(value, Config) else None,
)
def test_kernels_spill_nothing(name, config, num_experts):
    case = Case("x", name, 48 * num_experts, 4096, 4096, "fp8_block128", num_experts, write_tail=False)
    call, _ = hopper_cases.planned(hopper_cases.inputs(case))
    assert why_not(host.problem_of(call), config, call.code) == ""
    binary = compile_launch(hopper_cases.launch_with(call, config), "sm_90")
    assert binary.stack_bytes == 0
    consumers = config.num_consumers
    # 64 x 64 outputs of a tile by 128 threads, 16 to an instruction.
    assert binary.ptx.count("st.global.v4.b32") == consumers * 4
    assert binary.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == consumers * 32
