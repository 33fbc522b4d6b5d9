"""Registry: every suite has cases for both kinds of device, and names are unique."""

import pytest

from bench import shapes
from bench.evidence import SUITES
from bench.suites import cases
from envoi.ops.moe.router.presets import PRESETS
from envoi.quant.formats import FORMATS


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_cases_for_both(suite):
    found = cases(suite)
    assert any(case.on_cuda for case in found)
    assert any(case.on_cpu for case in found)
    assert all(case.on_cuda or case.on_cpu for case in found)
    assert len({case.name for case in found}) == len(found)
    assert all(case.suite == suite for case in found)


def test_case_names_read_as_documented():
    names = {suite: [case.name for case in cases(suite)] for suite in SUITES}
    assert "8192x4096x7168 bf16" in names["gemm"]
    assert "512x8x128 top4 softmax fp16" in names["router"]
    assert "128x256x7168 deepseek-v3 bf16" in names["router"]
    assert "64x256x7168 deepseek-v3 bf16" in names["router_call"]
    assert "4096x1024x1024 top4 softmax fp16" in names["router_dense"]
    assert "4096/2048/256/6 fp8_block128 tokens=2048" in names["moe"]
    assert "4096/2048/32/6 fp8_row tokens=2048" in names["moe"]
    assert "128 workloads (mean)" in names["indexer_exact"]


def test_formats_fit_their_sizes():
    for suite in SUITES:
        for shape in (case.shape for case in cases(suite)):
            if isinstance(shape, (shapes.GemmShape, shapes.GroupedShape)):
                assert shape.k % FORMATS[shape.format].group_k == 0
            if isinstance(shape, shapes.RouterShape) and shape.rule != "softmax":
                preset = PRESETS[shape.rule]
                assert (preset.num_experts, preset.num_topk) == (shape.n, shape.num_topk)


def test_drawn_rows_are_those_of_routing_at_random():
    rows = shapes.drawn_rows(8192, 32)
    assert sum(rows) == 8192
    assert 256 - 4 * 16 < min(rows) < 256 < max(rows) < 256 + 4 * 16
    assert rows == shapes.drawn_rows(8192, 32)


def test_zipf_rows_are_skewed_with_empty_experts():
    rows = shapes.zipf_rows(8192, 32, 4)
    assert sum(rows) == 8192
    assert rows.count(0) == 4
    assert max(rows) > 2000
    assert rows == shapes.zipf_rows(8192, 32, 4)


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match=r"suite: expected one of gemm, .*, got 'gems'"):
        cases("gems")
