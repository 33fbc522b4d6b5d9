"""Sizes of the planned MoE layer, and the bytes of its rows and weights."""

import math
from dataclasses import dataclass

from envoi.check import expect_int
from envoi.ops.gemm.hopper.time_model import expected_tiles
from envoi.quant.formats import Format, Scheme, format_named

MAX_HOSTS = 1024
NUM_RANKS = (1, 2, 4, 8)  # GPUs of one NVLink domain
MAX_TOPK = 32
MAX_TOKENS = 2**31 - 1  # rows are counted in int32
MAX_WIDTH, MAX_EXPERTS = 2**20, 2**16  # far above any model
WEIGHT_AND_SLOT_BYTES = 8  # sent with each row: its routing weight and its source slot


@dataclass(frozen=True)
class MoeLayer:
    """MoE layer whose experts are spread evenly over the ranks, one GPU each.

    hidden, intermediate: widths of a token, and inside an expert. num_experts: over all ranks.
    num_topk: experts per token. num_tokens: per rank. num_ranks: 1, 2, 4 or 8 of a host. num_hosts: with as many ranks.
    format: a key of `envoi.quant.FORMATS`.

    Raises ValueError for invalid sizes.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_tokens: int
    num_ranks: int = 1
    format: str = "bf16"
    num_hosts: int = 1

    def __post_init__(self) -> None:
        need = max(8, format_named(self.format).group_k)
        for name in ("hidden", "intermediate"):
            size = expect_int(name, getattr(self, name), 1, MAX_WIDTH)
            if size % need:
                raise ValueError(f"{name}: expected a multiple of {need} for format {self.format!r}, got {size}")
        expect_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        expect_int("num_topk", self.num_topk, 1, min(MAX_TOPK, self.num_experts), "a token's experts are distinct")
        expect_int("num_tokens", self.num_tokens, 1, MAX_TOKENS)
        if expect_int("num_ranks", self.num_ranks, 1) not in NUM_RANKS:
            raise ValueError(f"num_ranks: expected 1, 2, 4 or 8 GPUs of one NVLink domain, got {self.num_ranks}")
        expect_int("num_hosts", self.num_hosts, 1, MAX_HOSTS)
        if self.num_experts % self.num_gpus:
            raise ValueError(f"num_experts: expected a multiple of {self.num_gpus} GPUs, got {self.num_experts}")

    @property
    def formats(self) -> Format:
        """Schemes of activations and weights."""
        return format_named(self.format)

    @property
    def num_gpus(self) -> int:
        """Number of ranks of all hosts."""
        return self.num_ranks * self.num_hosts

    @property
    def num_local_experts(self) -> int:
        """Number of experts on one rank."""
        return self.num_experts // self.num_gpus

    @property
    def num_all_tokens(self) -> int:
        """Number of tokens of all ranks."""
        return self.num_tokens * self.num_gpus

    @property
    def num_rows(self) -> int:
        """Rows of a rank's experts if all experts are chosen equally often; equals the rows that the rank sends."""
        return self.num_tokens * self.num_topk

    @property
    def remote_share(self) -> float:
        """Fraction of a rank's rows that other ranks of its host send; between hosts they pass on what came there."""
        return (self.num_ranks - 1) / self.num_ranks

    @property
    def num_remote_rows(self) -> float:
        """Expected rows of this rank that other ranks send."""
        return self.num_rows * self.remote_share

    @property
    def l1_nk(self) -> tuple[int, int]:
        """N and K of the first GEMM: gate and up together."""
        return 2 * self.intermediate, self.hidden

    @property
    def l2_nk(self) -> tuple[int, int]:
        """N and K of the second GEMM."""
        return self.hidden, self.intermediate

    def row_bytes(self, width: int) -> float:
        """Return the bytes of a row of activations with its scale factors."""
        return matrix_bytes(self.formats.activations, 1, width)

    def weight_bytes(self, nk: tuple[int, int]) -> float:
        """Return the bytes of one expert's matrix with its scale factors."""
        return matrix_bytes(self.formats.weights, *nk)


def matrix_bytes(scheme: Scheme | None, rows: int, columns: int) -> float:
    """Return the bytes of a matrix, values and scale factors; None = bf16."""
    if scheme is None:
        return 2.0 * rows * columns
    group = scheme.group_for((rows, columns))
    factors = -(-rows // group[0]) * -(-columns // group[1]) * scheme.sf.itemsize
    return rows * columns * element_bits(scheme) / 8 + factors


def element_bits(scheme: Scheme | None) -> int:
    """Return the bits per value in memory; None = bf16."""
    if scheme is None:
        return 16
    return 4 if scheme.values.itemsize == 1 and not scheme.values.is_floating_point else 8


def rows_per_expert(layer: MoeLayer) -> float:
    """Return the mean of the binomial distribution of an expert's rows."""
    return layer.num_all_tokens * layer.num_topk / layer.num_experts


def active_experts(layer: MoeLayer) -> float:
    """Return the expected number of a rank's experts with at least one row, whose weights are read."""
    return layer.num_local_experts * _any_row(layer)


def taken_tokens(layer: MoeLayer) -> float:
    """Return the expected tokens, from all ranks, with an expert on this rank; as many as all ranks take of its own."""
    elsewhere = layer.num_experts - layer.num_local_experts
    missed = math.comb(elsewhere, layer.num_topk) / math.comb(layer.num_experts, layer.num_topk)
    return layer.num_all_tokens * (1 - missed)


def pulled_tokens(layer: MoeLayer) -> float:
    """Return the expected tokens this rank pulls from peers; with presum also the rows it sends back."""
    return taken_tokens(layer) * layer.remote_share


def tiles_per_expert(layer: MoeLayer, block_m: int) -> float:
    """Return the expected tiles of block_m rows, whole or partial, per expert, by the binomial's mean and variance."""
    mean = rows_per_expert(layer)
    deviation = math.sqrt(mean * (1 - layer.num_topk / layer.num_experts))
    if not deviation:
        return math.ceil(mean / block_m)
    return expected_tiles(mean, deviation, _any_row(layer), block_m)


def _any_row(layer: MoeLayer) -> float:
    return 1 - (1 - layer.num_topk / layer.num_experts) ** layer.num_all_tokens
