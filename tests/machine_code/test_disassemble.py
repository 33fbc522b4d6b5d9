"""Parser on stored text, families on single opcodes, and the error if no tool decodes an architecture."""

import pytest
from tools.machine_code import count, disassemble, tools

from tests.machine_code.snippets import CUOBJDUMP, NVDISASM


def bodies(text):
    return {function.name: function.instructions for function in disassemble.parse(text)}


def test_nvdisasm_text():
    tile = bodies(NVDISASM)["tile"]
    assert len(tile) == 20  # without the NOPs after the last branch
    assert [part.address for part in tile] == [16 * place for place in range(20)]
    branch, allocate, mma = tile[2], tile[3], tile[7]
    assert (branch.predicate, branch.opcode, branch.operands) == ("P2", "BRA", ("`(.L_x_0)",))
    assert (allocate.name, allocate.modifiers) == ("UTCATOMSWS", ("FIND_AND_SET", "ALIGN"))
    assert mma.operands == ("gdesc[UR4]", "gdesc[UR6]", "tmem[UR24]", "tmem[UR16]", "idesc[UR17]", "!UPT")
    assert tile[16].operands == ("R5", "R5.reuse", "R6")
    assert (tile[17].predicate, tile[18].opcode, tile[18].operands) == ("!PT", "EXIT", ())


def test_all_functions_are_found():
    assert list(bodies(NVDISASM)) == ["tile", "other"]
    assert [part.opcode for part in bodies(NVDISASM)["other"]] == ["EXIT"]


def test_cuobjdump_text():
    (product,) = bodies(CUOBJDUMP).values()
    assert [part.name for part in product] == ["LDC", "USETMAXREG", "UTMALDG", "HGMMA", "STSM", "SHFL", "EXIT"]
    assert (product[2].predicate, product[2].operands) == ("UP0", ("[UR12]", "[UR6]"))


def test_nothing_is_lost_silently():
    lines = NVDISASM.splitlines(keepends=True)
    gap = "".join(line for line in lines if "/*0070*/" not in line)
    with pytest.raises(ValueError, match=r"line 25: an instruction is missing before '/\*0080\*/"):
        disassemble.parse(gap)
    with pytest.raises(ValueError, match=r"line 26: expected an instruction, got '\?\?\?'"):
        disassemble.parse(NVDISASM.replace("LDTM.x32 R4, tmem[UR13+0xa0] ;", "???"))
    assert disassemble.parse("") == ()


def test_families_of_the_snippets():
    tile, product = bodies(NVDISASM)["tile"], bodies(CUOBJDUMP)["product"]
    assert count.count(tile) == {
        "tensor core": {"UTCHMMA": 1},
        "TMA load": {"UTMALDG.2D": 1},
        "tensor memory load": {"32x32b.x32": 1, "16x64b.x2": 1, "16x32bx2[t0-15].x1": 1, "32x32b.x1": 1},
        "local load (spill)": {"32 bit": 1},
        "local store (spill)": {"64 bit": 1},
        "helper call": {"CALL.REL.NOINC": 1},
        "global load": {"128 bit": 1, "16 bit": 1},
        "shared load": {"32 bit": 1},
        "float arithmetic": {"FMUL": 1},
    }
    assert count.count(product) == {
        "tensor core": {"HGMMA.64x256x16.F32.BF16": 1},
        "TMA load": {"UTMALDG.2D": 1},
        "register budget": {"USETMAXREG.DEALLOC.CTAPOOL 24": 1},
        "shared store": {"STSM.16.M88.4": 1},
        "shuffle": {"SHFL.BFLY": 1},
    }


@pytest.mark.parametrize(
    ("opcodes", "family"),
    [
        ("HGMMA QGMMA IGMMA BGMMA HMMA IMMA QMMA DMMA UTCHMMA UTCQMMA UTCOMMA UTCIMMA", "tensor core"),
        ("UTMASTG UTMAREDG", "TMA store"),
        ("STTM", "tensor memory store"),
        ("LEPC CALL", "helper call"),
        ("BAR SYNCS UTCBAR WARPSYNC UCGABAR_WAIT", "barrier"),
        ("LDG LD", "global load"),
        ("STG ST", "global store"),
        ("RED REDG ATOM ATOMG", "global atomic"),
        ("LDS LDSM", "shared load"),
        ("F2F F2FP F2I I2F I2FP", "convert"),
        ("FADD FFMA FFMA2 FMNMX FSETP", "float arithmetic"),
    ],
)
def test_names_belong_to_one_family(opcodes, family):
    for name in opcodes.split():
        assert [f.title for f in count.FAMILIES if f.pattern.fullmatch(name)] == [family], name


@pytest.mark.parametrize("name", ["MOV", "R2UR", "LDC", "ULDC", "LDCU", "BRA", "EXIT", "IMAD", "UTCATOMSWS", "REDUX"])
def test_the_rest_is_only_in_the_total(name):
    assert count.family_of(name) is None


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E.LTC128B.64", "64 bit"),
        ("LDG.E.ENL2.256", "256 bit"),
        ("STG.E.U8", "8 bit"),
        ("LDG.E.STRONG.SYS", "32 bit"),
        ("LD.E.128", "128 bit, generic"),
    ],
)
def test_widths(opcode, width):
    assert count.width(disassemble.Instruction(0, "", opcode, ())) == width


def fake_tool(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_words_where_nothing_decodes_the_architecture(tmp_path, monkeypatch):
    says = 'test "$1" = --version && echo "Cuda compilation tools, release 12.8, V12.8.55" && exit'
    lost = fake_tool(tmp_path / "lost", f"{says}; echo \"nvdisasm fatal   : Cannot decode 'SM103a'\" >&2; exit 1")
    mute = fake_tool(tmp_path / "mute", says)
    monkeypatch.setattr(tools, "disassemblers", lambda: [lost, mute])
    monkeypatch.setattr(tools, "arch_of", lambda cubin: "sm_103")
    with pytest.raises(disassemble.CannotDisassembleError) as refusal:
        disassemble.disassemble(b"")
    assert str(refusal.value).startswith(
        "nothing here disassembles sm_103 (lost 12.8: Cannot decode 'SM103a'; mute 12.8: printed no instruction); pip"
    )


def test_a_chosen_disassembler_has_to_be_there(monkeypatch, tmp_path):
    monkeypatch.setenv("NVDISASM", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="NVDISASM: expected the path of nvdisasm"):
        tools.disassemblers()
    monkeypatch.setenv("NVDISASM", __file__)
    assert [path.name for path in tools.disassemblers()] == ["test_disassemble.py"]
    with pytest.raises(ValueError, match="can't be run"):
        tools.run_on(tools.disassemblers()[0], "-c", b"")
