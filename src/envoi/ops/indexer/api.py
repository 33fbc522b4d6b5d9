"""Public functions `envoi.indexer_topk`, `indexer_blocks` and `indexer_topk_in_blocks`: check, call the operator."""

import warnings
from typing import Literal, overload

import torch
from torch._subclasses.fake_tensor import FakeTensor

from envoi.check import expect_bool, expect_choice, expect_int, expect_tensor
from envoi.ops.indexer.certificate import has_kernels
from envoi.ops.indexer.layout import BYTES_PER_TOKEN, FP4_BYTES_PER_TOKEN, HEAD_DIM, PAGE_SIZE, is_fp4
from envoi.ops.indexer.select import orders_for, run, run_blocks, run_in_blocks
from envoi.runtime.custom_op import operator
from envoi.runtime.prepared import exactly, prepared

MOST_HEADS = 64  # products of a tile with more wouldn't fit the registers
MOST_K = 2048  # what a program of selection puts in order in shared memory
MOST_BLOCK_TOKENS = 1 << 20  # of a row's blocks
MODES = ("fast", "exact")
ORDERS = ("score", "any", "position")
OUTPUTS = ("slots", "positions")
BLOCKS = (8, 16, 32, 64, 128)


def _given(
    q, k_cache, weights, seq_lens, block_table, k=2048, mode="fast", next_n=1, *, output="slots", order="score",
    return_errors=False, ordered=None,
):  # fmt: skip
    orders = orders_for(q.device, q.shape[1]) if mode == "exact" and has_kernels(q.shape[1], k) else None
    constants = exactly(k), mode, exactly(next_n), output, order, exactly(return_errors), exactly(ordered)
    return constants, (q, k_cache, weights, seq_lens, block_table, orders)


