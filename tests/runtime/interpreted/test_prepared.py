"""Prepared calls compute what calls as always do, bit for bit, from the parameters that the driver is handed."""

import gc

import pytest

from envoi.ops.moe import api as moe_api
from envoi.runtime import shortcuts
from envoi.runtime.prepared import calls
from tests.helpers.slow import mostly_slow
from tests.runtime.prepared_cases import gemm_cases, indexer_cases, moe_cases, route_cases, same_bits

CASES = {
    **gemm_cases(20, 256, 128), **route_cases(9, 40, 64, 4), **moe_cases(8, 4, 2, 128, 128), **indexer_cases(700),
}  # fmt: skip
REFUSED: dict[str, str] = {}


def as_always(function, *arguments, **named):
    before, shortcuts.PREPARED = shortcuts.PREPARED, False
    try:
        return function(*arguments, **named)
    finally:
        shortcuts.PREPARED = before


QUICK = (
    "gemm-bf16", "gemm-fp8_block128", "gemm-mxfp4_mxfp8", "gemm-several", "gemm-reduced", "gemm-float32-out",
    "grouped-bf16", "grouped-mxfp4", "route", "route-biased", "route-hashed", "route-all", "moe-bf16", "moe-mxfp4-own",
    "moe-mapped", "moe-shared", "moe-batch", "indexer",
)  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(CASES, QUICK))
def test_bits(name, fake, monkeypatch):
    monkeypatch.setattr(moe_api, "check_ids", lambda *_: None)  # only a CPU's ids are checked, by torch's operators
    case = CASES[name]
    for i in range(2):
        given, named = case.arguments(i)
        before = len(fake.calls)
        got = case.function(*given, **named)
        replayed = len(fake.calls) - before
        assert (replayed > 0) == (name not in REFUSED), calls._calls.refusals()
        assert same_bits(got, as_always(case.function, *given, **named)), f"call {i}"
        del given, got
        gc.collect()  # the next call's tensors may be where these were
    reasons = calls._calls.refusals()
    assert [reason.split(".default")[0] for reason in reasons] == ([REFUSED[name]] if name in REFUSED else [])
