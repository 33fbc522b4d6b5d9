"""Cases of `envoi.moe`, all formats, and the MoE layer as a loop in float64 with the formats' roundings.

for each expert, for each of its rows:
    x = tokens, quantised                      exact: the definition says every bit
    h = activation(x @ gate_up.T + bias) * w   known up to an error
    h = bf16 or quantised                      all that may become of it
    y = h @ down.T + w * bias, bf16            all that may become of it
out = sum over slots of y, bf16
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

import envoi
from envoi.ops.moe.choose import has_kernels
from envoi.types import ExpertWeights, QuantTensor, Routing
from tests.fuzz import approx, formats
from tests.fuzz.approx import Approx, Arithmetic, U, between, exact, requantised, silu, wrong
from tests.fuzz.draw import Case, Draw, host
from tests.fuzz.formats import FORMATS, SCHEMES, round_to

BF16 = torch.bfloat16
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Schemes of rows with float32 factors: a GPU multiplies them on FP8 tensor cores, kernels quantise h from bf16.
COARSE = ("fp8_row", "fp8_1x128")
# Few tokens beside MXFP4 weights: a GPU splits each number into two of E4M3, exact but for what is far below the
# largest that shares its power of two. Bits of the largest that may be lost.
SPLIT = 2.0**-16


@dataclass
class Layer:
    """Layer as it is given to Envoi, on the CPU: weights concatenated (gate rows, then up rows) or interleaved."""

    format: str
    tokens: torch.Tensor
    routing: Routing
    gate_up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor] | None
    gate_up_layout: str
    activation: str
    limit: float | None

    @property
    def text(self) -> str:
        """Describe the layer in one line."""
        (E, rows, H), (M, k) = self.gate_up.shape, self.routing.topk_ids.shape
        return (
            f"{self.format}, M {M} k {k} E {E} H {H} I {rows // 2}, {self.activation} limit {self.limit}, bias "
            f"{self.biases is not None}, {self.gate_up_layout}, tokens {self.tokens.dtype}, weights {self.down.dtype}"
        )

    @cached_property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Return gate_up, as it is kept, and down in float64 as the format stores them, and what packing does wrong."""
        return weights_of(self)

    @property
    def kept(self) -> str:
        """Layout in which gate_up is kept."""
        return self.gate_up_layout if self.format in ("bf16", "fp8_row", "fp8_block128") else "interleaved"

    def arranged(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return gate_up, or its bias, as it is kept."""
        return x if self.kept == self.gate_up_layout else interleaved(x, self.gate_up_layout, dim)

    def pack(
        self, device: torch.device | str, first: int = 0, last: int | None = None, at: list[int] | None = None
    ) -> ExpertWeights:
        """Pack experts first : last, or those `at` these numbers."""
        part = slice(first, last) if at is None else at
        gate_up_bias, down_bias = (None, None) if self.biases is None else (x[part].to(device) for x in self.biases)
        return envoi.experts.pack(
            self.gate_up[part].to(device), self.down[part].to(device), self.format, gate_up_bias=gate_up_bias,
            down_bias=down_bias, gate_up_layout=self.gate_up_layout, activation=self.activation,
            swiglu_limit=self.limit,
        )  # fmt: skip


def layer(draw: Draw, most_experts: int = 70) -> Layer:
    """Draw a layer: sizes, routing, weights, options."""
    form = draw.form
    format = form.one(tuple(FORMATS))
    step = {"bf16": 8, "fp8_row": 8, "fp8_block128": 128, "nvfp4": 16}.get(format, 32)
    step = form.one((step, step, 64)) if step < 64 else step
    M = draw.rows(1, draw.most(8, 40, 300), 0.04)
    E = form.size(1, min(most_experts, draw.most(5, 12, 70)))
    k = form.one((1, min(E, 32), form.random.randint(1, min(E, draw.most(3, 8, 16)))))
    hidden, inside = (form.size(step, max(step, draw.most(64, 256, 1024)), step) for _ in range(2))
    tokens = draw.values(
        draw.one(("normal", "normal", "normal", "spread", "whole", "sparse", "zeros", "ties")), M, hidden
    )
    if draw.chance(0.15):
        tokens = draw.poisoned(tokens)
    dtype = form.one(FLOATS)
    gate_up, down = (
        (draw.values(draw.one(("normal", "normal", "spread", "sparse")), *shape) / shape[-1] ** 0.5).to(dtype)
        for shape in ((E, 2 * inside, hidden), (E, hidden, inside))
    )
    if draw.chance(0.05):
        down = draw.poisoned(down)
    biases = (draw.normal(E, 2 * inside), draw.normal(E, hidden)) if form.chance(0.4) else None
    return Layer(
        format, tokens.to(form.one((BF16, BF16, torch.float16))), routing(draw, M, E, k), gate_up, down, biases,
        form.one(("concat", "interleaved")), form.one(("swiglu", "swiglu_oai")), form.one((None, None, 0.5, 7.0)),
    )  # fmt: skip


def routing(draw: Draw, M: int, E: int, k: int) -> Routing:
    """Draw a routing: uniform, few experts, one for all, equal ids within a token, masked slots."""
    ids = torch.stack([draw.uniform(E).argsort()[:k] for _ in range(M)]) if M else torch.zeros(0, k, dtype=torch.long)
    style = draw.one(("uniform", "uniform", "few", "one", "doubled"))
    if style == "few":
        ids = ids % max(1, E // 3)
    elif style == "one":
        ids = torch.full_like(ids, draw.random.randrange(E))
    elif style == "doubled":
        ids = ids[:, :1].expand(M, k).clone()
    ids = ids.masked_fill(draw.uniform(M, k) < draw.one((0.0, 0.0, 0.2, 0.9, 1.0)), -1)
    weights = draw.uniform(M, k) if draw.chance(0.7) else draw.values(draw.one(("normal", "spread", "zeros")), M, k)
    return Routing(
        weights.to(draw.form.one((torch.float32, torch.float32, *FLOATS))),
        ids.to(draw.form.one((torch.int32, torch.int64))),
        E,
    )


def moe(draw: Draw) -> Case:
    """Draw a case of `envoi.moe`."""
    given = layer(draw)
    num_shared = min(draw.form.one((0, 0, 0, 1, 2)), given.routing.num_experts - 1)
    r = replace(given.routing, num_experts=given.routing.num_experts - num_shared)
    r.topk_ids.masked_fill_(r.topk_ids >= r.num_experts, -1)
    M, k = r.topk_ids.shape
    bad = draw.chance(0.04) and M > 0
    if bad:
        r.topk_ids[draw.random.randrange(M), draw.random.randrange(k)] = draw.one((r.num_experts, -2, 2**31 - 1))
    packed = replace(given.pack(draw.device), num_shared=num_shared)
    given.routing = with_shared(r, num_shared)
    tokens, ids, weights = draw.placed(given.tokens), draw.placed(r.topk_ids), draw.placed(r.topk_weights)
    batched = M > 0 and M % 2 == 0 and draw.chance(0.2)
    if batched:
        tokens, ids, weights = (x.contiguous().view(2, M // 2, -1) for x in (tokens, ids, weights))
    kernels = has_kernels(draw.device)

    def judge(got: torch.Tensor) -> str:
        if got.shape != tokens.shape or got.dtype != tokens.dtype:
            return f"output is {got.dtype} {list(got.shape)}, expected {tokens.dtype} {list(tokens.shape)}"
        device = Device(draw.device.type == "cuda", kernels)
        return given.stored[2] or wrong(got.reshape(given.tokens.shape), oracle(given, device), given.tokens.dtype)

    refused = bad and draw.device.type == "cpu"
    text = f"{given.text}, the last {num_shared} shared" if num_shared else given.text
    return Case(text, lambda: envoi.moe(tokens, Routing(weights, ids, r.num_experts), packed), judge, refused)


def with_shared(r: Routing, num_shared: int) -> Routing:
    """Return a routing whose tokens choose the last experts too, with weight 1, after those that they have chosen."""
    if not num_shared:
        return r
    M, N = len(r.topk_ids), r.num_experts
    shared = torch.arange(N, N + num_shared).expand(M, -1)
    ids = torch.where(r.topk_ids >= N, -1, r.topk_ids.long())
    weights = torch.cat((r.topk_weights.float(), torch.ones(M, num_shared)), 1)
    return Routing(weights, torch.cat((ids, shared), 1), N + num_shared)


@dataclass(frozen=True)
class Device:
    """Device of a call, as far as its arithmetic goes.

    kernels: they round h to bf16 before they quantise it in a scheme of `COARSE`; torch doesn't.
    rank_ends: with them, the rows of a token are first summed for each run of experts up to such an end, in bf16.
    results: the scheme of rows before they are summed, None for bf16.
    """

    gpu: bool = False
    kernels: bool = False
    rank_ends: tuple[int, ...] = ()
    results: str | None = None


def interleaved(x: torch.Tensor, layout: str, dim: int) -> torch.Tensor:
    """Return rows or columns in the order gate 0, up 0, gate 1, up 1, .."""
    if layout == "interleaved":
        return x
    half = x.shape[dim] // 2
    order = [part * half + i for i in range(half) for part in (0, 1)]
    return x.index_select(dim, torch.tensor(order, dtype=torch.long))


def weights_of(given: Layer) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return gate_up, as it is kept, and down in float64 as the format stores them, and what packing does wrong.

    Only where two scale factors of an MXFP4 group have equal errors, to rounding, the packed one decides.
    """
    sides = given.arranged(given.gate_up, 1), given.down
    packed = given.pack("cpu")
    found = []
    for x, stored in zip(sides, (packed.gate_up, packed.down), strict=True):
        if FORMATS[given.format][1] is None:
            found.append((round_to(x.double(), BF16), None))
            continue
        assert isinstance(stored, QuantTensor)
        scheme = SCHEMES[FORMATS[given.format][1]]
        group = scheme.group(x.shape)
        decoded = formats.decode(stored.values, stored.sf, group)
        if scheme.name == "nvfp4":
            assert stored.scale is not None
            found.append((formats.weights_nvfp4(x.double()).x, decoded * stored.scale.double()[:, :, None]))
            continue
        if scheme.name != "mxfp4":
            found.append((formats.quantise(x.double(), scheme).x, decoded))
            continue
        wide, narrow, preference = formats.weights_mxfp4(x.double())
        halved = torch.where(preference.abs() < 1e-5, formats.decode_sf(stored.sf) == narrow.sf, preference < 0)
        found.append((torch.where(formats.spread(halved, group, x.shape), narrow.x, wide.x), decoded))
    said = ""
    for name, (want, decoded) in zip(("gate_up", "down"), found, strict=True):
        same = torch.ones(()) if decoded is None else (decoded == want) | (decoded.isnan() & want.isnan())
        if not bool(same.all()):
            said = said or f"packed {name}: {int((~same.bool()).sum())} of {want.numel()} differ"
    return found[0][0], found[1][0], said


def oracle(given: Layer, device: Device) -> Approx:
    """Return the layer's output [M, H], bf16 before the tokens' own dtype."""
    gate_up, down, _ = given.stored
    r = given.routing
    ids, weights = host(r.topk_ids), host(r.topk_weights)
    ids = torch.where((ids < 0) | (ids >= r.num_experts), -1, ids)
    M, k = ids.shape
    H = given.tokens.shape[1]
    scheme = FORMATS[given.format][0]
    tokens = round_to(host(given.tokens), BF16)
    spoiled = torch.isinf(tokens).any(1) if scheme is None else torch.zeros(M, dtype=torch.bool)
    if scheme is not None:
        tokens = formats.quantise(tokens, SCHEMES[scheme]).x
    slots = exact(torch.zeros(M * k, H))
    for expert in range(r.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            biases = None if given.biases is None else (
                given.arranged(given.biases[0].double(), 1)[expert], given.biases[1].double()[expert]
            )  # fmt: skip
            rows = expert_rows(
                tokens[token], weights[token, slot, None], gate_up[expert], down[expert], biases, given, device
            )
            slots.mid[token * k + slot], slots.err[token * k + slot] = rows.mid, rows.err
    out = combined(Approx(slots.mid.view(M, k, H), slots.err.view(M, k, H)), ids, device)
    # A token with an infinity may overflow in other places than float64 does.
    return out.freed((spoiled & (ids >= 0).any(1))[:, None]).rounded(BF16)


def expert_rows(
    x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None, given: Layer, device: Device,
) -> Approx:  # fmt: skip
    """Return the rows [P, H] of one expert, each times its weight [P, 1], rounded to bf16."""
    limit = 7.0 if given.limit is None and given.activation == "swiglu_oai" else given.limit
    scheme = FORMATS[given.format][0]
    split = device.gpu and given.format in ("mxfp4", "mxfp4_mxfp8")
    coarse = split or (device.gpu and scheme in COARSE)
    arithmetic = Arithmetic(device.gpu, coarse, 16 + 3 * (x.shape[1] // 128))
    acc = approx.matmul(x, gate_up, arithmetic, lost(x, x.shape[1]) if split else None)
    if biases is not None:
        acc = acc + exact(biases[0].expand_as(acc.mid))
    half = acc.mid.shape[1] // 2
    gate, up = (acc[:, :half], acc[:, half:]) if given.kept == "concat" else (acc[:, 0::2], acc[:, 1::2])
    if limit is not None:
        limit = float(torch.tensor(limit, dtype=torch.float32))
        gate, up = gate.clamp(None, limit), up.clamp(-limit, limit)
    if given.activation == "swiglu_oai":
        h = (up + exact(torch.ones_like(up.mid))) * silu(gate, 1.702)
    else:
        h = silu(gate) * up
    h = h * exact(weight.expand_as(h.mid))
    if scheme is None or (device.kernels and scheme in COARSE):
        h = h.rounded(BF16)
    if scheme is not None:
        h = requantised(h, SCHEMES[scheme])
    y = approx.matmul(h.mid, down, arithmetic, h.err + lost(h.mid, 32) if split else h.err)
    if biases is not None:
        y = y + exact(weight.expand_as(y.mid)) * exact(biases[1].expand_as(y.mid))
    rounded = y.rounded(BF16)
    if device.results is None:
        return rounded
    ends = [*y.ends(), *rounded.ends()]  # kernels may round to bf16 first
    either = between(torch.stack(ends).amin(0), torch.stack(ends).amax(0)).freed(rounded.err.isinf() | y.err.isinf())
    return requantised(either, SCHEMES[device.results])


def lost(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return what a split into two E4M3 numbers may lose of x [P, C] where `columns` share a power of two."""
    group = (1, max(columns, 1))
    return formats.spread(formats.group_max(x.abs(), group), group, x.shape) * SPLIT


def combined(rows: Approx, ids: torch.Tensor, device: Device) -> Approx:
    """Sum rows [M, k, H] over the slots; with rank ends over each rank's slots first, rounded to bf16."""
    if not device.rank_ends:
        return _summed(rows)
    owner = torch.searchsorted(torch.tensor(device.rank_ends), ids, right=True)
    parts = []
    for rank in range(len(device.rank_ends)):
        here = ((owner == rank) & (ids >= 0))[..., None]
        mine = Approx(torch.where(here, rows.mid, 0.0), torch.where(here, rows.err, 0.0))
        parts.append(_summed(mine).rounded(BF16))
    return _summed(Approx(torch.stack([p.mid for p in parts], 1), torch.stack([p.err for p in parts], 1)))


def _summed(rows: Approx) -> Approx:
    """Sum over the second dimension; one row alone is exact."""
    several = (rows.mid != 0).sum(1) > 1
    rounding = rows.mid.shape[1] * U * torch.where(several, rows.mid.abs().sum(1), 0.0)
    return approx.approx(rows.mid.sum(1), rows.err.sum(1) + rounding)
