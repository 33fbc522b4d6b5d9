"""Machine code of every kernel keeps the rules: no spills, the required instructions, counts near the accepted.

A kernel is compiled, once, if the hash of what it is compiled from differs from the accepted one's: else its machine
code is the accepted one.
"""

import json
import re
import warnings
from functools import lru_cache
from pathlib import Path

import pytest

from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.config import shared_bytes
from envoi.runtime import triton_compat
from envoi.runtime.devices import SHARED_BYTES
from tests.helpers.slow import mostly_slow
from tests.helpers.tools import pairs
from tools.kernel_cases import EVERY_ARCH
from tools.kernel_cases import gemm_hopper as hopper
from tools.machine_code import gate
from tools.machine_code.compile import Binary, compile_launch
from tools.machine_code.count import Record, record_of
from tools.machine_code.together import disassemble_together

ACCEPTED = Path(__file__).with_name("gate.json")
ACCEPTED_TITLES = json.loads(ACCEPTED.read_text())["kernels"]
ACCEPT = "if that is meant: make gate, and commit tests/machine_code/gate.json"
ARCH = "sm_90"
GROUP = 8
L2_SENT = "gemm-sm90-experts-l2-sent-fp8-block128"
# Bytes a thread that measured configs spill, each once a tile: those that don't are slower.
SPILLED = {
    # Values of the tile's corner, beside 256 accumulators; by eight warps, without spills, 1.02 of the time on an H200.
    "gemm-sm90-tuned-132sm-8192x8192x8192-2B-tma-side": 24
}


@lru_cache(maxsize=1)
def measured(name: str) -> Binary:
    """Compile a kernel of a measured config. The tests of one follow each other, so one place is enough."""
    return compile_launch(gate.measured()[name].launch(), ARCH)


@lru_cache
def groups() -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    """Return the kernels that are disassembled together, by each of them: a few that follow each other."""
    found = {}
    for arch in EVERY_ARCH:
        targets = tuple(target for target in gate.targets() if target[1] == arch and unchanged(*target) is None)
        for first in range(0, len(targets), GROUP):
            found |= dict.fromkeys(targets[first : first + GROUP], targets[first : first + GROUP])
    return found


@lru_cache(maxsize=2 * len(EVERY_ARCH))
def counted(targets: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], tuple[Record, str] | ValueError]:
    """Compile and count kernels of one architecture; the error of each that isn't compiled."""
    found: dict = {}
    for target in targets:
        try:
            found[target] = compile_launch(gate.cases()[target[0]].launch(), target[1])
        except ValueError as error:
            found[target] = error
    made = {target: binary for target, binary in found.items() if isinstance(binary, Binary)}
    listings = disassemble_together([binary.cubin for binary in made.values()], targets[0][1])
    for (target, binary), listing in zip(made.items(), listings, strict=True):
        found[target] = record_of(binary, target[0], listing)
    return found


def record(name: str, arch: str) -> tuple[Record, str]:
    """Return a kernel's record and its disassembly."""
    found = counted(groups().get((name, arch), ((name, arch),)))[name, arch]
    if isinstance(found, ValueError):
        raise found
    return found


def fail_if(said: str) -> None:
    if said:
        pytest.fail(said, pytrace=False)


@lru_cache
def unchanged(name: str, arch: str) -> gate.Accepted | None:
    """Return what is accepted of a kernel, if it is compiled from the same source, by the same compiler."""
    if pairs.default().triton != triton_compat.VERSION:
        return None
    known = accepted().get(f"{name} {arch}")
    return known if known is not None and known.source == gate.source_of(name, arch) else None


def keeps_the_rules(name: str, arch: str) -> None:
    title = f"{name} {arch}"
    known, same = gate.known_of(title), unchanged(name, arch)
    if known is not None:
        spills = f"{known.loads} loads, {known.stores} stores"
        warnings.warn(f"{title} spills: {spills}; {known.reason}", stacklevel=1)
    # By the rules other than spills it was judged when it was accepted.
    wrong = compiled_breaks(name, arch) if same is None else list(gate.spilled(same.counts, known))
    fail_if(f"{title}: {'; '.join(wrong)}" if wrong else "")


