# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Shared memory of a program, addressed word by word: Triton has neither indices into it nor atomics on it.

    declare                                                   once, first in the kernel
    put, put2, get, get2, add, fetch_add, append, set_bits    by word
    count_less                                                of pairs
    tl.debug_barrier                                          between what one thread puts and another gets

The words belong to the kernel alone; they begin undefined. In the interpreter they are those of `room`, a tensor.
`add`, `fetch_add` and `append` count every copy of an element: only for tensors with as many elements as threads, or
more.
"""

from typing import Any, NamedTuple

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


@triton.constexpr_function
def _where_mask(instruction):
    """Write the assembly of an instruction on word $1 with value $2 where $3."""
    return (
        "{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, $3, 0; mov.u32 a, envoi_room; mad.lo.s32 a, $1, 4, a;"
        f" @p {instruction} [a], $2; mov.b32 $0, 0; }}"
    )


@triton.jit
def put(room, index, value, mask):
    """Store 32-bit values at words where mask."""
    if INTERPRETED:
        tl.store(room + index, value.to(tl.int32, bitcast=True), mask=mask)
    else:
        TEXT: tl.constexpr = _where_mask("st.shared.b32")
        given = [index, value, mask.to(tl.int32)]
        tl.inline_asm_elementwise(TEXT, "=r,r,r,r", given, tl.int32, is_pure=False, pack=1)


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


# Four elements at a time, of which mostly none is stored. Whether one is, their sum says: of `or` ptxas 12.9 makes a
# test that fails if the last two alone are.
_APPENDING = tl.constexpr(
    "{ .reg .pred p; .reg .b32 a, b; add.s32 a, $20, $21; add.s32 a, a, $22; add.s32 a, a, $23; setp.eq.s32 p, a, 0;"
    " @p bra none; "
    + "".join(
        f"setp.ne.s32 p, ${20 + i}, 0; mov.u32 a, envoi_room; mad.lo.s32 b, ${4 + i}, 4, a;"
        f" @p atom.shared.add.u32 b, [b], 1; add.u32 b, b, ${8 + i}; mad.lo.s32 b, b, 8, a;"
        f" @p st.shared.v2.b32 [b], {{${12 + i}, ${16 + i}}}; "
        for i in range(4)
    )
    + "none: mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)


@triton.jit
def append(room, counter, pairs, x, y, mask):
    """Append 32-bit values x, y where mask to a list, in no order. counter: word of its length; pairs: first pair."""
    if INTERPRETED:
        seat = tl.where(mask, tl.atomic_add(room + counter + y * 0, 1, mask=mask), 0)
        tl.store(room + 2 * (pairs + seat), x.to(tl.int32, bitcast=True), mask=mask)
        tl.store(room + 2 * (pairs + seat) + 1, y, mask=mask)
    else:
        tl.inline_asm_elementwise(
            _APPENDING, "=r,=r,=r,=r" + 20 * ",r", [counter, pairs, x, y, mask.to(tl.int32)], tl.int32, is_pure=False,
            pack=4,
        )  # fmt: skip


@triton.jit
def set_bits(room, index, bits, mask):
    """Set bits of words where mask."""
    if INTERPRETED:
        tl.atomic_or(room + index, bits, mask=mask)
    else:
        TEXT: tl.constexpr = _where_mask("red.shared.or.b32")
        given = [index, bits, mask.to(tl.int32)]
        tl.inline_asm_elementwise(TEXT, "=r,r,r,r", given, tl.int32, is_pure=False, pack=1)


_REGISTERS = tl.constexpr(66)
_RESERVING = tl.constexpr(
    f".reg .b32 z<{_REGISTERS.value}>; "
    + "".join(f"ld.volatile.shared.b32 z{i}, [envoi_room + {4 * i}]; " for i in range(_REGISTERS.value))
    + "".join(f"st.volatile.shared.b32 [envoi_room + {4 * i + 400}], z{i}; " for i in range(_REGISTERS.value))
)


@triton.jit
def reserve_registers(n):
    """Make the compiler take more than 64 registers, so that an SM runs one program of 16 warps. n: not negative."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p bra enough; " + _RESERVING + " enough: mov.b32 $0, 0; }",
            "=r,r", [n], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


