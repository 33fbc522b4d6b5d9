"""Names of packages, modules and operators: each stands for one thing, and every module can be imported by its name."""

import json

from tests.helpers import fresh

# `import x.y.z as module` goes by attributes: x, then its y, then that one's z.
IMPORT_EACH = """
import json, pkgutil, types
import envoi

def is_itself(name):
    found = {}
    try:
        exec(f"import {name} as module", found)
    except ImportError:
        return False
    return type(found["module"]) is types.ModuleType and found["module"].__name__ == name

names = ["envoi", *(info.name for info in pkgutil.walk_packages(envoi.__path__, "envoi."))]
print(json.dumps({name: is_itself(name) for name in names}))
"""
# For one version: the earlier name of the language's module, which the decorator hides.
EARLIER = "envoi.epilogue"


def test_every_module_can_be_imported_by_its_name():
    done = fresh.run(IMPORT_EACH)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 250
    assert {name for name, itself in found.items() if not itself} == {EARLIER}


def test_no_module_runs_a_program_when_it_is_imported():
    done = fresh.run("import envoi.__main__, envoi.cli")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
