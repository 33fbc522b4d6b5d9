"""The oracle of a layer rounds as often as the Triton kernels, in every format."""

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.test_oracles import judge_near_a_tie


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_rounds_its_rows_as_often_as_the_oracle(format):
    judge_near_a_tie(format, kernels=True)