@overload
def indexer_topk(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int = ..., mode: str = ..., next_n: int = ..., *, output: str = ..., order: str = ...,
    return_errors: Literal[False] = ..., out: torch.Tensor | None = ..., workspace: torch.Tensor | None = ...,
    num_sms: int | None = ..., ordered: bool | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def indexer_topk(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int = ..., mode: str = ..., next_n: int = ..., *, output: str = ..., order: str = ..., return_errors: bool,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = ..., workspace: torch.Tensor | None = ...,
    num_sms: int | None = ..., ordered: bool | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@prepared(_given)
def indexer_topk(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    k: int = 2048,
    mode: str = "fast",
    next_n: int = 1,
    *,
    output: str = "slots",
    order: str = "score",
    return_errors: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    workspace: torch.Tensor | None = None,
    num_sms: int | None = None,
    ordered: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Choose the k tokens of the cache that each query row scores highest: [B * next_n, k] int32, -1 after the last.

    q [B * next_n, H, 128] float8_e4m3fn without scales, H from 1 to 64; the rows of a request are consecutive.
    k_cache [num_pages, 64, 1, 132] int8 or uint8: values in E4M3 and float32 scales, laid out as
        `envoi.ops.indexer.layout` says; or, of keys in FP4, [num_pages, 64, 1, 68]: values in E2M1 and a UE8M0 factor
        for each 32. On Hopper a value in FP4 that is less than 2^-23 of its key's largest may count as zero.
    weights [B * next_n, H] float32, of any sign.
    seq_lens [B] int32: tokens of each request, its next_n newest included: row n sees the first seq_lens - next_n + 1
        + n. Where a key stands for several tokens, lengths are in keys, and each query is a request, next_n = 1.
    block_table [B, P] int32: pages of each request; columns past ceil(seq_lens / 64) are never read.
    k: 1 to 2048. next_n: query rows of each request: a few with speculative decoding, thousands in a prefill.
    mode "fast": scores to rounding, selection exact for them, the lower position wins a tie, NaN never beats a number.
        "exact": the bits and the order of the PyTorch definition on the same device, in which NaN beats numbers.
    output: "slots" of the cache (page * 64 + place) or "positions" in the sequence.
    order: "score", best first, "position", ascending positions, or "any", whichever takes least time. The set and what
        wins a tie are the same, and so is the order in every run. Unless "score", rows of up to k tokens aren't scored.
    return_errors: also an int32 [B * next_n] of 0, or 1 for a length that is negative or longer than the table, or 2
        for a page outside the cache. Such a row is -1 throughout, and nothing outside the cache is read.
    out, workspace, num_sms: as in `envoi.gemm`.
    ordered: deprecated: True is order="score", False is order="position"; it warns.

    Scores of some rows at a time are in scratch memory: 128 MiB at most, or one row's if they are more.
    The host never waits for the device, and a CUDA graph may read other lengths at each replay. But without a
    certificate of the order in which the GPU's torch adds up, the exact mode uses torch's operators row by row, and
    gives an UncertifiedWarning once: `envoi indexer certify` makes one for this GPU, torch and cuBLAS. So it does for
    other numbers of heads than 32 and 64, and for k up to 32.

    Raises ValueError for wrong dtypes, shapes, devices, k, H, page size; on CPUs, and where the exact mode uses
    torch's operators, also for the errors of return_errors, and there RuntimeError while a CUDA graph is captured.
    Source of the definition: dsa_topk_indexer_fp8_h64_d128_topk2048_ps64 of FlashInfer-Bench.
    """
    _check(q, k_cache, weights, seq_lens, block_table, k, next_n, return_errors)
    _check_choices(k_cache, mode, output, order)
    if ordered is not None:
        expect_bool("ordered", ordered)
        given, order = order, "score" if ordered else "position"
        if given not in ("score", order):
            raise ValueError(f"order: expected none beside ordered={ordered}, got {given!r}")
        warnings.warn(f'ordered={ordered} is order="{order}" now', DeprecationWarning, stacklevel=3)
    tensors = q, k_cache, weights, seq_lens, block_table
    found, errors = _indexer_topk(*tensors, k, mode, next_n, output == "slots", order)
    return (found, errors) if return_errors else found


def indexer_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    k: int = 2048,
    block: int = 8,
    next_n: int = 1,
    *,
    return_errors: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Choose k blocks of neighbouring tokens by their best token's score: [B * next_n, k] int32, ascending, then -1.

    Block i of a sequence has its tokens i * block .. i * block + block - 1. The newest block that a row sees, which may
    be shorter, is always chosen; a block's score is that of its best token; a tie goes to the lower block.
    block: 8, 16, 32, 64 or 128 tokens. All other arguments are as in `envoi.indexer_topk`, mode "fast".

    A head of its own, without ReLU or weights, is two heads: its query and that of opposite sign, weights 1 and -1.
    Source of the definition: the candidate blocks of DeepSeek-V4.1's indexer (block 8, k 2048).
    """
    _check(q, k_cache, weights, seq_lens, block_table, k, next_n, return_errors)
    _check_block(block)
    found, errors = _indexer_blocks(q, k_cache, weights, seq_lens, block_table, k, block, next_n)
    return (found, errors) if return_errors else found


def indexer_topk_in_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    blocks: torch.Tensor,
    k: int = 512,
    block: int = 8,
    next_n: int = 1,
    *,
    output: str = "slots",
    order: str = "score",
    return_errors: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Choose the k best tokens of each row among those in given blocks: [B * next_n, k] int32, -1 after the last.

    blocks [B * next_n, C] int32: numbers of each row's blocks, ascending, none twice, and -1 after the last, as
    `envoi.indexer_blocks` returns them, of this layer or of one before. block: 8, 16, 32, 64 or 128 tokens. All other
    arguments are as in `envoi.indexer_topk`, mode "fast". All tokens are scored, whichever blocks are given.
    """
    _check(q, k_cache, weights, seq_lens, block_table, k, next_n, return_errors)
    _check_choices(k_cache, "fast", output, order)
    _check_block(block)
    expect_tensor("blocks", blocks, torch.int32, (q.shape[0], "C"), q.device)
    expect_int("blocks.shape[1]", blocks.shape[1], 1, MOST_BLOCK_TOKENS // block)
    tensors = q, k_cache, weights, seq_lens, block_table, blocks
    found, errors = _indexer_topk_in_blocks(*tensors, k, block, next_n, output == "slots", order)
    return (found, errors) if return_errors else found


def _check_block(block: int) -> None:
    if not isinstance(block, int) or block not in BLOCKS:
        raise ValueError(f"block: expected one of {', '.join(map(str, BLOCKS))}, got {block!r}")


def _check_choices(k_cache, mode, output, order) -> None:
    expect_choice("mode", mode, MODES)
    if mode == "exact" and is_fp4(k_cache):
        raise ValueError("mode: expected 'fast' with keys in FP4, whose definition has no order of adding, got 'exact'")
    expect_choice("output", output, OUTPUTS)
    expect_choice("order", order, ORDERS)


def _check(q, k_cache, weights, seq_lens, block_table, k, next_n, return_errors) -> None:
    expect_bool("return_errors", return_errors)
    expect_int("next_n", next_n, 1)
    expect_int("k", k, 1, MOST_K)
    expect_tensor("q", q, torch.float8_e4m3fn, ("B * next_n", "H", HEAD_DIM))
    rows, num_heads, _ = q.shape
    if not 1 <= num_heads <= MOST_HEADS:
        raise ValueError(f"q.shape[1]: expected H from 1 to {MOST_HEADS} heads, got {num_heads}")
    if rows % next_n:
        raise ValueError(f"q.shape[0]: expected a multiple of next_n = {next_n}, got {rows}")
    requests, device = rows // next_n, q.device
    width = FP4_BYTES_PER_TOKEN if isinstance(k_cache, torch.Tensor) and is_fp4(k_cache) else BYTES_PER_TOKEN
    page = ("num_pages", PAGE_SIZE, 1, width)
    expect_tensor("k_cache", k_cache, (torch.int8, torch.uint8), page, device, contiguous=True)
    expect_tensor("weights", weights, torch.float32, (rows, num_heads), device)
    expect_tensor("seq_lens", seq_lens, torch.int32, (requests,), device)
    expect_tensor("block_table", block_table, torch.int32, (requests, "P"), device)


def _fake(q, k_cache, weights, seq_lens, block_table, k, *arguments):
    rows = q.shape[0]
    return q.new_empty(rows, k, dtype=torch.int32), q.new_empty(rows, dtype=torch.int32)


def _flops(q, k_cache, weights, seq_lens, block_table, k, mode_or_block, next_n, *arguments):
    """Count the FLOPs of queries times visible keys; for fake lengths, times all keys that the table has room for."""
    _, num_heads, width = q.shape
    if isinstance(seq_lens, FakeTensor) or seq_lens.device.type == "meta":
        num_keys = q.shape[0] * block_table.shape[1] * PAGE_SIZE
    else:
        num_keys = sum(max(length - after, 0) for length in seq_lens.tolist() for after in range(next_n))
    return 2 * num_keys * num_heads * width


def _fake_in_blocks(q, k_cache, weights, seq_lens, block_table, blocks, k, *arguments):
    return _fake(q, k_cache, weights, seq_lens, block_table, k)


def _flops_in_blocks(q, k_cache, weights, seq_lens, block_table, blocks, k, block, next_n, *arguments):
    return _flops(q, k_cache, weights, seq_lens, block_table, k, block, next_n)


_indexer_topk = operator("indexer_topk", _fake, _flops)(run)
_indexer_blocks = operator("indexer_blocks", _fake, _flops)(run_blocks)
_indexer_topk_in_blocks = operator("indexer_topk_in_blocks", _fake_in_blocks, _flops_in_blocks)(run_in_blocks)
