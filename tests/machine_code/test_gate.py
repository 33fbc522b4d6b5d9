"""The gate itself: rules, bands, known spills, and the file of accepted counts."""

import dataclasses

import pytest

from tools.machine_code import gate
from tools.machine_code.count import Record, serialized
from tools.machine_code.gate import Known

RECORD = Record(
    kernel="k", arch="sm_90", registers=168, stack_bytes=0, shared_bytes=0, num_warps=12, instructions=1000,
    families={"tensor core": {"HGMMA.64x128x16": 16}, "TMA load": {"UTMALDG.2D": 4}, "wait": {"A": 60}}, ptx_sha256="",
)  # fmt: skip
PTX = "wgmma.mma_async.sync.aligned;\n" * 8 + "wgmma.wait_group.sync.aligned 0;\n" * 2
NEEDS = {"tensor core": "HGMMA", "TMA load": "UTMALDG"}


def changed(**families):
    return dataclasses.replace(RECORD, families={**RECORD.families, **families})


def with_spills(loads, stores):
    return changed(**{"local load (spill)": {"LDL": loads}, "local store (spill)": {"STL": stores}})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (changed(**{"tensor core": {"HMMA.16816": 4}}), "tensor core: expected HGMMA, got HMMA.16816"),
        (changed(**{"TMA load": {}}), "TMA load: expected UTMALDG, got none"),
        (with_spills(3, 2), "spills: 3 loads and 2 stores of local memory, expected none"),
        (
            dataclasses.replace(RECORD, serialized=serialized(["QGMMA.64x64x32", "WARPGROUP.DEPBAR.LE"] * 8, PTX)),
            "ptxas runs products one after the other: 8 waits for 8 products, the PTX has 2 for 8",
        ),
    ],
)
def test_what_is_wrong_is_said(record, words):
    assert gate.broken(record, "", NEEDS) == [words]


def test_products_may_be_waited_for_as_often_as_the_ptx_says():
    unrolled = [*["HGMMA.64x64x16"] * 16, *["WARPGROUP.DEPBAR.LE"] * 4, "WARPGROUP.ARRIVE"]
    assert serialized(unrolled, PTX) == ""
    assert serialized(["FADD"], "") == ""
    each = PTX + "wgmma.wait_group.sync.aligned 0;\n" * 6
    assert serialized(["HGMMA.64x64x16", "WARPGROUP.DEPBAR.LE"] * 8, each) == ""


def test_known_spills_can_only_shrink():
    known = Known(3, 2, "why")
    assert gate.broken(with_spills(3, 2), "", NEEDS, known) == []
    assert "known are 3 and 2 (why)" in gate.broken(with_spills(4, 2), "", NEEDS, known)[0]
    assert "fewer than the known 3 and 2" in gate.broken(RECORD, "", NEEDS, known)[0]


def test_only_the_guards_of_tensor_memory_may_be_called():
    record = changed(**{"helper call": {"CALL.REL.NOINC": 1}})
    guard = "CALL.REL.NOINC `($__internal_0_$__cuda_sm10x_tcgen05_guardrail_trap_phase_invalid_during_alloc) ;"
    assert gate.broken(record, guard, NEEDS) == []
    nameless = "CALL.REL.NOINC `(.L_x_3) ;\n.L_x_3:\n  /*10*/   {} ;\n  /*20*/   RET.REL.NODEC R2 ;\n"
    assert gate.broken(record, nameless.format("BPT.TRAP 0x1"), NEEDS) == []
    assert ".L_x_3" in gate.broken(record, nameless.format("MUFU.RCP R1, R2"), NEEDS)[0]
    divide = "CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32) ;"
    assert "sm3x_div" in gate.broken(record, divide, NEEDS)[0]
    assert "not in the disassembly" in gate.broken(record, "", NEEDS)[0]


def test_bands():
    accepted = gate.counts(RECORD)
    for label, free in (("instructions", 50), ("wait", 4), ("tensor core", 0), ("TMA load", 0)):
        for sign in (-1, 1):
            assert gate.moved({**accepted, label: accepted[label] + sign * free}, accepted) == []
            assert gate.moved({**accepted, label: accepted[label] + sign * (free + 1)}, accepted)
    assert gate.moved({**accepted, "TMA store": 1}, accepted) == ["TMA store: 1, accepted 0"]
    assert gate.moved(accepted, None) == ["nobody accepted its counts yet"]
