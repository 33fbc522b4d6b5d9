"""The page's table of checkpoints is what loading each case says."""

from tests.checkpoints.table import PAGE, with_table


def test_the_page_has_what_the_cases_say():
    page = PAGE.read_text()
    assert with_table(page) == page
