"""Products of widths that no tensor has: tensor cores multiply 8, 16, 24 .. 256 columns, a tensor has a power of two.

A kernel gives its accumulator the next power of two of columns, and says in a comment of its PTX how many of them an
instruction shall compute. Each instruction is then rewritten, before the assembler reads it, to leave out the others,
whose registers keep their zeros and cost nothing:

    // envoi narrow 1: wgmma of n256 is n208
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1, .. %r128}, ..
    wgmma.mma_async.sync.aligned.m64n208k16.f32.bf16.bf16 {%r1, .. %r104}, ..      what is assembled

Columns of an accumulator follow each other in its registers, 8 columns in 4 of a thread, so the first are left.
"""

import re

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.ptx_changes import before_assembly, remark

_REMARK = re.compile(r"// envoi narrow 1: wgmma of n(\d+) is n(\d+)")


@gluon.constexpr_function
def _remark(columns, used):
    return f"// envoi narrow 1: wgmma of n{columns} is n{used} $0"


@gluon.jit
def narrow_products(COLUMNS: gl.constexpr, USED: gl.constexpr):
    """Let every wgmma of this kernel with COLUMNS columns compute the first USED only, a multiple of 8."""
    text: gl.constexpr = _remark(COLUMNS, USED)
    remark(text)


@before_assembly
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
