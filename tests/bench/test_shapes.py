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


def test_formats_fit_their_sizes():
    for suite in SUITES:
        for shape in (case.shape for case in cases(suite)):
            if isinstance(shape, (shapes.GemmShape, shapes.GroupedShape)):
                assert shape.k % FORMATS[shape.format].group_k == 0
            if isinstance(shape, shapes.RouterShape) and shape.rule != "softmax":
                preset = PRESETS[shape.rule]
                assert (preset.num_experts, preset.num_topk) == (shape.n, shape.num_topk)
