"""Other libraries' MoE layers: how their operators are called, by stand-ins that compute, and what is refused."""

import sys
import types

import pytest
import torch
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites import cases, measure, moe, moe_peers
from bench.trial import Bench
from envoi.quant import dequantize, quantize
from envoi.tune.timing import Clock

from .test_suites import CPU, ROOF

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E2M1_ID = 12345


def layer_of(format: str, hidden: int = 256, intermediate: int = 128, tokens: int = 9):
    shape = MoeShape(hidden, intermediate, 4, 2, tokens, format)
    return shape, moe.make_layer(shape, CPU)


def install(monkeypatch, **modules) -> None:
    """Install modules with these contents; "__" in a name stands for a dot."""
    for name, contents in modules.items():
        path = name.replace("__", ".")
        parts = path.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(path)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, path, module)


def test_peers_are_those_of_the_format():
    blocks = ["vllm_triton", "humming_w8a8", "flashinfer"]
    of_mxfp4 = ["vllm_marlin", "triton_kernels", "humming_w4a16", "flashinfer"]
    for format, names in (("bf16", ["vllm_triton", "flashinfer"]), ("fp8_block128", blocks), ("fp8_row", []),
                          ("mxfp4", of_mxfp4), ("mxfp4_mxfp8", ["humming_w4a8"])):  # fmt: skip
        shape = MoeShape(256, 128, 4, 2, 9, format)
        assert list(moe_peers.candidates(shape, None, None)) == names
    many = MoeShape(256, 128, 4, 2, 128, "fp8_block128")
    assert "vllm_deepgemm" in moe_peers.candidates(many, None, None)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4", "mxfp4_mxfp8"])
def test_a_library_that_is_not_installed_is_named(format):
    shape, layer = layer_of(format)
    for name, make in moe_peers.candidates(shape, layer, moe._oracle).items():
        with pytest.raises(ModuleNotFoundError, match=name.partition("_")[0]):
            make()


def test_the_decode_cases_are_there():
    names = {case.name for case in cases("moe") if case.on_cuda}
    assert {f"2880/2880/32/4 mxfp4 tokens={m}" for m in (1, 16, 64, 512, 4096)} < names
    assert {f"2880/2880/128/4 mxfp4 tokens={m}" for m in (16, 256)} < names
    formats = ("bf16", "fp8_block128")
    assert {f"2048/768/128/8 {format} tokens={m}" for format in formats for m in (1, 16, 64)} < names


# vLLM's Triton kernel


def fused_experts(x, w1, w2, weights, ids, quant_config=None):
    out = torch.zeros(x.shape, dtype=torch.float64)
    if quant_config is not None:
        assert quant_config["block_shape"] == [128, 128]
        w1, w2 = (widen(w, quant_config[f"w{i}_scale"]) for i, w in ((1, w1), (2, w2)))
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (x[token].double() @ w1[expert].double().T).chunk(2)
            out[token] += weight * ((functional.silu(gate) * up) @ w2[expert].double().T)
    return out.to(x.dtype)


def widen(values, sf):
    return values.double() * sf.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_vllm_gets_weights_of_the_format(format, monkeypatch):
    install(monkeypatch, vllm__model_executor__layers__fused_moe__fused_moe={"fused_experts": fused_experts},
            vllm__model_executor__layers__fused_moe__config={"fp8_w8a8_moe_quant_config": dict})  # fmt: skip
    shape, layer = layer_of(format)
    run = moe_peers.candidates(shape, layer, moe._oracle)["vllm_triton"]()
    assert run().shape == layer.tokens.shape


def test_a_wrong_peer_is_not_timed(monkeypatch):
    def wrong(*args, **options):
        return fused_experts(*args, **options).roll(1, dims=0)

    install(monkeypatch, vllm__model_executor__layers__fused_moe__fused_moe={"fused_experts": wrong})
    shape, layer = layer_of("bf16")
    with pytest.raises(RuntimeError, match="its result differs from float64's by 1"):
        moe_peers.candidates(shape, layer, moe._oracle)["vllm_triton"]()


# vLLM's Marlin


