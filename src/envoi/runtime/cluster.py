# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Clusters of programs, of Hopper and later: neighbours that run at the same time and write each other's shared memory.

    form(PROGRAMS)    once, anywhere in a kernel: each PROGRAMS neighbouring programs of the grid are a cluster

Triton's own clusters run one program. The grid has to be a multiple of PROGRAMS, at most 8 on every GPU.
"""

import re

import triton
import triton.language as tl

from envoi.runtime.ptx_changes import before_assembly

_ASKED = "// envoi cluster 1: programs "
_SIZE = re.compile(re.escape(_ASKED) + r"(\d+) ")
_THREADS = re.compile(r"^\.reqntid ", re.MULTILINE)


@triton.constexpr_function
def _remark(programs):
    return f"{_ASKED}{programs} $0"


@triton.jit
def form(PROGRAMS: tl.constexpr):
    """Run each PROGRAMS neighbouring programs as a cluster."""
    TEXT: tl.constexpr = _remark(PROGRAMS)
    tl.inline_asm_elementwise(TEXT, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive():
    """Count this thread as arrived at a barrier of the cluster, which orders nothing but mbarriers that it set up."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; // $0", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait():
    """Wait until all threads of the cluster have arrived."""
    tl.inline_asm_elementwise("barrier.cluster.wait.acquire.aligned; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@before_assembly
def with_clusters(ptx: str) -> str:
    """Return the PTX of a kernel with the remark as one whose programs form clusters."""
    asked = _SIZE.search(ptx)
    if asked is None:
        return ptx
    return _THREADS.sub(f".explicitcluster\n.reqnctapercluster {asked[1]}, 1, 1\n.reqntid ", ptx, count=1)
