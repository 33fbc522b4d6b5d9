"""The report's rows have the fields that its documentation names, and no others."""

import dataclasses
import re

import torch
from torch import nn

from envoi.integrations.transformers import report
from envoi.integrations.transformers.reporting import Row


class TinyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16))


def test_rows_have_the_fields_that_are_documented():
    documented = set(re.findall(r"`(\w+)`", report.__doc__ or ""))
    assert documented == {field.name for field in dataclasses.fields(Row)} | {"runs"}
    (row,) = report(nn.ModuleDict({"experts": TinyExperts()})).rows
    assert {name for name in documented if getattr(row, name, None) is None} == set()
    assert (row.path, row.kind, row.stored, row.runs, row.num_bytes) == (
        "experts",
        "TinyExperts",
        "bfloat16",
        False,
        16,
    )
    assert row.why
