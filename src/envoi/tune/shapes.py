"""Sizes of the GEMMs that can be measured, and the rows per expert of random routing."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class GemmShape:
    """Sizes of a GEMM: a [m, k], b [n, k]; format: of `envoi.quant.FORMATS`; epilogue: of `envoi.tune.epilogues`."""

    m: int
    n: int
    k: int
    format: str = "bf16"
    epilogue: str = "store"


@dataclass(frozen=True)
class GroupedShape:
    """Sizes of a grouped GEMM: num_rows[e] rows of expert e, [sum(num_rows), k] against weights [len(num_rows), n, k].

    Other fields: see GemmShape.
    """

    num_rows: tuple[int, ...]
    n: int
    k: int
    format: str
    epilogue: str = "store"


Shape = GemmShape | GroupedShape


def drawn_rows(total: int, num_experts: int) -> tuple[int, ...]:
    """Draw the rows per expert of random routing, with a fixed seed.

    >>> drawn_rows(100, 4)
    (23, 19, 32, 26)
    """
    drawn = random.Random(total).choices(range(num_experts), k=total)
    return tuple(drawn.count(expert) for expert in range(num_experts))
