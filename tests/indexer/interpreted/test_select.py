"""Selection by radix on rows of scores of all kinds, against a stable sort of them."""

import pytest
import torch

from envoi.ops.indexer import fast, kernel_best, kernel_order
from envoi.ops.indexer.fast import Order
from tests.indexer.rows import hostile_rows, wrong_rows

KINDS = dict(hostile_rows(torch.Generator().manual_seed(0), (700, 9000)))
LENGTHS = (0, 1, 33, 511, 512, 513, 4096, 8191, 8192, 8193)


def rows(*lengths):
    return [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    assert wrong_rows(KINDS[kind], 512, Order(slots=False, by_score=False)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_in_registers(kind):
    rows_of_kind = [row[:n] for row in KINDS[kind] for n in (700, 1031)]
    assert wrong_rows(rows_of_kind, 512, Order(slots=True, by_score=False), way="clusters") == []


def test_in_registers_nan_first():
    order = Order(slots=False, by_score=False, as_torch=True)
    assert wrong_rows([row[:1031] for row in KINDS["NaN"]], 100, order, way="clusters") == []


@pytest.mark.parametrize("kind", KINDS)
def test_in_registers_best_first(kind):
    rows_of_kind = [row[:n] for row in KINDS[kind] for n in (300, 1031)]
    assert wrong_rows(rows_of_kind, 512, Order(slots=True, by_score=True), way="clusters") == []


@pytest.mark.parametrize(
    ("k", "longest"), [(k, 3000) for k in (1, 2, 31, 33, 201, 2047, 2048)] + [(k, 8200) for k in (1, 201, 2048)]
)
def test_in_registers_best_first_of_k(k, longest):
    """Check rows that their one program puts in order, and, if one is longer than 8192, those of `best_kernel`."""
    lengths = rows(0, 1, k - 1, k, k + 1, longest)
    assert wrong_rows(lengths, k, Order(slots=False, by_score=True), way="clusters") == []


def test_in_registers_best_first_nan_first():
    order = Order(slots=True, by_score=True, as_torch=True)
    assert wrong_rows([row[:1031] for row in KINDS["NaN"]], 512, order, way="clusters") == []


def refuse(*_):
    raise AssertionError("another path")


@pytest.mark.parametrize(("alike", "unused"), [(31, "sort_by_radix"), (32, "rank_in_bins")])
def test_equal_scores_are_sorted_where_they_are_many(alike, unused, monkeypatch):
    """Check that a bin of 31 tokens is compared within itself, and that one of 32 is not."""
    monkeypatch.setattr(kernel_best, unused, refuse)
    row = torch.arange(400.0)
    row[-alike:] = 399.0
    assert wrong_rows([row], 512, Order(slots=True, by_score=True), way="clusters") == []


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(fast, "at_once", lambda *_: True)


@pytest.mark.parametrize("kind", ["normal", "equal", "NaN", "inf", "a sixteenth zero"])
def test_kinds_at_once(kind, at_once):
    assert wrong_rows(KINDS[kind], 512, Order(slots=False, by_score=False)) == []


BEST_FIRST = ["equal", "NaN", "inf", "one bucket", "huge and tiny"]


@pytest.mark.parametrize("kind", BEST_FIRST)
def test_best_first(kind):
    assert wrong_rows([row[:1500] for row in KINDS[kind]], 512, Order(slots=True, by_score=True)) == []


@pytest.mark.parametrize("kind", [*BEST_FIRST, "neighbours alike", "rising and falling"])
def test_best_first_at_once(kind, at_once):
    assert wrong_rows([row[:1500] for row in KINDS[kind]], 512, Order(slots=True, by_score=True)) == []


@pytest.mark.parametrize("kind", ["a sixteenth best", "few values"])
def test_ties_are_not_compared(kind, at_once, monkeypatch):
    monkeypatch.setattr(kernel_order, "put_by_bins", refuse)
    rows_of_kind = dict(hostile_rows(torch.Generator().manual_seed(2), (1500, 4000)))[kind]
    assert wrong_rows(rows_of_kind, 512, Order(slots=True, by_score=True)) == []


@pytest.mark.parametrize("by_score", [True, False])
def test_nan_first(by_score):
    assert wrong_rows(KINDS["NaN"], 512, Order(slots=True, by_score=by_score, as_torch=True)) == []


@pytest.mark.parametrize("by_score", [True, False])
def test_lengths(by_score):
    assert wrong_rows(rows(*LENGTHS), 512, Order(slots=True, by_score=by_score)) == []


CANDIDATES = ["equal", "NaN", "inf", "one bucket", "ties at the boundary", "huge and tiny"]


@pytest.mark.parametrize("kind", CANDIDATES)
def test_candidates_best_first(kind):
    rows_of_kind = [row[:4200] for row in KINDS[kind]]  # more than are ranked without being narrowed down
    assert wrong_rows(rows_of_kind, 512, Order(slots=True, by_score=True), way="candidates") == []


@pytest.mark.parametrize("as_torch", [True, False])
def test_candidates_of_any_length(as_torch):
    order = Order(slots=False, by_score=True, as_torch=as_torch)
    assert wrong_rows(rows(*LENGTHS, 40000), 512, order, way="candidates") == []


@pytest.mark.parametrize("by_score", [True, False])
@pytest.mark.parametrize("k", [1, 16, 128, 200, 1000, 1024, 2047, 2048])
def test_k(k, by_score):
    lengths = k - 1, k, k + 1, 4000, *([] if by_score else [20000])
    assert wrong_rows(rows(*lengths), k, Order(slots=by_score, by_score=by_score)) == []


@pytest.mark.parametrize("k", [1, 16, 128, 200])
def test_candidates_of_few(k):
    kinds = [*rows(k - 1, k + 1, 9000), *(KINDS[kind][0] for kind in ("equal", "NaN", "ties at the boundary"))]
    assert wrong_rows(kinds, k, Order(slots=True, by_score=True), way="candidates") == []


@pytest.fixture
def prefill(monkeypatch):
    monkeypatch.setattr(fast, "MANY_ROWS", 0)


@pytest.mark.parametrize(("by_score", "as_torch"), [(True, False), (False, False), (True, True)])
def test_rows_of_a_prefill(by_score, as_torch, prefill):
    """Check long rows, of which one has two spans of bits, with ties and without."""
    long = rows(5000, 16385, 20000, 40000, 70000) + [row.round(decimals=1) for row in rows(16385, 33000)]
    assert wrong_rows(long, 512, Order(True, by_score, as_torch=as_torch)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_long_rows_of_a_prefill(kind, prefill):
    rows_of_kind = dict(hostile_rows(torch.Generator().manual_seed(3), (17000,)))[kind]
    assert wrong_rows(rows_of_kind, 2048, Order(slots=False, by_score=False)) == []
