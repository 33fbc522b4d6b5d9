"""Judges of the kernels around the GEMMs, bit for bit, on a CPU in the interpreter and on a GPU."""

import torch

from envoi.ops.moe import reference
from envoi.ops.moe.permute import combine_rows, gather_rows, quantize_rows, sort_slots
from envoi.ops.moe.reference import permute, take_rows
from envoi.quant import FORMATS, SCHEMES, dequantize, format_named, quantize
from envoi.types import Matrix, QuantTensor
from tests.helpers.accuracy import assert_same_bits

SINGLE_ROWS = ("fp8_row", "fp8_1x128", "mxfp8")


def of_sizes(*hidden: int) -> list[tuple[str, int]]:
    """Return each format with those of the sizes that it takes."""
    return [(format, size) for format in FORMATS for size in hidden if size % format_named(format).group_k == 0]


def random_ids(tokens: int, experts: int, k: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    source = torch.Generator(device).manual_seed(seed)
    return torch.randint(-1, experts, (tokens, k), generator=source, dtype=torch.int32, device=device)


def judge_sorted(ids: torch.Tensor, experts: int) -> None:
    row_map = sort_slots(ids, experts)
    pos_to_slot, offsets = reference.sort_slots(ids, experts)
    want = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    want[pos_to_slot.long()] = torch.arange(len(pos_to_slot), dtype=torch.int32, device=ids.device)
    assert_same_bits(row_map.offsets, offsets)
    assert_same_bits(row_map.slot_to_pos, want.view(ids.shape))


def assert_same_rows(got: Matrix, want: Matrix) -> None:
    pairs = ((got.values, want.values), (got.sf, want.sf)) if isinstance(got, QuantTensor) else ((got, want),)
    for x, y in pairs:
        assert_same_bits(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8).view(len(y), -1))


def judge_gathered(tokens: torch.Tensor, ids: torch.Tensor, experts: int, format: str) -> tuple[Matrix, int]:
    """Judge rows of tokens, some made zero, NaN and infinite; return all rows, and how many experts have."""
    tokens[2], tokens[3, 5], tokens[4, 9] = 0.0, torch.nan, torch.inf
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)).to(ids.device)
    want = permute(reference.quantize_tokens(tokens, format), weights, ids, experts)
    rows, row_weights = gather_rows(tokens, weights, sort_slots(ids, experts), format_named(format).activations)
    used = len(want.topk_weights)
    assert 0 < used < len(row_weights) == ids.numel()
    assert_same_rows(take_rows(rows, torch.arange(used, device=ids.device)), want.rows)
    assert_same_bits(row_weights[:used], want.topk_weights)
    assert bool(row_weights[used:].isnan().all())
    return rows, used


def judge_kept_in_bf16(tokens: torch.Tensor, ids: torch.Tensor, experts: int) -> None:
    """Judge rows of MXFP8's numbers in bf16, some of tokens that are zero, NaN and infinite."""
    tokens[2], tokens[3, 5], tokens[4, 9] = 0.0, torch.nan, torch.inf
    given = tokens, torch.rand(ids.shape).to(ids.device), sort_slots(ids, experts), SCHEMES["mxfp8"]
    (rows, row_weights), (kept, kept_weights) = gather_rows(*given), gather_rows(*given, in_bf16=True)
    assert isinstance(rows, QuantTensor) and isinstance(kept, torch.Tensor)
    used = int((ids >= 0).sum())
    want = dequantize(rows)[:used]
    assert kept.dtype == torch.bfloat16 and want.isnan().any() and 0 < used < len(kept)
    assert_same_bits(kept[:used].float().nan_to_num(-1.0) + 0.0, want.nan_to_num(-1.0) + 0.0)
    assert_same_bits(kept_weights, row_weights)
    assert bool((kept[used:].view(torch.uint8) == 255).all())


def judge_quantised(rows: torch.Tensor, offsets: list[int], scheme: str) -> torch.Tensor:
    """Judge rows as far as experts have them; return the bytes of the others."""
    used = offsets[-1]
    got = quantize_rows(rows, torch.tensor(offsets, dtype=torch.int32, device=rows.device), SCHEMES[scheme])
    assert_same_rows(take_rows(got, torch.arange(used, device=rows.device)), quantize(rows[:used], scheme))
    return got.values.view(torch.uint8)[used:]


def judge_combined(tokens: int, width: int, k: int, device: str = "cpu", **how: bool) -> None:
    source = torch.Generator(device).manual_seed(k)
    rows = torch.randn(tokens * k, width, generator=source, device=device).bfloat16()
    row_map = torch.randperm(tokens * k, generator=source, device=device).to(torch.int32).view(tokens, k)
    row_map[torch.rand(tokens, k, generator=source, device=device) < 0.25] = -1
    want = torch.zeros(tokens, width, device=device)
    for slot in range(k):
        want += torch.where(row_map[:, slot, None] >= 0, rows[row_map[:, slot].long()], 0.0).float()
    assert_same_bits(combine_rows(rows, row_map, **how), want.bfloat16())
