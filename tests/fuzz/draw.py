"""Draws of a case: everything random about it follows from the operator's name and the seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Option = TypeVar("Option")
SIZES = ("small", "medium", "large")
KINDS = ("normal", "normal", "normal", "whole", "spread", "negative", "ties", "zeros", "tiny", "sparse")


@dataclass(frozen=True)
class Case:
    """Case of an operator.

    text: one line that describes it. call: runs Envoi. judge: takes what `call` returned, says what is wrong or "".
    refused: the call must raise ValueError.
    """

    text: str
    call: Callable[[], Any]
    judge: Callable[[Any], str]
    refused: bool = False


class Draw:
    """Source of a case's choices and tensors, equal for equal operator, seed and sizes on every device.

    sizes: one of SIZES; `most` gives the limit that goes with it.
    family: so many consecutive seeds share what decides which kernels are compiled, since compiling takes far longer
        than running: their cases draw it from `form`. 1 = each seed has its own.
    """

    def __init__(self, operator: str, seed: int, sizes: str = "medium", device: str = "cpu", family: int = 1):
        self.operator, self.seed, self.sizes, self.device = operator, seed, sizes, torch.device(device)
        self.family = family
        self.form = self if family == 1 else Draw(f"{operator} form", seed // family, sizes, device)
        self.random = random.Random(f"{operator} {seed}")
        self.source = torch.Generator().manual_seed(self.random.getrandbits(48))

    def one(self, options: Sequence[Option]) -> Option:
        """Draw one of several options."""
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < share

    def most(self, small: int, medium: int, large: int) -> int:
        """Return the limit that belongs to the sizes."""
        return (small, medium, large)[SIZES.index(self.sizes)]

    def size(self, low: int, high: int, step: int = 1) -> int:
        """Draw a multiple of step in [low, high], often the ends, powers of two and their neighbours."""
        near = [p + d for p in (2**i for i in range(12)) for d in (-step, 0, step)]
        special = [n for n in (low, low + step, high, *near) if low <= n <= high and n % step == 0]
        if special and self.chance(0.5):
            return self.one(special)
        return self.random.randint(-(-low // step), high // step) * step

    def rows(self, low: int, high: int, none: float) -> int:
        """Draw a number of rows as `size` does, or 0 with probability `none`.

        In a family it is 0 or one of three numbers, each of which may have kernels of its own.
        """
        if self.form is self:
            return 0 if self.chance(none) else self.size(low, high)
        known = [self.form.size(low, high) for _ in range(3)]
        return 0 if self.chance(none) else self.one(known)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Draw float32 in [0, 1)."""
        return torch.rand(*shape, generator=self.source)

    def normal(self, *shape: int) -> torch.Tensor:
        """Draw normal float32."""
        return torch.randn(*shape, generator=self.source)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Draw int64 in [low, high]."""
        return torch.randint(low, high + 1, shape, generator=self.source)

    def values(self, kind: str, *shape: int) -> torch.Tensor:
        """Draw float32 values of one of KINDS."""
        x = self.normal(*shape)
        if kind == "whole":
            return self.ints(-2, 2, *shape).float()
        if kind == "spread":
            return x * torch.exp2(self.ints(-12, 6, *shape).float())
        if kind == "negative":
            return -x.abs() - 0.25
        if kind == "ties":
            return x[..., :1].expand(shape).clone() if x.numel() else x
        if kind == "tiny":
            return x * 2.0**-130
        if kind == "sparse":
            return x * (self.uniform(*shape) < 0.1)
        return torch.where(x > 0, 0.0, -0.0) if kind == "zeros" else x

    def poisoned(self, x: torch.Tensor) -> torch.Tensor:
        """Set a few elements to NaN or infinity."""
        for _ in range(self.random.randint(1, 3)):
            if x.numel():
                value = self.one((torch.nan, torch.inf, -torch.inf))
                x.view(-1)[self.random.randrange(x.numel())] = value
        return x

    def placed(self, x: torch.Tensor, how: str | None = None) -> torch.Tensor:
        """Move a tensor to the device, as a view of some kind; gaps of its memory are NaN or huge.

        how: "plain", "columns", "rows", "offset" or "transposed"; None draws one, plain half of the time.
        """
        how = how or self.one(("plain", "plain", "plain", "plain", "columns", "rows", "offset", "transposed"))
        x = x.to(self.device)
        if how == "plain" or not x.numel() or x.dim() < 2:
            return x
        *lead, rows, columns = x.shape
        if how == "transposed":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if how == "rows":
            room = poison([*lead, 2 * rows, columns], x)[..., ::2, :]
        elif how == "columns":
            room = poison([*lead, rows, 2 * columns], x)[..., ::2]
        else:
            room = poison([*lead, rows, columns + 3], x)[..., 1:-2]
        return room.copy_(x)


def poison(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of NaN, or for integers of a huge number."""
    bytes_ = torch.empty(*shape, dtype=like.dtype, device=like.device)
    storage: Any = bytes_.untyped_storage()
    storage.fill_(0xFF if like.dtype.is_floating_point else 0x7F)
    return bytes_


def host(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the CPU in float64, integers in int64."""
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x.long()
