"""Registers that instructions read too early or too late."""

import pytest

from tools.machine_code import gate
from tools.machine_code.operands import cast_early, overwritten

ISSUED = "/*0010*/ QGMMA.64x16x32.F32.E4M3.E4M3 R24, R40, gdesc[UR20], RZ, !UPT, gsb0 ;\n"
NEXT = "/*0020*/ QGMMA.64x16x32.F32.E4M3.E4M3 R32, R44, gdesc[UR20], RZ, !UPT, gsb0 ;\n"
WAIT = "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x{} ;\n"
WRITES = (
    "LOP3.LUT R43, R12, 0x98989898, RZ, 0xc0, !PT", "@P0 LDG.E.128 R40, desc[UR14][R68.64]", "LDS.64 R42, [R59]",
    "LDG.E.128 R37, desc[UR14][R2.64]", "SHFL.BFLY PT, R41, R24, 0x10, 0x1f", "IMAD.WIDE.U32 R42, R24, 0x168, R112",
    "IADD3 R40, P1, R1, R2, RZ", "QGMMA.64x16x32.F32.E4M3.E4M3 R36, R48, gdesc[UR20], RZ, !UPT, gsb0",
)  # fmt: skip
READS = (
    "ISETP.GE.AND P0, PT, R41, R2, PT", "STG.E.64 desc[UR14][R40.64], R42", "FADD R44, R40, R41", "STS.128 [R40], R40",
    "LDG.E.64 R38, desc[UR14][R40.64]", "LOP3.LUT P2, RZ, R40, 0x1f, R41, 0xf8, !PT", "R2UR UR4, R40", "EXIT",
    "LDGSTS.E.BYPASS.128 [R40], desc[UR14][R42.64]",
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_wait_is_found(write):
    line = f"/*0040*/ {write} ;\n"
    assert len(overwritten(ISSUED + line)) == 1
    assert overwritten(line + ISSUED + WAIT.format(0) + line) == ()
    assert overwritten(ISSUED + NEXT + WAIT.format(1) + line) == ()
    assert len(overwritten(ISSUED + NEXT + WAIT.format(2) + line)) == 1


@pytest.mark.parametrize("read", READS)
def test_what_reads_is_allowed(read):
    assert overwritten(f"{ISSUED}/*0040*/ {read} ;\n") == ()


def test_the_second_of_two_in_flight_keeps_its_registers():
    line = "/*0040*/ VIADD R45, R45, 0x1 ;\n"
    assert overwritten(ISSUED + NEXT + WAIT.format(1) + line) == ("0040: VIADD R45, R45, 0x1",)


CAST, BACK = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R8, R9, R8, RZ", "F2FP.F16.E4M3.UNPACK_B R19, R8"


@pytest.mark.parametrize("first", [CAST, "LDSM.16.M88.4 R8, [R4]", "LDG.E.64 R7, desc[UR4][R2.64]"])
def test_a_cast_back_reads_what_is_cast(first):
    assert cast_early(lines(first, BACK, CAST)) == ()


@pytest.mark.parametrize("first", ["S2R R8, SR_TID.X", "IADD3 R7, R8, R9, RZ"])
def test_a_cast_back_that_comes_first_is_found(first):
    assert cast_early(lines(first, BACK, CAST)) == (f"0010: {BACK}",)


def lines(*instructions: str) -> str:
    return "".join(f"/*{16 * i:04x}*/ {x} ;\n" for i, x in enumerate(instructions))


@pytest.mark.slow  # only another assembler forgets them
def test_a_kernel_keeps_them():
    _, text = gate.count("w4a16-few-l1-wide", "sm_90")
    assert overwritten(text) == ()
    assert overwritten(text.replace("WARPGROUP.DEPBAR", "NOP")) != ()
