"""Clusters of programs: what is added to a kernel's PTX."""

from functools import partial

from envoi.runtime.cluster import with_clusters
from tools.kernel_cases.indexer import call_of_fast
from tools.kernel_cases.planning import launch_of_call
from tools.machine_code.compile import compile_launch

SIZE = ".explicitcluster\n.reqnctapercluster {}, 1, 1\n.reqntid 512\n"


def test_other_kernels_stay_as_they_are():
    ptx = ".visible .entry kernel(\n)\n.reqntid 512\n{\n\tret;\n}\n"
    assert with_clusters(ptx) == ptx


def test_programs_of_a_row_are_a_cluster():
    launch = launch_of_call(partial(call_of_fast, "position", 512, 3), "set_kernel")
    assert launch.grid == (3 * 4,)
    assert SIZE.format(4) in compile_launch(launch, "sm_90").ptx