def compiled_breaks(name: str, arch: str) -> list[str]:
    """Return what is wrong with a kernel that is compiled now."""
    found, text = record(name, arch)
    wrong = gate.broken(found, text, gate.needs_of(name, arch), gate.known_of(found.title))
    if not wrong and pairs.default().triton == triton_compat.VERSION:  # under another only the rules can be held
        warnings.warn("compiled, since its source isn't the accepted one: `make gate` accepts all", stacklevel=1)
        known = accepted().get(found.title)
        moved = gate.moved(gate.counts(found), known.counts if known is not None else None)
        wrong = [*moved, ACCEPT] if moved else []
    return wrong


def doesnt_spill(name: str, arch: str) -> None:
    stack_bytes, known = (unchanged(name, arch) or measured(name)).stack_bytes, SPILLED.get(name, 0)
    assert stack_bytes == known, f"{name}: {stack_bytes} bytes a thread, where spilled registers go; known are {known}"


def fits_in_shared_memory(name: str, arch: str) -> None:
    case = next(case for case in hopper.CASES if case.title == name)
    call, config = hopper.planned(hopper.inputs(case))
    taken = (unchanged(name, arch) or record(name, arch)[0]).shared_bytes
    assert taken <= shared_bytes(host.problem_of(call), config, call.code) <= SHARED_BYTES


@lru_cache
def accepted() -> dict[str, gate.Accepted]:
    try:
        return gate.read(ACCEPTED)
    except ValueError as error:
        pytest.fail(f"{error}; {ACCEPT}", pytrace=False)


def checks():
    """Return (name, arch, verdict); those of one kernel follow each other."""
    compiles, under_the_default = pytest.mark.compiles, pytest.mark.default_triton
    found, hopper_gemms, targets = [], {case.title for case in hopper.CASES}, gate.targets()
    # Measured configs by the accepted file, held to them below: to plan them takes seconds, and each process collects.
    titles = {f"{name} {arch}" for name, arch in targets}
    measured = [title.removesuffix(f" {ARCH}") for title in ACCEPTED_TITLES if title not in titles]
    for name, arch in [*targets, *((name, ARCH) for name in measured)]:
        # Configs were measured under the default pair's Triton.
        first = (doesnt_spill, [compiles, under_the_default]) if name in measured else (keeps_the_rules, [compiles])
        verdicts = [first]
        if name in hopper_gemms:
            verdicts.append((fits_in_shared_memory, [compiles, under_the_default]))
        for verdict, marks in verdicts:
            found.append(pytest.param(name, arch, verdict, id=f"{name} {arch} {verdict.__name__}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "arch", "verdict"), checks())
def test_machine_code(name, arch, verdict):
    verdict(name, arch)


def test_nothing_is_accepted_that_is_gone():
    titles = {f"{name} {arch}" for name, arch in [*gate.targets(), *((name, ARCH) for name in gate.measured())]}
    assert set(ACCEPTED_TITLES) == titles, ACCEPT
    assert all(gate.ALLOWED_CALLS.values())
    assert set(gate.KNOWN) <= {pair.triton for pair in pairs.pairs()}
    for known in gate.KNOWN.values():
        assert set(known) <= titles
        assert all(one.reason for one in known.values())


@pytest.mark.compiles
@pytest.mark.default_triton
@pytest.mark.parametrize("name", mostly_slow([L2_SENT, "experts-both-gemms-sent"], [L2_SENT]))
def test_no_trip_to_the_l2_stands_between_products_and_scattered_rows(name):
    """A consumer loads its rows' addresses before it multiplies: between two products it stores, and loads nothing."""
    opcodes = re.findall(r"\b(?:QGMMA|LDG|SHFL\.BFLY|STG\.E\.128)\b", record(name, ARCH)[1])
    num_runs = 0
    for index in range(1, len(opcodes)):
        if opcodes[index] == "STG.E.128" != opcodes[index - 1]:
            before = opcodes[max(i for i in range(index) if opcodes[i] == "QGMMA") : index]
            if "SHFL.BFLY" not in before:  # else L1, which quantises
                assert "LDG" not in before, f"rows wait for {before.count('LDG')} loads"
                num_runs += 1
    assert num_runs == 2, "one for each consumer"
