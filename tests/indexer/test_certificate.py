"""Certificates: search, storage, reading; test_gpu checks the orders of a GPU's torch."""

import json

import pytest
import torch

from envoi.ops.indexer import UncertifiedWarning, certificate, certify, select
from envoi.ops.indexer.certificate import NUM_ORDERS, SHARED, expand, order_of

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


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path))
    certificate.orders.cache_clear()
    certificate.warn_uncertified.cache_clear()
    yield tmp_path
    certificate.orders.cache_clear()
    certificate.warn_uncertified.cache_clear()


def on(monkeypatch, gpu: str, version: str, cublas: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(certificate, "cublas_version", lambda: cublas)


H200 = ("NVIDIA H200", "2.11.0+cu130", "13.1.0")
NAME = "NVIDIA H200, torch 2.11.0+cu130, cuBLAS 13.1.0"


def test_the_wheel_of_torch_on_an_h200_is_certified(cache_dir, monkeypatch):
    on(monkeypatch, *H200)
    assert certificate.name_of(torch.device("cuda", 0)) == NAME
    assert set(json.loads(certificate.SHIPPED.read_text())[NAME]) == {"32", "64"}
    assert certificate.orders(torch.device("cpu"), 64) is not None


@pytest.mark.parametrize(
    "other",
    [
        ("NVIDIA H100 PCIe", *H200[1:]),  # another number of SMs, so other kernels of cuBLAS
        ("NVIDIA H200", "2.11.0", "13.1.0"),  # a private build
        ("NVIDIA H200", "2.11.0+cu128", "12.8.4"),
        ("NVIDIA H200", "2.11.0+cu130", "13.2.0"),  # a newer nvidia-cublas with the same torch
        ("NVIDIA H200", "2.12.0+cu130", "13.1.0"),
    ],
)
def test_what_may_add_up_otherwise_has_no_certificate_and_is_told_once(cache_dir, monkeypatch, other):
    on(monkeypatch, *other)
    device = torch.device("cuda", 0)
    with pytest.warns(UncertifiedWarning) as caught:
        assert select.orders_for(device, 64) is None
        assert select.orders_for(device, 32) is None
        assert select.orders_for(torch.device("cuda", 1), 64) is None
    assert len(caught) == 1
    assert f"{other[0]}, torch {other[1]}, cuBLAS {other[2]}" in str(caught[0].message)
    assert "`envoi indexer certify`" in str(caught[0].message)


def test_a_cpu_is_the_definition_and_needs_none(cache_dir, recwarn):
    assert select.orders_for(torch.device("cpu"), 64) is None
    assert not recwarn.list


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "going on without it"),
        ("[]", r"expected a JSON object, got \[\]"),
        ('{"a GPU": {"64": {"parts": [[1]], "shared_from": null}}}', r"64 heads: expected parts of \[tokens, parts\]"),
        ('{"a GPU": {"64": {"parts": [], "shared_from": null}}}', r"64 heads: expected parts of \[tokens, parts\]"),
        ('{"a GPU": {"64": {"parts": [[1, 4]]}}}', "64 heads: expected parts and shared_from"),
        ('{"a GPU": {"64": {"parts": [[1, 4]], "shared_from": "no"}}}', "64 heads: expected an int or null"),
        ('{"a GPU": 64}', "expected an object, got int"),
    ],
)
def test_a_spoilt_file_is_left_out_and_written_anew(cache_dir, monkeypatch, text, problem):
    monkeypatch.setattr(certificate, "name_of", lambda device: "a GPU")
    (cache_dir / "indexer.json").write_text(text)
    with pytest.warns(UserWarning, match=rf"indexer\.json: .*{problem}"):
        assert certificate.orders(torch.device("cpu"), 64) is None
    certificate.write("a GPU", {"64": KNOWN})
    assert torch.equal(certificate.orders(torch.device("cpu"), 64), expand(KNOWN))


def test_found_ones_are_kept_and_win(cache_dir, monkeypatch):
    monkeypatch.setattr(certificate, "name_of", lambda device: "a GPU")
    assert certificate.orders(torch.device("cpu"), 64) is None
    other = {"parts": [[1, 2]], "shared_from": None}
    certificate.write("a GPU", {"64": KNOWN, "32": KNOWN})
    certificate.write("another", {"64": other})
    certificate.write("a GPU", {"64": other, "32": KNOWN})
    assert torch.equal(certificate.orders(torch.device("cpu"), 64), expand(other))
    assert torch.equal(certificate.orders(torch.device("cpu"), 32), expand(KNOWN))
    assert set(json.loads((cache_dir / "indexer.json").read_text())) == {"a GPU", "another"}
