"""Triton kernels on a GPU: the interpreter's cases, compiled."""

import pytest
import torch

from envoi.ops.gemm.triton import host as triton_host
from tests.gemm.interpreted.sides import assert_close, expected, whole
from tests.gemm.interpreted.test_block_scaled import SCALED
from tests.gemm.interpreted.test_operations import CLOSE, EXACT, ending, values
from tests.gemm.interpreted.test_products import GROUPS, PAIRINGS, cast, store
from tests.helpers.accuracy import relative_error
from tests.helpers.inputs import normal
from tools.oracles.gemm import oracle

pytestmark = pytest.mark.gpu


def on_gpu(x):
    if isinstance(x, torch.Tensor):
        return x.cuda()
    return x if isinstance(x, float) else type(x)(x.values.cuda(), x.sf.cuda(), x.group)


def run(a, b, f, offsets=None, out_dtype=torch.float32, **operands):
    sides, named = (on_gpu(a), on_gpu(b)), {name: on_gpu(value) for name, value in operands.items()}
    bounds = None if offsets is None else torch.tensor(offsets, dtype=torch.int32).cuda()
    return [x.cpu() for x in triton_host.run_gemm(*sides, bounds, f.ir, out_dtype, named)]


@pytest.mark.parametrize("name", [*EXACT, *(name for name in CLOSE if name not in EXACT)])
def test_operations(name):
    for m, n, make in ((17, 132, whole), (0, 8, whole), (70, 520, whole), (33, 132, normal)):
        if make is normal and name in EXACT:
            continue
        a, b = make(m, 40).bfloat16(), make(n, 40, seed=1).bfloat16()
        f = ending({**CLOSE, **EXACT}[name])
        operands = values(f, make, m, n)
        want = expected(a, b, f, wide=True, **operands)
        assert_close(run(a, b, f, **operands), expected(a, b, f, **operands), want, 1e-6)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "neg"])
def test_operations_of_groups(name):
    offsets = [0, 5, 5, 70, 71]
    for n in (24, 520):
        a, b = whole(80, 24).bfloat16(), whole(4, n, 24, seed=1).bfloat16()
        f = ending(EXACT[name])
        operands = values(f, whole, 80, n, 4)
        want = expected(a, b, f, offsets, wide=True, **operands)
        assert_close(run(a, b, f, offsets, **operands), expected(a, b, f, offsets, **operands), want, 1e-6)


@pytest.mark.parametrize(("for_a", "for_b"), PAIRINGS)
def test_formats(for_a, for_b):
    for m, n, k in ((17, 130, 256), (300, 520, 512)):
        a, b = cast(normal(m, k), for_a), cast(normal(n, k, seed=1), for_b)
        assert relative_error(run(a, b, store)[0], oracle(a, b)) < 1e-6


@pytest.mark.parametrize(("for_a", "for_b"), SCALED)
def test_block_scaled_products(for_a, for_b, monkeypatch):
    monkeypatch.setattr(triton_host, "has_tcgen05", lambda device: True)  # on Hopper Triton widens them itself
    for m, n, k in ((17, 130, 160), (60, 40, 384), (300, 520, 512)):
        a, b = cast(normal(m, k), for_a), cast(normal(n, k, seed=1), for_b)
        assert relative_error(run(a, b, store)[0], oracle(a, b)) < 1e-6
    rows, weights = cast(normal(32, 128), for_a), cast(normal(4, 24, 128, seed=1), for_b)
    offsets = [0, 5, 9, 9, 20]
    assert (
        relative_error(run(rows, weights, store, offsets)[0], expected(rows, weights, store, offsets, wide=True)[0])
        < 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats(dtype):
    for m, n, k in ((1, 8, 64), (129, 130, 72), (1000, 520, 500), (0, 3, 8), (3, 3, 0)):
        a, b = normal(m, k).to(dtype), normal(n, k, seed=1).to(dtype)
        assert relative_error(run(a, b, store)[0], oracle(a, b)) < 1e-6


@pytest.mark.parametrize(("for_a", "for_b"), [(None, None), ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp4")])
def test_groups(for_a, for_b):
    for name, offsets in GROUPS.items():
        rows = 0 if name == "no rows" else 32
        a, b = cast(normal(rows, 128), for_a), cast(normal(4, 24, 128, seed=1), for_b)
        want = expected(a, b, store, offsets, wide=True)
        assert relative_error(run(a, b, store, offsets)[0], want[0]) < 1e-6
