"""Humming, DeepGEMM, FlashInfer, routers and top-k operators: stand-ins that compute from the arguments they get."""

import sys
import types
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites import indexer, moe, moe_peers, peers, router
from bench.suites.peer_flashinfer import up_first
from envoi.quant import dequantize
from envoi.quant.formats import SCHEMES
from envoi.tune.timing import Clock
from envoi.types import QuantTensor
from tools.kernel_cases.router import rule_of
from tools.oracles.indexer_workloads import one

from .test_moe_peers import CPU, VALUES, install, install_operators, widen


def layer_of(format: str, hidden: int = 256, intermediate: int = 128, tokens: int = 9):
    shape = MoeShape(hidden, intermediate, 4, 2, tokens, format)
    return shape, moe.make_layer(shape, CPU)


def made(name: str, shape: MoeShape, layer):
    return moe_peers.candidates(shape, layer, moe._oracle)[name]()


# Humming


class Schema:
    """Weights of a kind; a stand-in of Humming's: the weights in float64 are what its product multiplies with."""

    weight_scale_key = "weight_scale_inv"

    def __init__(self, weight_block_size=None):
        self.block = weight_block_size

    def infer_shape(self, tensors):
        n, k = tensors["weight"].shape[-2:]
        return n, k * (1 if self.block else 2), None, False

    def convert_humming(self, tensors, shape_n_stacks, shape_k_stacks, param_dtype, num_experts):
        assert (len(shape_n_stacks), len(shape_k_stacks), param_dtype, num_experts) == (1, 1, torch.bfloat16, 4)
        if self.block:
            return self, {"weight": widen(tensors["weight"], tensors[self.weight_scale_key])}
        values = VALUES[torch.stack((tensors["weight"] & 15, tensors["weight"] >> 4), -1).flatten(2).long()]
        factors = tensors["weight_scale"].double().sub(127).exp2()
        assert factors.min() > 2.0**-30, "a factor of the padding would widen an expert's range"
        return self, {"weight": values * factors.repeat_interleave(32, 2)}


def transform(tensors, n, k, schema, inputs, num_experts, has_bias, torch_dtype):
    assert (n % 128, k % 128, has_bias) == (0, 0, False)
    mode = types.SimpleNamespace(has_group_scale=inputs is not None, has_secondary_scale=False)
    return types.SimpleNamespace(shape_n=n, pad_shape_n=0, input_quant_mode=mode, fp8=inputs is not None), tensors


def process(config, inputs, activation_type="none", activation_impl=None):
    x = inputs.double()
    if activation_type != "none":
        assert activation_impl == "(a / (1.f + expf(-a))) * b"
        gate, up = x.chunk(2, -1) if activation_type == "binary_split" else (x[:, 0::2], x[:, 1::2])
        x = functional.silu(gate) * up
    return x, (torch.ones(1) if config.fp8 else None), None


