"""Means over cases, by kind."""

from envoi.bench.summary import means, of_roof

from .samples import sample


def case(name: str, ours_us: float, **baselines: float):
    return sample(case=name, ours_us=ours_us, baselines=baselines)


def test_means_are_geometric_and_by_kind():
    found = [
        case("1x2x3 bf16", 10.0, cublas=20.0),
        case("2x2x3 bf16", 10.0, cublas=5.0, eager=30.0),
        case("2x2x3 fp8_row", 10.0, cublas=9.0),
    ]
    assert means(found) == (
        "bf16: cublas 1.00x [0.50x] over 2; bf16: eager 3.00x [3.00x] over 1; fp8_row: cublas 0.90x [0.90x] over 1"
    )
    assert means(found[:1]) == means([]) == ""


def test_ranks_are_kinds_of_their_own():
    moe = {"suite": "moe", "baselines": {"torch_ep": 20.0}, "ours_us": 10.0}
    found = [sample(**moe, num_gpus=1), sample(**moe, num_gpus=4), sample(**{**moe, "ours_us": 5.0}, num_gpus=4)]
    assert means(found) == "torch_ep 2.00x [2.00x] over 1; 4 GPUs: torch_ep 2.83x [2.00x] over 2"


def test_the_share_of_the_roof():
    assert (of_roof(95.0, 100.0), of_roof(None, 100.0)) == ("95 %", "-")
