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
WARNING = """\
========= Warning: Race reported between Write access at gemm_kernel+0x6000
=========     and Write access at gemm_kernel+0x6000 [4 hazards]
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


def test_errors_that_are_not_printed_count():
    assert races_in(OF_ROLES + summary(69), TABLES).others == 68


def test_warnings_and_signatures():
    log = OF_ROLES.replace("gemm_kernel+", "gemm_kernel(int *, CUtensorMap_st)+") + WARNING + summary(1, 1)
    found = races_in(log, TABLES)
    assert (found.others, found.warnings, found.shown) == (0, 1, ())
    assert races_in("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", TABLES).others == 1


@pytest.mark.parametrize("log", ["", "========= COMPUTE-SANITIZER\n", OF_ROLES, "========= ERROR SUMMARY: 0 errors\n"])
def test_a_log_without_a_summary_says_nothing(log):
    assert races_in(log, TABLES) is None


def test_two_kernels_of_one_name_do_not_share_a_table():
    """The write is one kernel's table, the read another's."""
    log = OF_A_BUFFER + summary(1)
    assert races_in(log, TABLES).others == 1
    assert races_in(log, {"gemm_kernel": [RoleTable(TABLE.reads, frozenset([0x5000]))]}).others == 0


def test_reports_beyond_the_summary_count():
    assert races_in(OF_A_BUFFER + OF_A_BUFFER + summary(1), TABLES).others == 2


def test_what_cannot_be_read_is_an_error():
    log = OF_ROLES.replace("gemm_kernel+0xf0", "0xf0 of a kernel") + summary(1)
    found = races_in(log, TABLES)
    assert found.others == 1
    assert "an access that can't be read" in found.shown[0]


def line_of(text: str) -> int:
    lines = Path(pipeline.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


STORE, LOAD = "words.index(i).store(", "words.index(i).load("


def test_words_that_mbarriers_hand_over_are_told_apart():
    log = WORDS.format(put=line_of(STORE), get=line_of(LOAD))
    found = races_in(OF_ROLES + log + log + OF_A_BUFFER + summary(4), TABLES, word_places())
    assert (found.of_roles, found.of_words, found.others) == (1, 2, 1)
    assert races_in(log + summary(1), {}).others == 1  # nothing is such a word unless its place says so


@pytest.mark.parametrize(
    ("put", "get", "change"),
    [
        ("self.tiles.arrive_full(", LOAD, {}), ("def put_word", LOAD, {}), (STORE, "def get_word", {}),
        (LOAD, STORE, {}), (STORE, STORE, {}), (STORE, LOAD, {"pipeline.py": "mainloop.py"}),
        (STORE, LOAD, {"fused_kernel": "gemm_kernel"}), (STORE, LOAD, {"Read": "Write"}),
    ],
)  # fmt: skip
def test_every_access_of_a_report_has_to_be_of_such_a_word(put, get, change):
    log = WORDS.format(put=line_of(put), get=line_of(get))
    for old, new in change.items():
        log = log.replace(old, new)
    assert races_in(log + summary(1), {}, word_places()).others == 1
