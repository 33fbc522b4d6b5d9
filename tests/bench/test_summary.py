"""Means over cases, by kind."""

from bench.summary import best_baseline, compared, means, of_roof

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


def test_between_hosts_nothing_counts_that_needs_nvlink():
    moe = {"suite": "moe", "baselines": {"torch_ep": 20.0, "sgl_deep_gemm": 5.0}, "ours_us": 10.0, "num_gpus": 4}
    found = [sample(**moe), *(sample(**moe, details={"transport": name}) for name in ("nvlink", "nccl"))]
    assert means(found) == (
        "4 GPUs: torch_ep 2.00x [2.00x] over 2; 4 GPUs: sgl_deep_gemm 0.50x [0.50x] over 2; "
        "4 GPUs over NCCL: torch_ep 2.00x [2.00x] over 1; 4 GPUs over NCCL: sgl_deep_gemm 0.50x [0.50x] over 1"
    )
    assert [best_baseline(m) for m in found] == [("sgl_deep_gemm", 5.0)] * 2 + [("torch_ep", 20.0)]


def test_a_host_case_is_of_its_operators_kind():
    host = {"suite": "host", "ours_us": 10.0, "baselines": {"torch_mm": 5.0}}
    found = [sample(**host, case="gemm 64x4096x7168 bf16"), sample(**host, case="moe 2048/768/128/8 bf16 tokens=1")]
    assert means(found) == "gemm: torch_mm 0.50x [0.50x] over 1; moe: torch_mm 0.50x [0.50x] over 1"
    assert [name for _, name, _ in compared(found)] == ["torch_mm", "torch_mm"]
    loop = sample(suite="host_loop", case="gemm a", ours_us=10.0, baselines={"graph": 5.0})
    assert best_baseline(loop) is None
    assert [name for _, name, _ in compared([loop])] == ["graph"]


def test_the_share_of_the_roof():
    assert (of_roof(95.0, 100.0), of_roof(None, 100.0)) == ("95 %", "-")
