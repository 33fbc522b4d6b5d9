"""Random MoE layers, and an eager bf16 version of the layer in plain torch."""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import gelu, linear, relu, silu

from envoi.ops.moe import moe, pack
from envoi.types import UNGATED, ExpertWeights, Routing, has_gate
from tests.helpers.accuracy import assert_same_bits, relative_error
from tools.oracles.moe import moe_oracle

MOST, MOST_OF_FEW = 4e-3, 6e-3  # of `judged`: the error against float64; of few numbers


@dataclass
class Layer:
    """Layer's tokens [M, H] bf16, routing, and unpacked weights in the "concat" layout."""

    tokens: torch.Tensor
    routing: Routing
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "swiglu"
    limit: float | None = None
    packed_layout: str | None = None

    def pack(self, format: str = "bf16", first: int = 0, last: int | None = None) -> ExpertWeights:
        """Pack experts first : last in a format."""
        part = slice(first, last)
        return pack(
            self.gate_up[part], self.down[part], format, activation=self.activation, swiglu_limit=self.limit,
            packed_layout=self.packed_layout,
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias[part],
            down_bias=None if self.down_bias is None else self.down_bias[part],
        )  # fmt: skip


def make(
    tokens: int = 60, experts: int = 8, k: int = 3, hidden: int = 256, intermediate: int = 128, seed: int = 0,
    masked: float = 0.1, bias: bool = False, activation: str = "swiglu", limit: float | None = None,
    packed_layout: str | None = None,
) -> Layer:  # fmt: skip
    """Make a layer with normal tokens, uniform routing and a share `masked` of masked slots."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    ids = torch.rand(tokens, experts, generator=source).argsort(1)[:, :k].to(torch.int32)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=source) < masked, -1)
    weights = torch.rand(ids.shape, generator=source)
    rows = 2 * intermediate if has_gate(activation) else intermediate
    return Layer(
        normal(tokens, hidden).bfloat16(), Routing(weights, ids, experts),
        (normal(experts, rows, hidden) / hidden**0.5).bfloat16(),
        (normal(experts, hidden, intermediate) / intermediate**0.5).bfloat16(),
        normal(experts, rows) if bias else None, normal(experts, hidden) if bias else None,
        activation, limit, packed_layout,
    )  # fmt: skip


def with_ids(layer: Layer, ids: torch.Tensor) -> Layer:
    """Return a layer with other experts in its slots."""
    return replace(layer, routing=replace(layer.routing, topk_ids=ids.to(torch.int32)))


def judged(got: torch.Tensor, layer: Layer, packed: ExpertWeights) -> torch.Tensor:
    """Return outputs of bf16 tokens on 4-bit weights, whose error to float64 on the same weights is checked."""
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, want) <= (MOST if got.numel() > 5000 else MOST_OF_FEW)
    return got


def assert_same_bits_each_time(layer: Layer, packed: ExpertWeights) -> None:
    """Assert that a hundred calls give the first one's bits."""
    first = moe(layer.tokens, layer.routing, packed)
    for _ in range(100):
        assert_same_bits(moe(layer.tokens, layer.routing, packed), first)


def assert_replays_repeat(layer: Layer, packed: ExpertWeights) -> None:
    """Assert that a graph of a call gives the call's bits, each time."""
    want = moe(layer.tokens, layer.routing, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moe(layer.tokens, layer.routing, packed)
    for _ in range(3):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)


def assert_others_keep_their_bits(layer: Layer, packed: ExpertWeights) -> None:
    """Assert that tokens' bits don't change with the numbers of other tokens: huge, NaN and infinite ones of 24."""
    clean = moe(layer.tokens, layer.routing, packed)
    layer.tokens[5] *= 1000
    layer.tokens[7, 100], layer.tokens[20, 0] = torch.nan, torch.inf
    got = moe(layer.tokens, layer.routing, packed)
    others = torch.tensor([i for i in range(24) if i not in (5, 7, 20)])
    assert_same_bits(got[others], clean[others])
    assert bool(got[[7, 20]].isnan().any(1).all())


def assert_a_graph_serves(given: Layer, packed: ExpertWeights, layers: list[Layer], want: list[torch.Tensor]) -> None:
    """Assert that a graph captured on `given` gives each layer's output, once its tokens and routing are copied in."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moe(given.tokens, given.routing, packed)
    for layer, expected in zip(layers, want, strict=True):
        given.tokens.copy_(layer.tokens)
        given.routing.topk_ids.copy_(layer.routing.topk_ids)
        given.routing.topk_weights.copy_(layer.routing.topk_weights)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, expected)


def eager_bf16(layer: Layer) -> torch.Tensor:
    """Compute the layer as models' own code does: bf16 between the steps, expert by expert."""
    out = torch.zeros_like(layer.tokens)
    for expert in range(layer.routing.num_experts):
        token, slot = (layer.routing.topk_ids == expert).nonzero(as_tuple=True)
        h = linear(layer.tokens[token], layer.gate_up[expert])
        h = h if layer.gate_up_bias is None else h + layer.gate_up_bias[expert].bfloat16()
        y = linear(_activate(h, layer), layer.down[expert])
        y = y if layer.down_bias is None else y + layer.down_bias[expert].bfloat16()
        out.index_add_(0, token, (y * layer.routing.topk_weights[token, slot, None]).to(out.dtype))
    return out


def _activate(h: torch.Tensor, layer: Layer) -> torch.Tensor:
    if layer.activation in UNGATED:
        return silu(h) if layer.activation == "silu" else relu(h) ** 2
    gate, up = h.chunk(2, dim=-1)
    limit = 7.0 if layer.activation == "swiglu_oai" and layer.limit is None else layer.limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if layer.activation == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if layer.activation.startswith("geglu"):
        return gelu(gate, approximate="tanh" if layer.activation == "geglu_tanh" else "none") * up
    return silu(gate) * up
