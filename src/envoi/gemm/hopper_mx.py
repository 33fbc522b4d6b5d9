"""GEMMs with MXFP4 or MXFP8 weights on Hopper: what the kernel can take, its configs, its launch."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from envoi.epilogue.ir import IR
from envoi.epilogue.library import store
from envoi.epilogue.lower import Lowered, lower
from envoi.epilogue.slots import piece_columns, rows_must_fit, slots
from envoi.gemm import devices, portable, sm90, workspace
from envoi.gemm.config import RESERVED_BYTES, SHARED_BYTES
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.types import Matrix, QuantTensor

NARROW, WIDE = 64, 128  # features of a consumer role, 16 for each of its warps
SPAN = 512  # elements of K whose scale factors come at once
ROW_BYTES = 128  # of weights a stage, at most
MAX_STAGES = 12
TOKEN_TILES = (8, 16, 32, 64, 128)
DEEP_TOKENS = 64  # tiles of more have stages of less of K
MANY_TOKENS = {64: 1.0, 128: 1.64}  # how long a tile takes, measured


@dataclass(frozen=True)
class MxConfig:
    """How the kernel cuts its work: tiles of num_roles * role_m features (1 or 2 roles) and block_y tokens.

    bits: of a weight. tame: as in QuantTensor.
    The rest is what it shares with the other Hopper kernel's: features are the instruction's M side, K isn't cut.
    """

    num_roles: int
    block_y: int
    num_stages: int
    role_m: int = NARROW
    bits: int = 4
    tame: bool = False
    group: int = 8
    swap_ab: bool = True
    split_k: int = 1
    pingpong: bool = False
    turns: int = 1

    @property
    def num_warps(self) -> int:
        """Of a role: each has 16 features."""
        return self.role_m // 16

    @property
    def block_k(self) -> int:
        """Elements of K a stage."""
        return ROW_BYTES * 8 // self.bits if self.block_y <= DEEP_TOKENS else 128

    @property
    def words(self) -> int:
        """Words of 32 bits that a row's weights have in a stage."""
        return self.block_k * self.bits // 32

    @property
    def registers(self) -> int:
        """Of a thread of the second role."""
        return 232 if self.role_m == NARROW else 112

    @property
    def spread_experts(self) -> bool:
        """Vectors over the experts are spread over a role's warps: no, each warp has all."""
        return False

    @property
    def piece(self) -> int:
        """Features that an epilogue gets at once: a role's."""
        return self.role_m

    @property
    def block_x(self) -> int:
        """Features of a tile."""
        return self.num_roles * self.role_m

    @property
    def block_m(self) -> int:
        """Tokens of a tile."""
        return self.block_y

    @property
    def block_n(self) -> int:
        """Features of a tile."""
        return self.block_x

    @property
    def wide_last(self) -> bool:
        """All tiles have the same shape."""
        return False

    @property
    def num_parts(self) -> int:
        """Roles that work on the same tile: all."""
        return self.num_roles

    @property
    def num_sf(self) -> int:
        """Spans whose scale factors there is room for: as many as the stages can belong to."""
        return -(-(self.num_stages - 1) // (SPAN // self.block_k)) + 1

    def __str__(self) -> str:
        """All that kernels differ by: the compiler's cache files them under it."""
        kind = f"mx{self.bits}{' tame' * self.tame}"
        return f"{kind} {self.num_roles}x{self.role_m}x{self.block_y} x{self.num_stages}"


def shared_bytes(config: MxConfig) -> int:
    """Shared memory of a config: weights, tokens, scale factors, and what turns tiles upright."""
    weights, tokens = config.block_x * config.words * 4, config.block_y * config.block_k * 2
    upright = config.block_x * min(config.block_y, 32) * 4
    return config.num_stages * (weights + tokens) + config.num_sf * config.block_x * 16 + upright + RESERVED_BYTES


def fitted(config: MxConfig) -> MxConfig:
    """The config with as many stages as fit."""
    while shared_bytes(config) > SHARED_BYTES:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def supports_mx(a: Matrix, b: Matrix, ir: IR) -> str:
    """Why the kernel can't run this; "" if it can."""
    if 0 in (*a.shape, *b.shape):
        return "a matrix is empty"
    if not (isinstance(b, QuantTensor) and b.sf.dtype == torch.float8_e8m0fnu and b.group == (1, 32)):
        return "the weights' format"
    if b.order != "rows":
        return "the weights' order"
    if isinstance(a, QuantTensor):
        if a.packed or a.sf.dtype != torch.float8_e8m0fnu or a.group != (1, 32):
            return "the tokens' format"
    elif a.dtype != torch.bfloat16:
        return "the tokens' format"
    if rows_must_fit(ir):
        return "whole rows" if b.shape[-2] <= portable.MAX_TILE_N else portable.supports_triton(ir, b.shape[-2])
    return "" if piece_columns(ir) <= NARROW else f"a piece of {piece_columns(ir)} columns"


def choose(
    M: int, N: int, num_groups: int, num_sms: int, code: Lowered | None = None, bits: int = 4, tame: bool = False
) -> MxConfig:
    """The config for so many tokens, features and experts. code: the epilogue, if it is more than a store."""
    tokens = -(-M // max(1, num_groups))
    block_y = tokens_of_a_tile(tokens)
    tiles = max(1, num_groups) * -(-tokens // block_y) * -(-N // NARROW)
    config = MxConfig(2, block_y, MAX_STAGES, bits=bits, tame=tame)
    if tiles <= num_sms:
        config = replace(config, num_roles=1)
    elif tiles // 4 >= 2 * num_sms and block_y <= DEEP_TOKENS and short(code, block_y):
        config = replace(config, role_m=WIDE)
    return fitted(config)


def tokens_of_a_tile(tokens: int) -> int:
    """The tile for so many tokens an expert."""
    if tokens <= DEEP_TOKENS:
        return next(size for size in TOKEN_TILES if size >= tokens)
    return min(MANY_TOKENS, key=lambda size: -(-tokens // size) * MANY_TOKENS[size])


def short(code: Lowered | None, block_y: int) -> bool:
    """Whether an epilogue does with the 96 registers that a thread of a wide role has."""
    return code is None or (not code.partials and (block_y < DEEP_TOKENS or len(code.slots) == 1))


def room_for_tokens(a: Matrix) -> torch.Tensor:
    """bf16 [M, K rounded up to 128]."""
    M, K = a.shape
    return torch.empty(M, -(-K // 128) * 128, dtype=torch.bfloat16, device=a.device)


def widen_tokens(a: Matrix, bits: int, out: torch.Tensor, offsets: torch.Tensor | None = None, rows: int = 8) -> None:
    """Tokens as bf16 in the kernel's order of K for weights of so many bits, those of experts with offsets [E + 1].

    What is launched next may start early: see `wait_for_grid`.
    """
    from envoi.gemm import mx_tokens

    kernels: Any = mx_tokens
    grid, args = tokens_arguments(a, bits, out, offsets, rows)
    kernels.widen_kernel[grid](*args)


def tokens_arguments(
    a: Matrix, bits: int, out: torch.Tensor, offsets: torch.Tensor | None = None, rows: int = 8
) -> tuple[tuple[int, int], tuple]:
    """The grid, and the arguments of the kernel that widens tokens."""
    M, K = a.shape
    values, sf = (a, a) if isinstance(a, torch.Tensor) else (a.values, a.sf.view(torch.uint8))
    values, sf = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, sf))
    return (-(-M // rows), -(-K // 512)), (
        values, sf, out, None if offsets is None else offsets[-1:], M, K, values.stride(0), sf.stride(0),
        out.stride(0), isinstance(a, QuantTensor), bits, rows, out.device.type != "cpu",
    )  # fmt: skip


def factor_words(sf: torch.Tensor) -> torch.Tensor:
    """Weights' scale factors [.., N, K / 32] as int32 [rows, K / 128], rows on 16 bytes: a copy if they aren't so."""
    raw = sf.view(torch.uint8)
    columns = raw.shape[-1]
    if columns % 16 or not raw.is_contiguous() or raw.data_ptr() % 16:
        padded = raw.new_zeros(*raw.shape[:-1], -(-columns // 16) * 16)
        padded[..., :columns] = raw
        raw = padded
    return raw.flatten(0, -2).view(torch.int32)


def run(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    config: MxConfig | None = None, grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs of `envoi.gemm` or, with offsets, `envoi.grouped_gemm`, as a flat list."""
    b = cast(QuantTensor, b)
    M, N = a.shape[0], b.shape[-2]
    num_groups = 0 if offsets is None else b.shape[0]
    tensors, pointers = portable.operand_tensors(ir, operands, num_groups)
    written = portable.empty_slots(ir, slots(ir, out_dtype), M, N, a.device, grouping.to)
    if rows_must_fit(ir):
        acc = torch.empty(M, N, dtype=torch.float32, device=a.device)
        plain = lower(store.ir, torch.float32, "gluon", False, False, frozenset())
        _launch(a, b, offsets, plain, (), [acc], config, grouping)
        portable.finish_rows(acc, ir, out_dtype, tensors, pointers, written, offsets, grouping.behind)
    else:
        code = lower(ir, out_dtype, "gluon", False, False, pointers, sent=grouping.to is not None)
        _launch(a, b, offsets, code, tensors, written, config, grouping)
    return portable.finish_outputs(ir, written, offsets)


def _launch(
    a: Matrix, b: QuantTensor, offsets: torch.Tensor | None, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: MxConfig | None, grouping: Grouping,
) -> None:  # fmt: skip
    from envoi.gemm.kernel_sm90_mx import mx_kernel
    from envoi.gemm.launch import launch

    num_sms = devices.num_sms(a.device)
    num_groups, bits = 0 if offsets is None else b.shape[0], 4 if b.packed else 8
    num_tokens = grouping.likely_rows(a.shape[0])
    config = config or choose(num_tokens, b.shape[-2], num_groups, num_sms, code, bits, b.tame)
    tokens = room_for_tokens(a)
    grid, args = arguments(tokens, b, offsets, code, operands, outputs, config, num_sms, grouping.behind)
    # Nothing may be launched between the two: the GEMM waits for the one in front of it, and only with its tokens.
    widen_tokens(a, config.bits, tokens, offsets)
    launch(mx_kernel, grid, args, {"num_warps": config.num_warps, "launch_pdl": True})


def arguments(
    tokens: torch.Tensor, b: QuantTensor, offsets: torch.Tensor | None, code: Lowered, operands: tuple,
    outputs: list[torch.Tensor], config: MxConfig, num_sms: int, behind: bool = True,
) -> tuple[tuple[int], tuple]:  # fmt: skip
    """The grid, and the kernel's arguments. tokens: as `widen_tokens` makes them."""
    M, (N, K), device = tokens.shape[0], b.shape[-2:], tokens.device
    groups = 0 if offsets is None else b.shape[0]
    tiles = -(-M // config.block_y) * -(-N // config.block_x)
    words = sm90.below_each_other(sm90.tma_ready(b.values).view(torch.int32))
    slots_of_rows = -(-N // NARROW)
    parts = torch.empty(code.partials * slots_of_rows * M, dtype=torch.float32, device=device)
    count = workspace.counters(M + config.block_y, device) if parts.numel() else parts.view(torch.int32)
    return (num_sms if groups else min(tiles, num_sms),), (
        sm90.descriptor(words, config.block_x, config.words), sm90.descriptor(factor_words(b.sf), config.block_x, 4),
        sm90.descriptor(tokens, config.block_y, config.block_k), operands or (0,), sm90.as_stored(outputs),
        offsets,
        parts, count, M, N, K, groups, tiles, config, code,
        (2 if behind else 1) if groups else 0,
        sm90.max_groups(groups, behind),
    )  # fmt: skip
