# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Moments that a traced kernel notes by the GPU's clock: the device half of `envoi.runtime.timeline`.

A kernel that can be traced has a last parameter `trace`, None unless it is: then nothing of this is compiled. Tracks
have one writer each, a role or a whole program, so nothing is counted by atomics.
"""

import triton
import triton.language as tl

from envoi.runtime import timeline

WORDS: tl.constexpr = tl.constexpr(timeline.WORDS)


@triton.jit
def note_begin(trace, role, event, label):
    """Note the first moment of a role's event. label: what it is about, such as a tile. trace: a Trace, or None."""
    if trace is not None:  # noqa: SIM102 - known when compiled, and without one there is no room
        if event < trace.room:
            sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, False, 1)
            tl.store(_record(trace, role, event), (sm.to(tl.int64) << 32) + label + 1)
    note_moment(trace, role, event, 0)


@triton.jit
def note_moment(trace, role, event, number: tl.constexpr):
    """Note moment `number` of a role's event, after all that the role has done so far. trace: a Trace, or None."""
    if trace is not None:  # noqa: SIM102 - known when compiled, and without one there is no room
        if event < trace.room:
            time = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
            tl.store(_record(trace, role, event) + 1 + number, time)


@triton.jit
def _record(trace, role, event):
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    return trace.records + ((program * trace.num_roles + role) * trace.room + event).to(tl.int64) * WORDS
