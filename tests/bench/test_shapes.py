"""Registry: every suite has cases for both kinds of device, and names are unique."""

import pytest

from bench import shapes
from bench.evidence import SUITES
from envoi.ops.moe.router.presets import PRESETS
from envoi.quant.formats import FORMATS


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_cases_for_both(suite):
    cases = shapes.cases(suite)
    assert any(case.on_cuda for case in cases)
    assert any(case.on_cpu for case in cases)
    assert all(case.on_cuda or case.on_cpu for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.suite == suite for case in cases)


def test_formats_fit_their_sizes():
    for suite in SUITES:
        for shape in (case.shape for case in shapes.cases(suite)):
            if isinstance(shape, (shapes.GemmShape, shapes.GroupedShape)):
                assert shape.k % FORMATS[shape.format].group_k == 0
            if isinstance(shape, shapes.RouterShape) and shape.rule != "softmax":
                preset = PRESETS[shape.rule]
                assert (preset.num_experts, preset.num_topk) == (shape.n, shape.num_topk)
