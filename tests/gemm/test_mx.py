"""Hopper kernel for MX weights without a GPU: required machine code, refused problems."""

from itertools import product

import pytest
import torch

from envoi.epilogues.library import expert_l1, store, swiglu_fp8
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs, operand_tensors
from envoi.ops.gemm.hopper_mx import host
from envoi.ops.gemm.hopper_mx.config import (
    DEEP_TOKENS,
    MAX_STAGES,
    NARROW,
    WIDE,
    MxConfig,
    default_config,
    fitted,
    is_short,
    shared_bytes,
)
from envoi.ops.gemm.hopper_mx.host import why_not_mx
from envoi.quant.pack import pad_factors
from envoi.runtime.program import Launch
from envoi.types import QuantTensor
from tools.kernel_cases.operands import operands_of
from tools.machine_code.compile import compile_launch
from tools.machine_code.count import record_of

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(*shape: int, bits: int = 4, scales_at_most_2: bool = False) -> QuantTensor:
    *rows, K = shape
    values = empty(*rows, K // 2, dtype=torch.uint8) if bits == 4 else empty(*rows, K, dtype=E4M3)
    return QuantTensor(values, empty(*rows, K // 32, dtype=E8M0), (1, 32), scales_at_most_2=scales_at_most_2)


def compiled(ep, config: MxConfig, num_experts: int = 32, M: int = 512, N: int = 4096, K: int = 2048):
    from envoi.ops.gemm.hopper_mx.kernel import mx_kernel

    lead = (num_experts,) if num_experts else ()
    tensors, pointers = operand_tensors(ep.ir, operands_of(ep.ir, M, N, lead), num_experts)
    outputs = empty_outputs(ep.ir, torch.bfloat16, M, N, torch.device("meta"))
    code = lower(ep.ir, torch.bfloat16, "gluon", False, False, pointers)
    offsets = empty(num_experts + 1, dtype=torch.int32) if num_experts else None
    grid, args = host.arguments(
        empty(M, K), weights(*lead, N, K, bits=config.bits), offsets, code, tensors, outputs, config, num_sms=132
    )
    return compile_launch(Launch(mx_kernel, grid, args, {"num_warps": config.num_warps}), "sm_90")


def is_chosen(ep, block_y: int, rows_per_consumer: int) -> bool:
    """Wide consumers run short epilogues on tiles of few tokens. Narrow ones have room to spare at 64, as at 128."""
    code = lower(ep.ir, torch.bfloat16, "gluon", False, False, frozenset())
    return block_y != 64 if rows_per_consumer == NARROW else is_short(code, block_y) and block_y <= DEEP_TOKENS


QUICK = ((8, 8, (2, WIDE)),)
COMPILED = [
    pytest.param(
        bits, ep, block_y, consumers, id=f"{bits}-{ep.ir.name}-{block_y}-{consumers}",
        marks=() if ep is store and (bits, block_y, consumers) in QUICK else pytest.mark.slow,
    )
    for bits in (4, 8)
    for ep in (store, expert_l1("swiglu_oai", 7.0, True, "mxfp8"))
    for block_y in (8, 64, 128)
    for consumers in ((1, NARROW), (2, NARROW), (2, WIDE))
    if is_chosen(ep, block_y, consumers[1])
]  # fmt: skip


@pytest.mark.parametrize(("bits", "ep", "block_y", "consumers"), COMPILED)
def test_machine_code(bits, ep, block_y, consumers):
    num_consumers, rows_per_consumer = consumers
    config = MxConfig(num_consumers, block_y, MAX_STAGES, rows_per_consumer, bits=bits, scales_at_most_2=True)
    config = fitted(config)
    binary = compiled(ep, config)
    families = record_of(binary)[0].families
    assert not [family for family in families if "spill" in family]
    assert families["tensor core"] == {f"HGMMA.64x{block_y}x16.F32.BF16": config.block_k // 16 * num_consumers}
    assert binary.shared_bytes <= shared_bytes(config)


def test_configs_fit():
    sizes = ((1, 256, 0), (16, 4096, 0), (512, 4096, 32), (4096, 2880, 8), (100000, 4096, 0))
    for (M, N, num_groups), bits in product(sizes, (4, 8)):
        config = default_config(M, N, num_groups, 132, bits=bits)
        assert config.num_stages >= 2
        assert shared_bytes(config) <= 232448
    assert default_config(32 * 16, 4096, 32, 132).block_y == 16
    assert [default_config(32 * tokens, 4096, 32, 132).block_y for tokens in (65, 128, 129, 192, 193, 384)] == [
        128, 128, 64, 64, 128, 128,
    ]  # fmt: skip
    assert default_config(32 * 64, 4096, 32, 132).block_y == 64


def test_what_it_does_not_take():
    a = QuantTensor(empty(16, 1024, dtype=E4M3), empty(16, 32, dtype=E8M0), (1, 32))
    b = weights(512, 1024)
    assert why_not_mx(a, b, store.ir) == why_not_mx(empty(16, 1024), b, store.ir) == ""
    assert "tokens" in why_not_mx(empty(16, 1024, dtype=torch.float16), b, store.ir)
    assert why_not_mx(a, weights(512, 1024, bits=8), store.ir) == ""
    assert "weights" in why_not_mx(a, QuantTensor(empty(512, 1024, dtype=E4M3), a.sf.float(), (1, 32)), store.ir)
    assert "256 columns" in why_not_mx(a, b, swiglu_fp8.ir)
    assert "empty" in why_not_mx(empty(0, 1024), b, store.ir)


def test_factors_lie_as_they_are_where_they_can():
    sf = torch.arange(64, dtype=torch.uint8).view(2, 32).view(E8M0)
    words = host.factor_words(sf)
    assert words.shape == (2, 8)
    assert words.data_ptr() == sf.data_ptr()
    short = host.factor_words(torch.full((3, 5, 10), 255, dtype=torch.uint8).view(E8M0)).view(torch.uint8)
    assert short.shape == (15, 12)
    assert (short[:, :10] == 255).all()
    assert not short[:, 10:].any()


def test_factors_whose_rows_are_on_16_bytes_are_shared():
    sf = pad_factors(torch.arange(120, dtype=torch.uint8).view(3, 5, 8).view(E8M0))
    words = host.factor_words(sf)
    assert words.data_ptr() == sf.data_ptr()
    assert torch.equal(words.view(torch.uint8), sf.view(torch.uint8).flatten(0, 1))
    whole = sf.view(torch.uint8).as_strided((3, 5, 16), (80, 16, 1))
    assert not whole[..., 8:].any()


def test_a_word_that_k_ends_in_is_never_shared():
    cut = torch.full((4, 16), 255, dtype=torch.uint8)[:, :6].view(E8M0)  # what follows is the code of NaN
    words = host.factor_words(cut).view(torch.uint8)
    assert (words[:, :6] == 255).all()
    assert not words[:, 6:].any()
