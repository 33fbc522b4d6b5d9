"""Shared memory of the selection: its words and what the compiler takes, together, need no leave of the driver."""

import json
from pathlib import Path

import pytest

# Of the Triton that they were accepted with, whichever is installed.
ACCEPTED = json.loads((Path(__file__).parents[1] / "machine_code" / "gate.json").read_text())["kernels"]
STATIC_AND_DYNAMIC = 48 << 10  # bytes a launch may take without an attribute, which Triton sets by its own bytes alone
RESERVED = 1 << 10  # by the driver, which the accepted counts include


@pytest.mark.parametrize("title", [title for title in ACCEPTED if title.startswith(("indexer-select", "indexer-set"))])
def test_a_launch_takes_at_most_48_kib(title):
    assert ACCEPTED[title]["shared_bytes"] - RESERVED <= STATIC_AND_DYNAMIC
