"""The kernels of this library by name, each with what compiles it.

To add one: a function that takes an architecture and returns a `Recipe`, under `@kernel(name, arches)`. Its docstring's
first line is what `envoi sass --list` prints. It imports the kernel itself, so that listing stays quick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envoi.sass.compile import Recipe


@dataclass(frozen=True)
class Entry:
    """A kernel of the library: the architectures it is written for, and its recipe for one of them."""

    name: str
    arches: tuple[str, ...]
    about: str
    recipe: "Callable[[str], Recipe]"


KERNELS: dict[str, Entry] = {}


def kernel(name: str, arches: tuple[str, ...]):
    """Decorator: put a function from architecture to recipe into `KERNELS`."""

    def register(recipe: "Callable[[str], Recipe]") -> "Callable[[str], Recipe]":
        if name in KERNELS:
            raise ValueError(f"registry: {name!r} stands twice")
        about = (recipe.__doc__ or "").strip().splitlines()[0]
        KERNELS[name] = Entry(name, arches, about, recipe)
        return recipe

    return register


def find(name: str) -> Entry:
    """The entry of that name; ValueError lists what there is."""
    if name not in KERNELS:
        raise ValueError(f"KERNEL: expected a .cubin file or one of {', '.join(KERNELS)}, got {name!r}")
    return KERNELS[name]


@kernel("tmem-load", arches=("sm_100", "sm_103"))
def _tmem_load(arch: str) -> "Recipe":
    """128 x 256 GEMM tile whose accumulator leaves tensor memory 32 columns at a time; --sweep varies that."""
    from envoi.sass import tmem_sweep

    return tmem_sweep.recipe(tmem_sweep.Case("32x32b", columns=32))


@kernel("gemm-triton", arches=("sm_90", "sm_100", "sm_103"))
def _gemm_triton(arch: str) -> "Recipe":
    """GEMM in plain Triton in bf16, with silu(gate) * up of interleaved columns."""
    from envoi.epilogue.library import swiglu
    from envoi.sass import triton_recipes

    return triton_recipes.product(arch, swiglu)


@kernel("gemm-triton-mxfp4", arches=("sm_90", "sm_100", "sm_103"))
def _gemm_triton_mxfp4(arch: str) -> "Recipe":
    """Grouped GEMM in plain Triton of MXFP8 tokens and MXFP4 weights over 64 experts, widened in registers."""
    from envoi.epilogue.library import expert_l2
    from envoi.sass import triton_recipes

    return triton_recipes.product(arch, expert_l2(True), "mxfp8", "mxfp4", num_experts=64)


@kernel("rows-triton", arches=("sm_90", "sm_100", "sm_103"))
def _rows_triton(arch: str) -> "Recipe":
    """An epilogue of whole rows, from accumulators in memory: the experts' SwiGLU, quantised with a scale a row."""
    from envoi.epilogue.library import expert_l1
    from envoi.sass import triton_recipes

    return triton_recipes.rows(arch, expert_l1("swiglu", None, False, "fp8_row"))
