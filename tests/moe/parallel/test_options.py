"""Options of ExpertParallel that are deprecated."""

import warnings

from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases

REMOVED = "tokens, L1 and L2 in one launch took 1.02 times as long as in two over 12 layers on 4 GPUs, and was removed"


def opened(rank: int, num_ranks: int) -> list[tuple[str, list[str]]]:
    found = []
    for options in ({}, {"fused": None}, {"fused": False}, {"fused": True}, {"fused": rank == 0}, {"fused": "yes"}):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                cases.open_parallel(make(), "bf16", rank, [4, 8], **options).close()
                text = ""
            except ValueError as error:
                text = str(error)
        found.append((text, [str(w.message) for w in warned if w.category is DeprecationWarning]))
    return found


def test_fused_warns_where_it_does_nothing_and_is_refused_where_it_was_slower():
    for rank, outcome in enumerate(run_ranks(2, opened)):
        assert outcome.text == ""
        default, none, false, true, of_rank_0, word = outcome.value
        assert default == none == ("", [])
        assert false == ("", ["fused: False is what ExpertParallel does; leave the argument away"])
        assert true == (f"fused: expected None or False, got True; {REMOVED}", [])
        assert word == (f"fused: expected None or False, got 'yes'; {REMOVED}", [])
        text = of_rank_0[0]
        assert text == true[0] if rank == 0 else text == f"rank 0 of the group refused its arguments: {true[0]}"