def forward(config, inputs, weight, outputs, sorted_ids, expert_ids, num_tokens_padded, top_k, valid_shape_m, **rest):
    assert (rest["input_scale"] is None) == (not config.fp8) and rest["input_scale_2"] is None
    assert set(rest) >= {"locks", "compute_config", "tuning_config"}
    block = 8 if config.shape_n > 256 else 16
    for at in range(0, int(num_tokens_padded), block):
        mine = sorted_ids[at : at + block].long()
        mine = mine[mine < valid_shape_m]
        outputs[mine] = (inputs[mine // top_k] @ weight[int(expert_ids[at // block])].T).to(outputs.dtype)


def install_humming(monkeypatch):
    indexed = types.SimpleNamespace(value="indexed")
    block = lambda layer_config, **how: [(0, 1 << 30, {"block_shape": [8 if layer_config.shape_n > 256 else 16]})]  # noqa: E731
    install(
        monkeypatch,
        humming__schema__fp8={"Fp8WeightSchema": Schema}, humming__schema__mxfp4={"Mxfp4WeightSchema": Schema},
        humming__transform={"prepare_and_transform_humming_tensors": transform},
        humming__tune={"get_heuristics_config": block},
        humming__config={"GemmType": types.SimpleNamespace(INDEXED=indexed)},
        humming__forward={"may_process_input": process, "humming_forward": forward},
        vllm__model_executor__layers__fused_moe__moe_fused_mul_sum={
            "moe_fused_mul_sum": lambda rows, weights, topk_ids: (rows.double() * weights[:, :, None]).sum(1).bfloat16()
        },
    )  # fmt: skip
    sys.modules["humming.schema"].HummingInputSchema = types.SimpleNamespace
    install_operators(monkeypatch)


@pytest.mark.parametrize(
    ("format", "name", "hidden", "intermediate"),
    [("fp8_block128", "humming_w8a8", 256, 128), ("mxfp4", "humming_w4a16", 256, 128),
     ("mxfp4", "humming_w4a16", 320, 96), ("mxfp4_mxfp8", "humming_w4a8", 320, 96)],
)  # fmt: skip
def test_humming_computes_the_layer(format, name, hidden, intermediate, monkeypatch):
    install_humming(monkeypatch)
    shape, layer = layer_of(format, hidden, intermediate)
    run = made(name, shape, layer)
    assert run().shape == layer.tokens.shape
    assert moe.errors(layer, run(), run())["ours"] < (6e-2 if "fp8" in format else 1e-2)


# vLLM's DeepGEMM


def permute(values, sf, ids, num_experts, expert_map, meta, use_psum_layout):
    assert expert_map is None and meta is None and use_psum_layout
    rows = torch.zeros(128 * num_experts, values.shape[1], dtype=torch.float64)
    places, ends, at = torch.zeros(ids.shape, dtype=torch.long), [], 0
    for expert in range(num_experts):
        at = -(-at // 128) * 128
        for token, slot in (ids == expert).nonzero().tolist():
            rows[at] = values[token].double() * sf[token].double().repeat_interleave(128)
            places[token, slot], at = at, at + 1
        ends.append(at)
    return rows, torch.ones(1), torch.tensor(ends, dtype=torch.int32), places, 128


def grouped(rows, weight, out, ends, use_psum_layout):
    start = 0
    for expert, end in enumerate(ends.tolist()):
        wide = widen(weight[0][expert : expert + 1], weight[1][expert : expert + 1])[0]
        out[start:end] = (rows[0][start:end].double() @ wide.T).to(out.dtype)
        start = -(-end // 128) * 128


def activate(h, use_ue8m0, expert_ends, expert_alignment):
    assert (use_ue8m0, expert_alignment, expert_ends.dtype) == (False, 128, torch.int32)
    gate, up = h.double().chunk(2, -1)
    return functional.silu(gate) * up, torch.ones(1)


def unpermute(rows, ids, weights, places, expert_map, out):
    out.copy_((rows.double()[places] * weights[:, :, None]).sum(1))


def cast(x, group):
    quantised = x.float().view(len(x), -1, group)
    sf = quantised.abs().amax(-1) / 448
    return (quantised / sf[..., None]).to(torch.float8_e4m3fn).flatten(1), sf


def test_deepgemm_experts_compute_the_layer(monkeypatch):
    install(
        monkeypatch,
        vllm__model_executor__layers__fused_moe__deep_gemm_utils={
            "deepgemm_moe_permute": permute, "deepgemm_unpermute_and_reduce": unpermute
        },
        vllm__model_executor__layers__quantization__utils__fp8_utils={
            "per_token_group_quant_fp8": cast, "silu_mul_per_token_group_quant_fp8_colmajor": activate
        },
        vllm__utils__deep_gemm={
            "m_grouped_fp8_gemm_nt_contiguous": grouped, "mk_alignment_scope": lambda align: nullcontext()
        },
    )  # fmt: skip
    shape, layer = layer_of("fp8_block128", tokens=128)
    run = made("vllm_deepgemm", shape, layer)
    assert moe.errors(layer, run(), run())["ours"] < 6e-2


# FlashInfer


def cutlass(monkeypatch, widened):
    """Install a stand-in that multiplies with what `widened` makes of weights; its rows are up, then gate."""

    def run(tokens, ids, weights, gate_up, down, dtype, scales, **how):
        first, second = widened(gate_up, down, scales, **how)
        out = torch.zeros(tokens.shape, dtype=torch.float64)
        for token, slot in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1])).tolist():
            up, gate = (tokens[token].double() @ first[ids[token, slot]].T).chunk(2)
            out[token] += weights[token, slot] * ((functional.silu(gate) * up) @ second[ids[token, slot]].T)
        return [out.to(dtype)]

    names = {
        "cutlass_fused_moe": run,
        "interleave_moe_weights_for_sm90_mixed_gemm": lambda weight, kind: weight,
        "interleave_moe_scales_for_sm90_mixed_gemm": lambda scales, group: scales,
    }
    install(monkeypatch, flashinfer={"autotune": lambda on: nullcontext()}, flashinfer__fused_moe=names)


def of_bf16(gate_up, down, scales, **how):
    assert not scales and not how
    return gate_up.double(), down.double()


def of_blocks(gate_up, down, scales, **how):
    assert how == {"use_deepseek_fp8_block_scale": True}
    return widen(gate_up, scales[0]), widen(down, scales[1])


def of_mxfp4(gate_up, down, scales, **how):
    assert how == {"use_w4_group_scaling": True}
    group = SCHEMES["mxfp4"].group
    return tuple(
        dequantize(QuantTensor(w, s.view(torch.float8_e8m0fnu), group), torch.float64)
        for w, s in zip((gate_up, down), scales, strict=True)
    )


@pytest.mark.parametrize(
    ("format", "widened", "hidden", "intermediate"),
    [("bf16", of_bf16, 256, 128), ("fp8_block128", of_blocks, 256, 128), ("mxfp4", of_mxfp4, 320, 96)],
)
def test_flashinfer_computes_the_layer(format, widened, hidden, intermediate, monkeypatch):
    cutlass(monkeypatch, widened)
    shape, layer = layer_of(format, hidden, intermediate)
    run = made("flashinfer", shape, layer)
    assert run().shape == layer.tokens.shape
    assert moe.errors(layer, run(), run())["ours"] < (6e-2 if "fp8" in format else 1e-2)


def test_ups_come_first():
    assert up_first(torch.arange(4.0).view(1, 4, 1)).flatten().tolist() == [2, 3, 0, 1]


# Routers


def softmax(weights, ids, rows, logits, renormalize, bias, padding):
    assert renormalize and bias is None and padding is None
    found = logits.float().softmax(-1).topk(weights.shape[1])
    weights.copy_(found.values / found.values.sum(1, keepdim=True))
    ids.copy_(found.indices)


def by_groups(logits, num_groups, kept, k, scale, bias):
    scores = logits.sigmoid()
    keys = (scores + bias).view(len(logits), num_groups, -1)
    worst = keys.topk(2).values.sum(-1).argsort(descending=True)[:, kept:]
    keys = keys.scatter(1, worst[..., None].expand(-1, -1, keys.shape[-1]), -torch.inf).flatten(1)
    ids = keys.topk(k).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True) * scale, ids.int()


