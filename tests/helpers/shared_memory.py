"""Shared-memory allocation of a kernel as Triton decides it, read before machine code is generated."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from triton._C.libtriton import ir, nvidia, passes

from envoi.runtime import triton_compat
from envoi.runtime.program import Launch
from tools.machine_code.compile import arguments_of

PTX_VERSION = 86
OFFSET = re.compile(r"allocation\.offset = (\d+)")
SHAPE = re.compile(r"memdesc<((?:\d+x)+)(\w+),")
BITS = re.compile(r"\d+")
BARRIER = "i64"  # no other buffer of ours has such elements


@dataclass(frozen=True)
class Place:
    """Range of one operation's memory. size: of scratch memory only the first byte is known."""

    offset: int
    size: int
    operation: str
    is_barrier: bool

    def meets(self, other: "Place") -> bool:
        """Return whether two ranges share a byte."""
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


def in_barriers(launch: Launch, arch: str, folder: Path) -> list[str]:
    """Return operations whose memory is at another time a barrier's, and "none" if the kernel has no barriers."""
    found = [place_of(line) for line in allocated(launch, arch, folder).splitlines() if OFFSET.search(line)]
    barriers = [place for place in found if place.is_barrier]
    if not barriers:
        return ["none"]
    # The arguments of a warp partition may overlap: they are read before anything else runs.
    others = [place for place in found if "ttg.warp_specialize(" not in place.operation]
    return [x.operation for b in barriers for x in others if x is not b and x.meets(b)]


def place_of(line: str) -> Place:
    """Return the range of an operation, from its printed form."""
    offset = OFFSET.search(line)
    assert offset is not None
    shape = SHAPE.search(line.split("->")[-1]) if "ttg.local_alloc" in line else None
    size = 1
    if shape is not None:
        bits = BITS.search(shape[2])
        assert bits is not None, line
        size = prod(int(side) for side in shape[1].rstrip("x").split("x")) * int(bits[0]) // 8
    return Place(int(offset[1]), size, line.strip(), shape is not None and shape[2] == BARRIER)


def allocated(launch: Launch, arch: str, folder: Path) -> str:
    """Return the kernel's operations, each with its range in shared memory, if it has any."""
    kernel = triton_compat.compile_for(launch.kernel, *arguments_of(launch, arch))
    path = folder / "kernel.ttgir"
    path.write_text(kernel.asm["ttgir"])
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, int(arch.removeprefix("sm_")), PTX_VERSION)
    manager.run(module, "allocated")
    return str(module)
