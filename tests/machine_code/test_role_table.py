"""Triton's table of roles in machine code."""

import pytest

from tools.machine_code import gate
from tools.machine_code.compile import compile_launch
from tools.machine_code.disassemble import disassemble
from tools.machine_code.role_table import RoleTable, role_table

TEXT = """\
        /*00e0*/                   UMOV UR51, 0x400 ;
        /*0120*/                   LDS.U8 R2, [R2+UR52+0x33054] ;
        /*0130*/                   ISETP.GT.U32.AND P0, PT, R2, 0x4, PT ;
.L_x_124:
        /*01a0*/                   BRX R2 -0x1b0 ;
        /*1cb0*/                   STS [UR8+0x33058], R13 ;
        /*1cc0*/                   STS.64 [R11+UR8+0x32000], R2 ;
        /*1cd0*/              @!P0 STS.64 [R4+0x3305c], R6 ;
        /*1ce0*/                   STS [UR8+0x33050], R13 ;
"""


def test_what_loads_and_stores_it():
    found = RoleTable(frozenset([0x120]), frozenset([0x1CB0, 0x1CD0]))
    assert role_table(TEXT) == found
    assert role_table(TEXT.replace("0x33054", "0x33050")) == found, "a first role of eight warps"
    assert role_table(TEXT.replace("[R2+UR52+", "[UR52+")) == found, "a warp's number that all its threads share"
    assert role_table(TEXT.replace("[R2+UR52+", "[R2+")) == found


@pytest.mark.parametrize("without", ["LDS.U8", "BRX"])
def test_without_a_branch_by_a_byte_there_is_none(without):
    assert role_table(TEXT.replace(without, "MOV")) == RoleTable()


@pytest.mark.parametrize(
    ("name", "has_roles"),
    [
        ("gemm-sm90-few", True),
        ("router-sm90-one-token", False),
    ],
)
def test_of_a_kernel(name, has_roles):
    """At least the load, and the stores before the roles start and when they have ended."""
    binary = compile_launch(gate.cases()[name].launch(), "sm_90")
    found = role_table(disassemble(binary.cubin, "sm_90").text)
    assert (len(found.reads), len(found.writes) >= 2) == (has_roles, has_roles)