def grouped_topk(logits, num_groups, kept, k, renormalize, scale, bias, scoring):
    assert renormalize and scoring == 1 and logits.dtype == torch.float32
    return by_groups(logits, num_groups, kept, k, scale, bias)


def topk_deepseek(logits, bias, num_groups, kept, k, scale, weights, ids):
    for out, found in zip((weights, ids), by_groups(logits, num_groups, kept, k, scale, bias), strict=True):
        out.copy_(found)


BOTH = {"vllm_router", "flashinfer_router"}


@pytest.fixture
def routers(monkeypatch):
    install_operators(monkeypatch)
    torch.ops._moe_C.__dict__.update(topk_softmax=softmax, grouped_topk=grouped_topk)
    install(
        monkeypatch, flashinfer__fused_moe={"fused_topk_deepseek": topk_deepseek},
        flashinfer__gemm={"mm_M1_16_K7168_N256": lambda a, b, out: out.copy_(a.float() @ b.float())},
    )  # fmt: skip
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))


@pytest.mark.parametrize(
    ("rule", "m", "k", "names"),
    [("softmax", 16, 128, {"vllm_router"}), ("deepseek-v3", 16, 7168, BOTH), ("deepseek-v3", 17, 256, BOTH),
     ("kimi-k2", 16, 256, BOTH), ("gpt-oss-20b", 16, 128, set())],
)  # fmt: skip
def test_routers_choose_what_the_rule_says(rule, m, k, names, routers):
    n = {"deepseek-v3": 256, "kimi-k2": 384}.get(rule, 32)
    shape = router.RouterShape(m, n, k, 8, rule, "bf16")
    found, biases = rule_of(rule)
    x = router.make_inputs(shape, biases, CPU, 0)
    made = {}
    for name, make in router._peers(shape, found, x).items():
        try:
            made[name] = make()
        except ValueError:
            continue
    assert set(made) == names