def marlin_positions(num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row n and the column k of nibble `place` of Marlin's words, in their order: [K / 16, 2 N, 8] each."""
    words = torch.arange(2 * num_rows)
    tile, rest = words // 128, words % 128
    thread, j = rest // 4, rest % 4
    column, t = thread // 4, thread % 4
    place = torch.arange(8)
    b, block, h = place // 4, place // 2 % 2, place % 2
    n = 64 * tile[:, None] + 16 * j[:, None] + 8 * block + column[:, None]
    k = 8 * h + 2 * t[:, None] + b
    k_tiles = torch.arange(num_columns // 16)[:, None, None]
    return n.expand(len(k_tiles), -1, -1), 16 * k_tiles + k


def marlin_matrix(words: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Return the float64 matrix [N, K] of Marlin's words [K / 16, 2 N] and factors [K / 32, N]."""
    num_rows, num_columns = words.shape[1] // 2, 16 * words.shape[0]
    codes = (words[..., None].long() >> (4 * torch.arange(8))) & 15
    n, k = marlin_positions(num_rows, num_columns)
    matrix = torch.zeros(num_rows, num_columns, dtype=torch.float64)
    matrix[n, k] = VALUES[codes]
    factors = torch.zeros(num_columns // 32, num_rows, dtype=torch.float64)
    factors[:, marlin_factor_order(num_rows)] = sf.view(torch.uint8).double().sub(127).exp2()
    return matrix * factors.T.repeat_interleave(32, 1)


def marlin_factor_order(num_rows: int) -> torch.Tensor:
    """Return the row whose factor stands at each place of a line."""
    places = torch.arange(num_rows)
    line, rest = places // 64, places % 64
    swapped = rest - rest % 4 + torch.tensor([0, 2, 1, 3])[rest % 4]
    return 64 * line + swapped % 8 * 8 + swapped // 8


def align(ids, num_experts, block, slots, experts, total, expert_map):
    assert expert_map is None
    slots.fill_(ids.numel())
    at = 0
    for expert in range(num_experts):
        mine = (ids.flatten() == expert).nonzero().flatten()
        slots[at : at + len(mine)] = mine.to(torch.int32)
        blocks = -(-len(mine) // block)
        experts[at // block : at // block + blocks] = expert
        at += blocks * block
    total.fill_(at)


def marlin_gemm(x, out, w, bias, sf, *rest):
    none, (workspace, slots, experts, total, weights, block, top_k, weighted, kind, m, n, k) = rest[:3], rest[3:15]
    assert not any(value is not None for value in none)
    assert (kind, rest[15:]) == (E2M1_ID, (False, True, False, -1, -1, -1))
    assert ((m, k), out.shape[1]) == (x.shape, n)
    assert out.shape[0] == m * top_k
    assert workspace.dtype == torch.int32
    for at in range(0, int(total), block):
        mine = slots[at : at + block].long()
        mine = mine[mine < m * top_k]
        expert = int(experts[at // block])
        rows = x[mine // top_k].double() @ marlin_matrix(w[expert], sf[expert]).T
        out[mine] = (rows * weights.flatten()[mine, None].double() if weighted else rows).to(out.dtype)
    return out


def install_operators(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    monkeypatch.setitem(sys.modules, "vllm._moe_C_stable_libtorch", types.ModuleType("vllm._moe_C_stable_libtorch"))
    install(monkeypatch, vllm={})
    operators = {
        "_moe_C": {"moe_align_block_size": align, "moe_wna16_marlin_gemm": marlin_gemm,
                   "moe_sum": lambda rows, out: out.copy_(rows.float().sum(1))},
        "_C": {"silu_and_mul": silu_and_mul},
    }  # fmt: skip
    for name, found in operators.items():
        monkeypatch.setattr(torch.ops, name, types.SimpleNamespace(**found), raising=False)


def silu_and_mul(out, x):
    gate, up = x.float().chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (320, 96)])
def test_marlin_computes_the_layer(hidden, intermediate, monkeypatch):
    kinds = types.SimpleNamespace(float4_e2m1f=types.SimpleNamespace(id=E2M1_ID))
    install(monkeypatch, vllm__scalar_type={"scalar_types": kinds})
    install_operators(monkeypatch)
    shape, layer = layer_of("mxfp4", hidden, intermediate)
    run = moe_peers.candidates(shape, layer, moe._oracle)["vllm_marlin"]()
    error = moe.errors(layer, run(), run())["ours"]
    assert error < 1e-2


def test_marlin_weights_are_the_layers_own():
    x = quantize(torch.randn(128, 64), "mxfp4")
    words, sf = moe_peers.marlin_values(x.values), moe_peers.marlin_factors(x.sf.view(torch.uint8))
    torch.testing.assert_close(marlin_matrix(words, sf), dequantize(x, torch.float64), rtol=0, atol=0)


def test_tiles_are_as_low_as_the_rows_of_an_expert():
    found = [moe_peers.marlin_block(slots, 32) for slots in (4, 64, 256, 512, 1000, 1 << 20)]
    assert found == [8, 8, 16, 32, 48, 64]


def test_a_peer_is_measured_beside_the_others(monkeypatch):
    install(monkeypatch, vllm={"__version__": "0.20.2"},
            vllm__model_executor__layers__fused_moe__fused_moe={"fused_experts": fused_experts})  # fmt: skip
    monkeypatch.setattr(Bench, "on_gpu", property(lambda bench: True))
    case = next(case for case in cases("moe") if case.on_cpu and case.name.endswith("bf16 tokens=64"))
    trial = measure(case, Bench(Clock(CPU, 1), ROOF))
    assert set(trial.baselines) == {"eager", "torch_grouped", "interleaved", "vllm_triton"}
    assert trial.details == {"vllm": "0.20.2"}


def test_bits_of_the_chosen_experts():
    ids = torch.tensor([[0, 31], [32, 39], [5, 5]], dtype=torch.int32)
    want = [[1 + 2**31, 0], [0, 1 + 2**7], [2**5, 0]]
    assert moe_peers.bits_of(ids, 40).tolist() == want
