# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Shared memory of a program, addressed word by word: Triton has neither indices into it nor atomics on it.

    declare(room)                     once, first in the kernel
    put, put2, get, get2, add, fetch_add    by word; between what one thread puts and another gets, tl.debug_barrier()

The words belong to the kernel alone; they begin undefined. In the interpreter they are those of `room`, a tensor.
`add` and `fetch_add` count every copy of an element: only for tensors with at least as many elements as threads.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INTERPRETED

NUM_WORDS: tl.constexpr = tl.constexpr(10880)  # with what the compiler takes for itself, less than 48 KiB


@triton.jit
def declare():
    """Declare the words."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            ".shared .align 16 .b32 envoi_room[10880]; // $0", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def put(room, index, value, mask):
    """Store 32-bit values at words where mask."""
    if INTERPRETED:
        tl.store(room + index, value.to(tl.int32, bitcast=True), mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, $3, 0; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 4, a;"
            " @p st.shared.b32 [a], $2; mov.b32 $0, 0; }",
            "=r,r,r,r", [index, value, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def get(room, index):
    """Load int32 words."""
    if INTERPRETED:
        return tl.load(room + index)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 4, a; ld.shared.b32 $0, [a]; }",
        "=r,r", [index], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def put2(room, pair, x, y, mask):
    """Store 32-bit values at words 2 * pair and 2 * pair + 1 where mask."""
    if INTERPRETED:
        tl.store(room + 2 * pair, x.to(tl.int32, bitcast=True), mask=mask)
        tl.store(room + 2 * pair + 1, y, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, $4, 0; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 8, a;"
            " @p st.shared.v2.b32 [a], {$2, $3}; mov.b32 $0, 0; }",
            "=r,r,r,r,r", [pair, x, y, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def get2(room, pair):
    """Load int32 words 2 * pair and 2 * pair + 1."""
    if INTERPRETED:
        return tl.load(room + 2 * pair), tl.load(room + 2 * pair + 1)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, envoi_room; mad.lo.s32 a, $2, 8, a; ld.shared.v2.b32 {$0, $1}, [a]; }",
        "=r,=r,r", [pair], (tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add(room, index):
    """Add 1 to words."""
    if INTERPRETED:
        tl.atomic_add(room + index, 1)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 4, a; red.shared.add.u32 [a], 1; mov.b32 $0, 0; }",
            "=r,r", [index], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def fetch_add(room, index, mask):
    """Add 1 to words where mask; return what each was before, 0 elsewhere."""
    if INTERPRETED:
        return tl.where(mask, tl.atomic_add(room + index, 1, mask=mask), 0)
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, o; setp.ne.s32 p, $2, 0; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 4, a;"
        " mov.b32 o, 0; @p atom.shared.add.u32 o, [a], 1; mov.b32 $0, o; }",
        "=r,r,r", [index, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
