"""The gate itself: rules, bands, known spills, and the file of accepted counts."""

import dataclasses

import pytest

from envoi.runtime import triton_compat
from tools.machine_code import gate
from tools.machine_code.count import Record
from tools.machine_code.gate import Accepted, Known


def test_known_spills_are_those_of_the_installed_triton(monkeypatch):
    known = Known(3, 2, "why")
    monkeypatch.setattr(gate, "KNOWN", {"9.9.9": {"k sm_90": known}})
    assert gate.known_of("k sm_90") is None
    monkeypatch.setattr(triton_compat, "VERSION", "9.9.9")
    assert gate.known_of("k sm_90") is known


RECORD = Record(
    kernel="k", arch="sm_90", registers=168, stack_bytes=0, shared_bytes=0, num_warps=12, instructions=1000,
    families={"tensor core": {"HGMMA.64x128x16": 16}, "TMA load": {"UTMALDG.2D": 4}, "wait": {"A": 60}}, ptx_sha256="",
)  # fmt: skip
NEEDS = {"tensor core": "HGMMA", "TMA load": "UTMALDG"}


def changed(**families):
    return dataclasses.replace(RECORD, families={**RECORD.families, **families})


def with_spills(loads, stores):
    return changed(**{"local load (spill)": {"LDL": loads}, "local store (spill)": {"STL": stores}})


def test_what_is_right_passes():
    assert gate.broken(RECORD, "", NEEDS) == []
    assert gate.moved(gate.counts(RECORD), gate.counts(RECORD)) == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (changed(**{"tensor core": {"HMMA.16816": 4}}), "tensor core: expected HGMMA, got HMMA.16816"),
        (changed(**{"TMA load": {}}), "TMA load: expected UTMALDG, got none"),
        (with_spills(3, 2), "spills: 3 loads and 2 stores of local memory, expected none"),
    ],
)
def test_what_is_wrong_is_said(record, words):
    assert gate.broken(record, "", NEEDS) == [words]


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


def test_accepted_counts_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "gate.json"
    accepted = {f"{name} sm_90": Accepted(name, "c0de", 8, 16, {"instructions": 2}) for name in "ba"}
    gate.write(path, accepted)
    assert list(gate.read(path).items()) == sorted(accepted.items())
    assert len(path.read_text().splitlines()) == 4
    monkeypatch.setattr(triton_compat, "VERSION", "9.9.9")
    with pytest.raises(ValueError, match=r"gate.json: counted with Triton .*, this is 9.9.9"):
        gate.read(path)


def test_accepting(tmp_path, monkeypatch):
    path = tmp_path / "gate.json"
    spilling, refused = with_spills(1, 0), ValueError("k: the compiler refuses it")
    results = {"good": RECORD, "bad": spilling, "gone": refused}

    def count(name, arch):
        if isinstance(results[name], ValueError):
            raise results[name]
        return dataclasses.replace(results[name], kernel=name), ""

    monkeypatch.setattr(gate, "targets", lambda: [(name, "sm_90") for name in results])
    monkeypatch.setattr(gate, "needs_of", lambda name, arch: NEEDS)
    monkeypatch.setattr(gate, "count", count)
    monkeypatch.setattr(gate, "measured", dict)
    monkeypatch.setattr(gate, "source_of", lambda name, arch: f"hash of {name}")
    words, right = gate.accept(path)
    assert not right
    assert "bad sm_90: spills: 1 loads and 0 stores of local memory, expected none" in words
    assert "gone sm_90: k: the compiler refuses it" in words
    found = {title: accepted.source for title, accepted in gate.read(path).items()}
    assert found == {"good sm_90": "hash of good", "bad sm_90": ""}, "the tests compile it, and say what is wrong"

    del results["bad"], results["gone"]
    assert gate.accept(path) == ("1 kernels compiled; `git diff` shows which moved", True)
    path.write_text("<<<<<<<")  # a merge conflict
    assert gate.accept(path)[1]
    assert set(gate.read(path)) == {"good sm_90"}
