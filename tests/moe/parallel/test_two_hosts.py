"""ExpertParallel over gloo between two hosts: the bits of one rank, and a link that is lost and comes back."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import PeerTimeout, counted
from tests.helpers import fresh
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.hosts import PORT, Hosts, address, two_hosts
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case

ROOT = Path(__file__).resolve().parents[3]
NUM_RANKS, RANKS_PER_HOST = 4, 2
TIMEOUT_S = 4.0
GUARD_S = 40.0  # for all ranks of a test


@pytest.fixture
def hosts():
    with two_hosts(RANKS_PER_HOST) as made:
        yield made


def test_the_bits_of_one_rank(hosts):
    tried = [Case("bf16"), Case("fp8_block128", token_ends=[0, 0, 60, 60], expert_ends=[1, 2, 7, 8]), Case("mxfp4")]
    outcomes = run_ranks(NUM_RANKS, cases.run_cases, tried, timeout_s=GUARD_S, join=hosts)
    assert [outcome.text for outcome in outcomes] == [""] * NUM_RANKS
    for number, case in enumerate(tried):
        layer = case.build()
        want = moe(layer.tokens, layer.routing, layer.pack(case.format))
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), want)


def say(board: Path, word: str) -> None:
    """Tell all ranks a word, whatever the link does: their files are in one place."""
    (board / word).touch()


def hear(board: Path, *words: str) -> float:
    """Wait for words; return the time of the last."""
    while not all((board / word).exists() for word in words):
        time.sleep(0.005)
    return time.monotonic()


def lose_link(rank: int, num_ranks: int, hosts: Hosts, board: Path, outage_s: float | None) -> tuple:
    """Let rank 2 pull the cable between the collectives of a call; plug it in after outage_s, None = after all errors.

    Return the error, its ranks, its seconds after the link was lost; and whether a new object is right afterwards.
    """
    layer, ends = make(), [2, 4, 6, 8]
    parallel = cases.open_parallel(layer, "bf16", rank, ends, timeout_s=TIMEOUT_S)
    inputs = cases.part_of(layer, rank, [15, 30, 45, 60])
    first, combine = parallel.moe(*inputs), counted.Counted.combine

    def pull_cable(*arguments):
        if rank == 2:
            hosts.set_link("down")
            say(board, "down")
            if outage_s is not None:
                threading.Timer(outage_s, hosts.set_link, ["up"]).start()
        hear(board, "down")  # rows sent before would come through
        return combine(*arguments)

    counted.Counted.combine = pull_cable
    try:
        got = "right" if torch.equal(parallel.moe(*inputs), first) else "wrong"
        ranks = []
    except PeerTimeout as error:
        got, ranks = str(error), error.ranks
    seconds = time.monotonic() - (board / "down").stat().st_mtime + time.time() - time.monotonic()
    counted.Counted.combine = combine
    say(board, f"done {rank}")
    hear(board, *(f"done {r}" for r in range(num_ranks)))
    if rank == 2:
        hosts.set_link("up")
        say(board, "up")
    hear(board, "up")
    again = cases.open_parallel(layer, "bf16", rank, ends, timeout_s=15.0)
    return got, ranks, seconds, torch.equal(again.moe(*inputs), first)


def test_a_lost_link_names_the_ranks_behind_it_on_both_sides(hosts, tmp_path):
    outcomes = run_ranks(NUM_RANKS, lose_link, hosts, tmp_path, None, timeout_s=GUARD_S, join=hosts)
    assert [outcome.text for outcome in outcomes] == [""] * NUM_RANKS
    for rank, outcome in enumerate(outcomes):
        text, ranks, seconds, right_again = outcome.value
        assert ranks == ([2, 3] if rank < RANKS_PER_HOST else [0, 1]), text
        assert "combine: rank " in text
        assert seconds < TIMEOUT_S + 1
        assert right_again


@pytest.mark.parametrize("outage_s", mostly_slow([0.5, 2.2], [2.2]))
def test_a_short_outage(hosts, tmp_path, outage_s):
    """Of 4 s, ranks wait for 2, then call the roll: an outage that ends meanwhile isn't the end of the store."""
    outcomes = run_ranks(NUM_RANKS, lose_link, hosts, tmp_path, outage_s, timeout_s=GUARD_S, join=hosts)
    assert [outcome.text for outcome in outcomes] == [""] * NUM_RANKS
    for outcome in outcomes:
        text, _, seconds, right_again = outcome.value
        assert (text == "right") == (outage_s < TIMEOUT_S / 2), text
        assert "gone" not in text
        assert seconds < TIMEOUT_S + 1
        assert right_again


# `torchrun` on each host, as forks of one process that has imported torch; the ranks are processes of their own.
AGENTS = """
import json, os, sys
from torch.distributed import run
from tests.helpers.hosts import Hosts
names, links, arguments = json.loads(sys.argv[1])
agents = []
for host in range(2):
    if (pid := os.fork()) == 0:
        Hosts(names, links, 1)(host)
        run.main(["--node-rank", str(host), *arguments])
        sys.exit()
    agents.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in agents]))
"""


def test_torchrun_starts_ranks_on_both(hosts, monkeypatch):
    """Start the example as docs/several_machines.md says."""
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", address(0), "--master-port", str(PORT)]
    monkeypatch.chdir(ROOT)
    done = fresh.run(AGENTS, json.dumps([hosts.names, hosts.links, [*arguments, "examples/moe_torchrun.py"]]))
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        assert f"rank {rank}: ({16 * (rank + 1)}, 256) over gloo" in done.stdout
