"""The oracle of a layer rounds as often as the Triton kernels, in every format, and with results in FP8."""

from dataclasses import replace

import pytest

from tests.fuzz import parallel
from tests.fuzz.draw import Draw
from tests.fuzz.formats import FORMATS
from tests.fuzz.test_oracles import judge_near_a_tie


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_rounds_its_rows_as_often_as_the_oracle(format):
    judge_near_a_tie(format, kernels=True)


def test_rows_sent_back_in_fp8_are_what_the_oracle_expects_and_no_others():
    draw = Draw("expert_parallel", 111, "small")  # with a placement and two shared experts
    given, case = parallel.setting(parallel.replace_draw(draw)), parallel.expert_parallel(parallel.replace_draw(draw))
    assert given.results and given.placement and given.num_shared == 2
    assert case.judge(case.call()) == ""
    rows_in_bf16 = parallel.run_in_one_process(replace(given, results=None), draw.device)
    assert "wrong; at" in case.judge((rows_in_bf16, False))
