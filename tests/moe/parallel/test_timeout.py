"""PeerTimeout: what it says, and that it survives the way between processes."""

import pickle

import pytest

from envoi import PeerTimeout

CASES = {
    "rank 3 is lost": ([3], "dispatch", 2.0),
    "rank 1 (this one) was late": ([1], "dispatch", 2.0, True, 1),
    "rank 1 was late: it is there": ([1], "dispatch", 2.0, True, 0),
    "all ranks are there": ([], "combine", 2.0),
    "the store is gone": ([], "combine", 2.0, False, None, "gone"),
    "no connection to the store's host": ([0, 1], "combine", 2.0, False, 2, "silent"),
}


@pytest.mark.parametrize("words", CASES)
def test_it_comes_back_from_a_pickle_as_it_was(words):
    error = PeerTimeout(*CASES[words])
    assert words in str(error)
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is PeerTimeout
    assert (str(got), got.ranks, got.step) == (str(error), error.ranks, error.step)