# Four elements at a time. Each warp ends after its own most pairs; the assembler would unroll a loop of few rounds.
_COUNTING = tl.constexpr(
    "{ .reg .pred p, q; .reg .b32 i, m; mov.b32 i, 0; max.s32 m, $8, $9; max.s32 m, m, $10; max.s32 m, m, $11; "
    + "".join(
        f".reg .b32 a{k}, c{k}, x{k}, y{k}; .reg .b64 o{k}, s{k}; mov.u32 a{k}, envoi_room;"
        f" mad.lo.s32 a{k}, ${4 + k}, 8, a{k}; mov.b64 s{k}, {{${16 + k}, ${12 + k}}}; mov.b32 c{k}, 0; "
        for k in range(4)
    )
    + 'setp.le.s32 p, m, 0; @p bra done; again: .pragma "nounroll"; '
    + "".join(
        f"setp.lt.s32 p, i, ${8 + k}; @p ld.shared.v2.b32 {{x{k}, y{k}}}, [a{k}]; mov.b64 o{k}, {{y{k}, x{k}}};"
        f" setp.lt.and.u64 q, o{k}, s{k}, p; @q add.s32 c{k}, c{k}, 1; add.s32 a{k}, a{k}, 8; "
        for k in range(4)
    )
    + "add.s32 i, i, 1; setp.lt.s32 p, i, m; @p bra again; done: "
    + "".join(f"mov.b32 ${k}, c{k}; " for k in range(4))
    + "}"
)


@triton.jit
def count_less(room, pair, number, x, y):
    """Count those of `number` pairs, from `pair` on, that are less than x, y: first in uint32, or equal and second."""
    if INTERPRETED:
        less = number * 0
        for nth in range(tl.max(number, 0)):
            at = 2 * tl.where(nth < number, pair + nth, pair)
            other = get(room, at).to(tl.uint32, bitcast=True)
            less += ((nth < number) & ((other < x) | ((other == x) & (get(room, at + 1) < y)))).to(tl.int32)
        return less
    return tl.inline_asm_elementwise(
        _COUNTING, "=r,=r,=r,=r" + 16 * ",r", [pair, number, x.to(tl.int32, bitcast=True), y], tl.int32, is_pure=False,
        pack=4,
    )  # fmt: skip


# Between programs of a cluster (`runtime.cluster`), which the interpreter doesn't have.


class Piece(NamedTuple):
    """What `exchange` copies: from which word on, to which, how many elements."""

    source: Any
    target: Any
    number: Any


@triton.jit
def set_up_barriers(room, barriers, NUMBER: tl.constexpr):
    """Set up mbarriers at NUMBER pairs of words, the first an even one. Each is for one `exchange`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $2; shl.b32 t, t, 1; add.u32 t, t, $1;"
        " mov.u32 a, envoi_room; mad.lo.s32 a, t, 4, a; @p mbarrier.init.shared::cta.b64 [a], 1;"
        " @p fence.mbarrier_init.release.cluster; mov.b32 $0, 0; }",
        "=r,r,r", [barriers, barriers * 0 + NUMBER], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _exchanging(most, programs, words):
    """Write the assembly of `exchange`: thread t copies element w = t % most to program t // most."""
    vector, value = ("", "v") if words == 1 else (".v2", "{v, u}")
    return (
        "{ .reg .pred p, q; .reg .b32 t, w, a, b, c, v, u; mov.u32 t, %tid.x; mov.u32 a, envoi_room;"
        f" mad.lo.s32 c, $3, 4, a; setp.eq.u32 q, t, 0; mul.lo.s32 v, $5, {4 * words};"
        " @q mbarrier.arrive.expect_tx.shared::cta.b64 _, [c], v;"
        f" and.b32 w, t, {most - 1}; setp.lt.u32 p, t, {most * programs}; setp.lt.and.u32 p, w, $4, p;"
        f" shr.u32 t, t, {most.bit_length() - 1}; mul.lo.s32 w, w, {words};"
        f" add.u32 b, w, $1; mad.lo.s32 b, b, 4, a; @p ld.shared{vector}.b32 {value}, [b];"
        " @p mapa.shared::cluster.u32 c, c, t;"
        " add.u32 b, w, $2; mad.lo.s32 b, b, 4, a; @p mapa.shared::cluster.u32 b, b, t;"
        f" @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [b], {value}, [c];"
        " mad.lo.s32 c, $3, 4, a; again: mbarrier.try_wait.parity.shared::cta.b64 p, [c], 0; @!p bra.uni again;"
        " mov.b32 $0, 0; }"
    )


@triton.jit
def exchange(room, piece, barrier, total, MOST: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr = 1):
    """Copy a piece to all programs of the cluster, and wait for all that comes here: `total` elements.

    An element has WORDS words, 1 or 2. A piece has at most MOST, a power of two. A thread copies an element, so
    MOST * PROGRAMS is at most their number.
    """
    TEXT: tl.constexpr = _exchanging(MOST, PROGRAMS, WORDS)
    given = [piece.source, piece.target, barrier, piece.number, total]
    tl.inline_asm_elementwise(TEXT, "=r,r,r,r,r,r", given, tl.int32, is_pure=False, pack=1)
