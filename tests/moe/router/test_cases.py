"""Cases of the router: each is a kernel of its own, and all ways to cut the work are among them."""

from envoi.runtime.kernel_case import kernel_key
from tools.kernel_cases import kernel_cases
from tools.kernel_cases import router as cases
from tools.kernel_cases.router import CASES


def test_all_cases_are_listed_and_differ():
    listed = {name: case.about for name, case in kernel_cases().items() if name.startswith("router")}
    assert {case.title for case in CASES} == set(listed)
    assert listed["router-sm90-one-token"].startswith("router on Hopper: top 8 of 256 experts by deepseek")
    kernels = {kernel_key(*cases.launch_of(case)) for case in CASES}
    assert len(kernels) == len(CASES), "two cases are one kernel"


def test_every_way_to_cut_the_work_occurs():
    cuts = []
    for case in (case for case in CASES if case.kernel == "sm90"):
        cuts.append(cases.launch_of(case).arguments[-2])
    least_of = {
        "parts_n": 1,
        "parts_k": 1,
        "all_parts_wait": 0,
        "polls_sums": 0,
        "single_fill": 0,
        "turns": 1,
        "tile": 64,
        "rest_n": 0,
        "in_runs": 0,
    }
    for name, least in least_of.items():
        ways = {int(getattr(tiling, name)) > least for tiling in cuts}
        assert len(ways) == 2, f"{name} is {ways} in all cases: other sizes are needed"