def test_a_wrong_router_is_not_timed(routers):
    torch.ops._moe_C.topk_softmax = lambda weights, ids, *rest: (weights.fill_(0.5), ids.fill_(0))
    shape = router.RouterShape(16, 32, 128, 2, "softmax", "bf16")
    rule, biases = rule_of("softmax")
    with pytest.raises(RuntimeError, match="differs from float64's"):
        router._peers(shape, rule, router.make_inputs(shape, biases, CPU, 0))["vllm_router"]()


# Top-k


class Ops:
    """Scores and top-k operators; rotate: slots by which the positions are moved, which makes them wrong."""

    def __init__(self, rotate: int = 0):
        self.rotate = rotate

    def get_paged_mqa_logits_metadata(self, lengths, page_size, sms):
        assert lengths.dim() == 2 and page_size == 64
        return "plan"

    def fp8_fp4_paged_mqa_logits(self, q, cache, weights, lengths, table, plan, width):
        assert plan == "plan" and q[1] is None and q[0].shape[1] == 1 and width == 64 * table.shape[1]
        out = torch.full((len(table), width), torch.nan)
        for row, length in enumerate(lengths.flatten().tolist()):
            pages = table[row, : -(-length // 64)].long()
            values, scales = indexer.unpack_pages(cache.view(torch.int8), pages)
            found = indexer.scores64(q[0][row, 0], values[:length], scales[:length], weights[row])
            out[row, :length] = found.float()
        return out

    def top(self, scores, lengths, chosen, workspace, k, longest):
        assert longest == int(lengths.max()) and workspace.dtype == torch.uint8
        chosen.fill_(-1)
        for row, length in enumerate(lengths.tolist()):
            found = scores[row, :length].topk(min(k, length)).indices.flip(0)
            chosen[row, : len(found)] = ((found + self.rotate) % length).int()


@pytest.mark.parametrize("select", ["torch_topk", "cooperative_topk", "persistent_topk"])
def test_the_best_positions_become_slots(select, monkeypatch):
    ops = Ops()
    install_operators(monkeypatch)
    torch.ops._C.__dict__.update(cooperative_topk=ops.top, persistent_topk=ops.top)
    install(
        monkeypatch, vllm__third_party__deep_gemm={name: getattr(ops, name) for name in dir(Ops) if "paged" in name}
    )
    monkeypatch.setattr(peers, "num_sms", lambda device: 132)
    x = indexer.make_inputs(one((2500, 70)), CPU)
    run = indexer._peer(x, select, Clock(CPU, 1))
    assert indexer.missed(x, indexer.to_slots(x, run())) < 1e-2
    if select != "torch_topk":
        ops.rotate = 500
        with pytest.raises(RuntimeError, match="misses"):
            indexer._peer(x, select, Clock(CPU, 1))
