"""racecheck's logs: which errors are Triton's own table of roles, and which aren't."""

from pathlib import Path

import pytest

from envoi.ops.gemm.hopper import pipeline
from tests.promises.hazards import races_in, word_places
from tools.machine_code.role_table import RoleTable

TABLE = RoleTable(frozenset([0xF0]), frozenset([0x31C0, 0x4700]))
TABLES = {"gemm_kernel": [RoleTable(frozenset([0x110]), frozenset([0x5000])), TABLE]}
OF_ROLES = """\
========= Error: Race reported between Write access at gemm_kernel+0x31c0 in /site/envoi/gemm/hopper/kernel.py:68
=========     and Read access at gemm_kernel+0xf0 in kernel.py:68 [64 hazards]
=========     and Write access at gemm_kernel+0x4700 [128 hazards]
=========
"""
OF_A_BUFFER = """\
========= Error: Race reported between Write access at gemm_kernel+0x5000 in /site/envoi/epilogue/tile.py:9
=========     and Read access at gemm_kernel+0xf0 [4 hazards]
=========
"""
WORDS = """\
========= Error: Race reported between Write access at fused_kernel+0x5500 in /site/envoi/gemm/hopper/pipeline.py:{put}
=========     and Read access at fused_kernel+0x740 in /site/envoi/gemm/hopper/pipeline.py:{get} [64 hazards]
=========     and Read access at fused_kernel+0x80c0 in pipeline.py:{get} [64 hazards]
=========
"""


def summary(errors: int, warnings: int = 0) -> str:
    return (
        f"========= RACECHECK SUMMARY: {errors + warnings} hazards displayed ({errors} errors, {warnings} warnings)\n"
    )


def test_the_table_of_roles_is_told_apart():
    found = races_in(OF_ROLES + OF_A_BUFFER + summary(2), TABLES)
    assert (found.errors, found.of_roles, found.others) == (2, 1, 1)
    assert found.shown == ("write of gemm_kernel+0x5000 in tile.py:9 and read of gemm_kernel+0xf0",)


@pytest.mark.parametrize(
    "tables",
    [
        {}, {"gemm_kernel": []}, {"router_kernel": [TABLE]},
        {"gemm_kernel": [RoleTable(frozenset([0xF0]), frozenset([0x31C0]))]},
        {"gemm_kernel": [RoleTable(frozenset([0xF0, 0x31C0, 0x4700]))]},
        {"gemm_kernel": [RoleTable(frozenset([0xF0]), frozenset([0x31C0])), RoleTable(writes=TABLE.writes)]},
    ],
)  # fmt: skip
def test_every_access_of_a_report_has_to_be_one_of_the_table(tables):
    assert races_in(OF_ROLES + summary(1), tables).others == 1


@pytest.mark.parametrize("log", ["", "========= COMPUTE-SANITIZER\n", OF_ROLES, "========= ERROR SUMMARY: 0 errors\n"])
def test_a_log_without_a_summary_says_nothing(log):
    assert races_in(log, TABLES) is None


def line_of(text: str) -> int:
    lines = Path(pipeline.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


STORE, LOAD = "words.index(i).store(", "words.index(i).load("


def test_words_that_mbarriers_hand_over_are_told_apart():
    log = WORDS.format(put=line_of(STORE), get=line_of(LOAD))
    found = races_in(OF_ROLES + log + log + OF_A_BUFFER + summary(4), TABLES, word_places())
    assert (found.of_roles, found.of_words, found.others) == (1, 2, 1)
    assert races_in(log + summary(1), {}).others == 1  # nothing is such a word unless its place says so
