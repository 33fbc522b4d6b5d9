"""Casts: against the scalar code, at the edges, and over shapes."""

import pytest
import torch

from envoi.quant import dequantize
from envoi.types import QuantTensor


@pytest.mark.parametrize("group", [None, 128, (128,), "1x128"])
def test_a_group_that_is_no_pair_is_refused(group):
    with pytest.raises(ValueError, match="^group: expected the rows and the columns that share a scale factor, got "):
        QuantTensor(torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 1), group)


def test_last_groups_may_be_smaller():
    values, sf = torch.ones(2, 192, 160).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 2, 2)
    x = dequantize(QuantTensor(values, sf, (128, 128)))
    assert [x[1, 127, 127], x[1, 127, 128], x[1, 128, 127], x[1, 191, 159]] == [1, 2, 3, 4]
    assert x.shape == (2, 192, 160)
