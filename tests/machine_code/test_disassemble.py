"""Parser on stored text, families on single opcodes, and the error if no tool decodes an architecture."""

import pytest
import torch

from envoi.runtime.program import Launch
from tests.machine_code import kernels
from tests.machine_code.snippets import NVDISASM
from tools.kernel_cases import kernel_cases
from tools.machine_code import count, disassemble, together
from tools.machine_code.compile import compile_launch
from tools.machine_code.together import disassemble_together, functions_of


def test_opcodes_of_all_functions():
    found = disassemble.parse(NVDISASM)
    assert list(found) == ["tile", "other"]
    assert found["other"] == ["EXIT"]
    tile = found["tile"]
    assert len(tile) == 20  # without the NOPs after the last branch
    assert tile[2:8] == [
        "BRA", "UTCATOMSWS.FIND_AND_SET.ALIGN", "BRA", "CALL.REL.NOINC", "UTMALDG.2D", "UTCHMMA",
    ]  # fmt: skip
    assert tile[-4:] == ["FMUL", "LDS", "EXIT", "BRA"]


def test_nothing_is_lost_silently():
    lines = NVDISASM.splitlines(keepends=True)
    gap = "".join(line for line in lines if "/*0070*/" not in line)
    with pytest.raises(ValueError, match=r"line 25: an instruction is missing before '/\*0080\*/"):
        disassemble.parse(gap)
    with pytest.raises(ValueError, match=r"line 26: expected an instruction, got '\?\?\?'"):
        disassemble.parse(NVDISASM.replace("LDTM.x32 R4, tmem[UR13+0xa0] ;", "???"))
    assert disassemble.parse("") == {}


def test_families_of_the_snippet():
    assert count.count(disassemble.parse(NVDISASM)["tile"]) == {
        "tensor core": {"UTCHMMA": 1},
        "TMA load": {"UTMALDG.2D": 1},
        "tensor memory load": {"LDTM.x32": 1, "LDTM.16dp64bit.x2": 1, "LDTM.16dp32bit_t0_t15": 1, "LDTM": 1},
        "local load (spill)": {"LDL.LU": 1},
        "local store (spill)": {"STL.64": 1},
        "helper call": {"CALL.REL.NOINC": 1},
        "global load": {"LDG.E.128": 1, "LDG.E.U16.CONSTANT": 1},
        "shared load": {"LDS": 1},
        "float arithmetic": {"FMUL": 1},
    }


def fake_tool(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_words_where_nothing_decodes_the_architecture(tmp_path, monkeypatch):
    says = 'test "$1" = --version && echo "Cuda compilation tools, release 12.8, V12.8.55" && exit'
    lost = fake_tool(tmp_path / "lost", f"{says}; echo \"nvdisasm fatal   : Cannot decode 'SM103a'\" >&2; exit 1")
    mute = fake_tool(tmp_path / "mute", says)
    monkeypatch.setattr(disassemble, "disassemblers", lambda: [lost, mute])
    with pytest.raises(disassemble.CannotDisassembleError) as refusal:
        disassemble.disassemble(b"", "sm_103")
    assert str(refusal.value).startswith(
        "nothing here disassembles sm_103 (lost 12.8: Cannot decode 'SM103a'; mute 12.8: printed no instruction); pip"
    )


def test_kernels_together_are_as_each_alone():
    x = torch.zeros(1024)
    operands = Launch(kernels.with_operands, (1,), (x, (x, 0.5, 1.0), x, 1024), {"num_warps": 2})
    launches = [operands, kernels.crowded_launch(8192, num_warps=1), kernel_cases()["gemm-sm100"].launch(), operands]
    cubins = [compile_launch(launch, "sm_100").cubin for launch in launches]
    alone = [disassemble.disassemble(cubin, "sm_100") for cubin in cubins]
    assert [len(listing.functions) for listing in alone] == [1, 1, len(functions_of(cubins[2])), 1]
    assert [found.functions for found in disassemble_together(cubins, "sm_100")] == [one.functions for one in alone]
    assert disassemble_together(cubins, "sm_100")[2].text == alone[2].text  # it calls others, by their names


def test_without_a_tool_for_the_code_alone_each_is_disassembled(monkeypatch):
    cubins = [compile_launch(kernels.crowded_launch(512), "sm_90").cubin]
    monkeypatch.setattr(together, "_lines", lambda *_: [])
    assert disassemble_together(cubins, "sm_90") == [disassemble.disassemble(cubins[0], "sm_90")]
