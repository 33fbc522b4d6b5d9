"""Products of widths that no tensor has: tensor cores multiply 8, 16, 24 .. 256 columns, a tensor has a power of two.

A kernel gives its accumulator the next power of two of columns, and says in a comment of its PTX how many of them an
instruction shall compute. Each instruction is then rewritten, before the assembler reads it, to leave out the others,
whose registers keep their zeros and cost nothing:

    // envoi 1: wgmma of n256 is n208
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1, .. %r128}, ..
    wgmma.mma_async.sync.aligned.m64n208k16.f32.bf16.bf16 {%r1, .. %r104}, ..      what is assembled

Columns of an accumulator follow each other in its registers, 8 columns in 4 of a thread, so the first are left.
"""

import re
from typing import Any

import triton.experimental.gluon.language as gl
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon

# The number is of what `rewritten` does. Triton's disk cache finds a kernel by its source, which has the remark: raise
# it with a change of `rewritten`, else old machine code would be found.
_REMARK = re.compile(r"// envoi 1: wgmma of n(\d+) is n(\d+)")


@gluon.constexpr_function
def _remark(columns, used):
    return f"// envoi 1: wgmma of n{columns} is n{used} $0"


@gluon.jit
def narrow_products(COLUMNS: gl.constexpr, USED: gl.constexpr):
    """Let every wgmma of this kernel with COLUMNS columns compute the first USED only, a multiple of 8."""
    remark: gl.constexpr = _remark(COLUMNS, USED)
    gl.inline_asm_elementwise(remark, "=r", [], gl.int32, is_pure=False, pack=1)  # pyright: ignore[reportArgumentType]


def rewritten(ptx: str) -> str:
    """Return a kernel's PTX with its products as narrow as its remarks say; without one, the PTX as it is.

    Raises ValueError if the remarks contradict each other, or no product is as wide as they say.
    """
    remarks = {(int(columns), int(used)) for columns, used in _REMARK.findall(ptx)}
    if not remarks:
        return ptx
    if len(remarks) > 1:
        raise ValueError(f"narrow_products: expected one width in a kernel, got {sorted(remarks)}")
    ((columns, used),) = remarks
    product = re.compile(rf"(wgmma\.mma_async\.sync\.aligned\.m64)n{columns}(k\d+\.f32[.\w]* )\{{([^}}]*)\}}")

    def narrow(found: re.Match) -> str:
        registers = found[3].split(",")[: used // 2]
        return f"{found[1]}n{used}{found[2]}{{{','.join(registers)}}}"

    text, count = product.subn(narrow, ptx)
    if not count:
        raise ValueError(f"narrow_products: expected products of {columns} columns, found none")
    return text


def _narrow_what_is_compiled() -> None:
    """Let Triton rewrite the PTX of kernels with remarks before it assembles them; that of others stays as it is."""
    make_ptx = CUDABackend.make_ptx

    def narrowing(self: Any, *arguments: Any, **options: Any) -> str:
        return rewritten(make_ptx(self, *arguments, **options))

    CUDABackend.make_ptx = narrowing


_narrow_what_is_compiled()
