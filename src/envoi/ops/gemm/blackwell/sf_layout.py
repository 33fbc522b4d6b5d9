"""Packing of scale factors into the layout that Blackwell's tensor cores read.

[rows, factors along K], a byte each, is cut into blocks of 128 rows and 4 factors; a block is 512 bytes with row r,
factor j at (r % 32) * 16 + (r // 32) * 4 + j. Blocks along K are adjacent, then those of the next 128 rows. Partial
blocks are padded with 0.

    packed[r // 128, j // 4, (r % 32) * 16 + (r % 128) // 32 * 4 + j % 4] = sf[r, j]
"""

import torch

ROWS, COLUMNS = 128, 4


def num_blocks(num_rows: int, num_groups: int = 0) -> int:
    """Return the number of blocks of rows; each group of sorted rows starts a new block, at most one more a group."""
    return -(-num_rows // ROWS) + num_groups


def pack_sf(sf: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """Pack [rows, factors], or experts' weights' [E, rows, factors], a byte each, to [blocks, blocks along K, 2, 256].

    offsets [E + 1]: the rows are sorted by expert, and each expert's rows start a new block.
    """
    if sf.dim() == 3:
        return torch.cat([pack_sf(one) for one in sf])
    raw = sf.view(torch.uint8)
    rows, columns = raw.shape
    blocks = num_blocks(rows, 0 if offsets is None else len(offsets) - 1)
    steps = -(-columns // COLUMNS)
    padded = raw.new_zeros(blocks * ROWS, steps * COLUMNS)
    padded[_places(rows, offsets, raw.device), :columns] = raw
    cut = padded.view(blocks, 4, 32, steps, COLUMNS).permute(0, 3, 2, 1, 4)
    return cut.reshape(blocks, steps, 2, 256).view(sf.dtype if sf.dtype == torch.float8_e4m3fn else torch.uint8)


def _places(rows: int, offsets: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the packed position of each row, without copying a value to the host."""
    ids = torch.arange(rows, device=device)
    if offsets is None:
        return ids
    expert = torch.searchsorted(offsets[1:].contiguous(), ids, right=True)
    counts = -(-offsets.diff() // ROWS)
    begins = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    starts = torch.where(expert < len(offsets) - 1, offsets[:-1][expert.clamp(max=len(offsets) - 2)], offsets[-1])
    return begins[expert] * ROWS + ids - starts
