"""Certificates: how they are found, kept and read. Which orders a GPU's torch has is for test_gpu."""

import json

import pytest
import torch

from envoi.indexer import certificate, certify
from envoi.indexer.certificate import NUM_ORDERS, SHARED, expand, order_of

KNOWN = {"parts": [[1, 4], [129, 16], [177, 1]], "shared_from": 128}


def test_orders_by_length():
    orders = expand(KNOWN)
    assert orders.shape == (NUM_ORDERS + 4,)
    for length, order in ((1, 4), (124, 4), (128, 4 + SHARED), (129, 16), (176, 16 + SHARED), (177, 1), (510, 1)):
        assert orders[length] == order == order_of(KNOWN, length)
    for length in (512, 1001, 131070, 131072):
        assert orders[NUM_ORDERS + length % 4] == order_of(KNOWN, length)


@pytest.mark.parametrize("known", [KNOWN, {"parts": [[1, 1]], "shared_from": None}])
def test_a_rule_is_found_again(known):
    by_length = {length: {order_of(known, length)} for length in certify._lengths()}
    assert certify.summarize(by_length) == known
    by_length[3].add(1)
    by_length[200].add(16)
    assert certify.summarize(by_length)["shared_from"] == known["shared_from"]
    assert all(order_of(certify.summarize(by_length), n) in orders for n, orders in by_length.items())


def test_shipped_certificates_are_whole():
    for heads in json.loads(certificate.SHIPPED.read_text()).values():
        assert set(heads) == {str(num_heads) for num_heads in certificate.HEADS}
        assert all(bool((expand(known) > 0).all()) for known in heads.values())


def test_found_ones_are_kept_and_win(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(certificate, "name_of", lambda device: "a GPU")
    certificate.orders.cache_clear()
    assert certificate.orders(torch.device("cpu"), 64) is None
    other = {"parts": [[1, 2]], "shared_from": None}
    certificate.write("a GPU", {"64": KNOWN, "32": KNOWN})
    certificate.write("another", {"64": other})
    certificate.write("a GPU", {"64": other, "32": KNOWN})
    assert torch.equal(certificate.orders(torch.device("cpu"), 64), expand(other))
    assert torch.equal(certificate.orders(torch.device("cpu"), 32), expand(KNOWN))
    assert set(json.loads((tmp_path / "indexer.json").read_text())) == {"a GPU", "another"}
    certificate.orders.cache_clear()
