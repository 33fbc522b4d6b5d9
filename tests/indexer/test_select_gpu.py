"""Selection by radix on a GPU, on rows of scores of all kinds and lengths, against a stable sort of them."""

import pytest
import torch

from envoi.ops.indexer.fast import Order
from tests.indexer.rows import hostile_rows, wrong_rows

pytestmark = pytest.mark.gpu

LENGTHS = (513, 2049, 4096, 8192, 8193, 16385, 40000, 131072)
LONG = (262145, 524288, 524289, 1_000_000, 1_048_577, 1_500_000)
ORDERS = [Order(slots=slots, by_score=by_score) for slots in (True, False) for by_score in (True, False)]


@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_kinds(order, k):
    for kind, rows in hostile_rows(torch.Generator("cuda").manual_seed(k), LENGTHS):
        assert wrong_rows(rows, k, order) == [], kind


@pytest.mark.parametrize("longest", [4096, 8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize("by_score", [True, False])
@pytest.mark.parametrize("k", [201, 300, 2048])
def test_in_registers(k, by_score, as_torch, longest):
    order = Order(slots=True, by_score=by_score, as_torch=as_torch)
    lengths = (longest, longest - 63, longest // 2 + 1, 2049, 513, 70)
    for kind, rows in hostile_rows(torch.Generator("cuda").manual_seed(k), lengths):
        assert wrong_rows(rows, k, order, way="clusters") == [], kind


@pytest.mark.parametrize(("longest", "count"), [(16384, 90), (32768, 70), (65536, 60), (131072, 32)])
@pytest.mark.parametrize("by_score", [True, False])
@pytest.mark.parametrize("k", [201, 2048])
def test_short_rows_share_clusters(k, by_score, longest, count):
    """Check rows that are more than the clusters which run at a time: of all lengths, nearly all short, all long."""
    order = Order(slots=True, by_score=by_score)
    edges = (longest, 0, 8192, 8193, longest // 2, longest // 2 + 1, 16384, 16385, 2049, 70)
    drawn = torch.randint(0, longest + 1, (count - len(edges),), generator=torch.Generator().manual_seed(k)).tolist()
    mixed = tuple(min(n, longest) for n in (*edges, *drawn))
    source = torch.Generator("cuda").manual_seed(longest)
    for kind, rows in hostile_rows(source, mixed):
        assert wrong_rows(rows, k, order, way="clusters") == [], kind
    for lengths in ((longest, *range(3000, 3000 + count - 1)), (longest,) * count):
        rows = [torch.randn(n, generator=source, device="cuda") for n in lengths]
        assert wrong_rows(rows, k, order, way="clusters") == []


@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize("k", [512, 2048])
def test_candidates(k, as_torch):
    order = Order(slots=True, by_score=True, as_torch=as_torch)
    for kind, rows in hostile_rows(torch.Generator("cuda").manual_seed(k), LENGTHS):
        assert wrong_rows(rows, k, order, way="candidates") == [], kind


@pytest.mark.parametrize("by_score", [True, False])
def test_nan_first(by_score):
    order = Order(slots=True, by_score=by_score, as_torch=True)
    for kind, rows in hostile_rows(torch.Generator("cuda").manual_seed(7), LENGTHS):
        if kind in ("normal", "NaN", "inf"):
            assert wrong_rows(rows, 2048, order) == [], kind


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_long(order):
    source = torch.Generator("cuda").manual_seed(3)
    assert wrong_rows([torch.randn(n, generator=source, device="cuda") for n in LONG], 2048, order) == []


def test_every_length_to_300():
    source = torch.Generator("cuda").manual_seed(4)
    rows = [torch.randn(n, generator=source, device="cuda") for n in range(300)]
    assert wrong_rows(rows, 512, ORDERS[0]) == []
