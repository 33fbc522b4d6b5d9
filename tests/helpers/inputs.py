"""Random inputs, and those chosen to break a selection."""

import torch


def normal(
    *shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.Tensor:  # fmt: skip
    """Return normally distributed numbers, drawn in float32."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def logits(kind: str, rows: int, columns: int, k: int, seed: int = 0) -> torch.Tensor:
    """Return float32 [rows, columns] of a kind of `LOGITS`."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=source)
    return LOGITS[kind](x, k)


def _with(x: torch.Tensor, value: float, share: float) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    return x.masked_fill(torch.rand(x.shape, generator=source) < share, value)


def _boundary_ties(x: torch.Tensor, k: int) -> torch.Tensor:
    """Set the k-th and the values around it to be equal."""
    ranked = x.sort(dim=1, descending=True)
    kth = ranked.values[:, k - 1 : k]
    around = ranked.indices[:, max(0, k - 2) : k + 2]
    return x.scatter(1, around, kth.expand(-1, around.shape[1]))


LOGITS = {
    "randn": lambda x, k: x,
    "all negative": lambda x, k: x - 6.0,
    "mixed signs": lambda x, k: x - 2.0,
    "all equal": lambda x, k: torch.full_like(x, 0.5),
    "crowded around 1": lambda x, k: 1.0 + 1e-4 * x.clamp(-1, 1),
    "few distinct": lambda x, k: x.round(),
    "ties at the boundary": _boundary_ties,
    "ties between groups": lambda x, k: torch.cat((x[:, : x.shape[1] // 2],) * 2, 1) if x.shape[1] % 2 == 0 else x,
    "saturating": lambda x, k: 60.0 + x,
    "signed zeros": lambda x, k: torch.where(x > 1, x, x.sign() * 0.0),
    "huge": lambda x, k: x * 1e4,
    "NaN": lambda x, k: _with(x, torch.nan, 0.2),
    "+inf": lambda x, k: _with(x, torch.inf, 0.1),
    "-inf": lambda x, k: _with(x, -torch.inf, 0.3),
    "fewer than k finite": lambda x, k: x.masked_fill(torch.arange(x.shape[1]) >= max(1, k - 1), torch.nan),
    "one finite": lambda x, k: x.masked_fill(torch.arange(x.shape[1]) != x.shape[1] - 1, -torch.inf),
    "none finite": lambda x, k: torch.full_like(x, torch.nan),
}
