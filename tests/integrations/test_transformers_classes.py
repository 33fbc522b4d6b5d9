"""Every experts class of the installed transformers: as good by Envoi as by its own code, and listed in the table."""

import pytest
import transformers

from envoi.integrations.transformers import unserved
from tests.helpers.accuracy import relative_error
from tests.integrations import classes

pytestmark = pytest.mark.usefixtures("registered")

ALL = classes.names()
REFUSED = {"MuseSparkExperts": "expected experts whose outputs are summed as they are, got a norm after each"}


def test_there_are_as_many_as_transformers_has():
    assert len(ALL) >= 55
    assert len({name for _, name in ALL}) == len(ALL)


@pytest.mark.parametrize(("code", "name"), ALL, ids=[name for _, name in ALL])
def test_it_runs_by_envoi(code, name):
    module = classes.build(code, name).module
    assert unserved(module) == REFUSED.get(name)
    if name in REFUSED:  # none that 5.17 has
        return
    got, want = classes.outputs(module)
    assert 0 < relative_error(got, want) < 0.006


def test_the_table_says_what_was_found():
    version, said = classes.documented()
    found = {name.split()[1]: what for name, what in classes.found().items()}
    both = set(said) & set(found)
    assert len(both) >= 50
    assert {name: said[name] for name in both} == {name: found[name] for name in both}
    if version == transformers.__version__:  # another version may have more, or fewer
        assert set(said) == set(found), "python -m tests.integrations.classes"
