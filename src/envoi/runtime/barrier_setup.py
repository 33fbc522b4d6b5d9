"""Setting up many mbarriers at a kernel's start without waiting between them.

One thread initialises all of them, one instruction each. Triton 3.6 takes two barriers of one allocation for the same
memory, so it lets the warps wait for each other between any two; that is 0.25 us of a launch with 12 stages. Waits
between two initialisations, with nothing but arithmetic beside, order nothing that the thread itself doesn't, and are
left out; what comes after the last one still waits for it. That holds at a kernel's start, before any warp has used
shared memory. Later releases of Triton have no such waits.
"""

import re

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.ptx_changes import before_assembly, remark

_ASKED = "// envoi barriers 2: mbarriers are set up together "
_REMARK = gl.constexpr(_ASKED + "$0")
_WAIT = re.compile(r"\s*bar\.sync\s+0(, \d+)?;")  # of the first role's warps, or of all where there are no roles
_SETUP = re.compile(r"\s*@(%p\d+) mbarrier\.init\.shared::cta\.b64 \[%r\d+\], \d+;")
# What lies between two of them: addresses are computed, parameters read; the compiler leaves comments and positions.
_NEUTRAL = re.compile(
    r"\s*(//.*|\.loc\s.*|\$L__tmp\d+:|(add|mov|and|or|xor|shl|shr|sub|mul|mad|setp|selp|cvt|ld\.param)\.[^;]*;)?"
)


@gluon.jit
def set_up_together():
    """Let a kernel's mbarriers be initialised one right after the other. Called once, before shared memory is used."""
    remark(_REMARK)


@before_assembly
def without_waits(ptx: str) -> str:
    """Return the PTX of a kernel with the remark without barriers between two initialisations by the same thread."""
    if _ASKED not in ptx:
        return ptx
    kept: list[str] = []
    thread, waits = "", []  # of the last initialisation; the waits since, as positions in `kept`
    for line in ptx.split("\n"):
        setup = _SETUP.fullmatch(line)
        if setup is not None:
            if setup[1] == thread:
                for position in waits:
                    kept[position] = ""
            thread, waits = setup[1], []
        elif _WAIT.fullmatch(line):
            waits.append(len(kept))
        elif not _NEUTRAL.fullmatch(line):
            thread, waits = "", []
        kept.append(line)
    return "\n".join(kept)
