"""Traces on GPUs: the bits of calls that aren't traced; each tile noted once, by every role; the whole of all ranks."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe import moe
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.trace import COLUMNS, ROLES, Timeline
from envoi.runtime import planned_kernels, timeline
from envoi.runtime.timeline import Recorder, Slice
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import use
from tests.helpers.ranks import gpu_ranks, run_ranks
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.test_nvlink_gpu import LAYER, inputs_of, on_gpu, open_here, shares

SIZES = LAYER | {"tokens": 900, "hidden": 1024, "intermediate": 512}
FEW = LAYER | {"tokens": 40, "hidden": 1024, "intermediate": 512}
CALL = ["stage tokens", "send routing", "pull", "L1", "L2", "barrier", "sum"]
ONE_LAUNCH = [*CALL[:3], "experts", *CALL[-2:]]


@pytest.mark.gpu
@pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])
@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["many", "few"])
@pytest.mark.parametrize("format", ["fp8_block128", "bf16", "fp8_row"])
def test_a_traced_call_has_the_same_bits(format, sizes, one_launch):
    if one_launch and format != "fp8_block128":
        return
    layer, layer.routing = on_gpu(make(**sizes))
    tokens, ends = len(layer.tokens), [0, 4, 8]
    layout = SharedLayout(2, 8, tokens, 4, layer.tokens.shape[1], format)
    opened = domains.open_all(layout, ends, "cuda")
    packed = [layer.pack(format, first, last) for first, last in pairwise(ends)]
    parts = domains.split(layer, [tokens // 3, tokens])
    recorder = Recorder(ROLES, torch.device("cuda"))
    use(one_launch=one_launch)
    with timeline.tracing(recorder):
        out = torch.cat(domains.moe(opened, parts, packed))
    use()
    assert_same_bits(out, moe(layer.tokens, layer.routing, layer.pack(format)))
    slices = [Slice(*row) for row in recorder.slices().tolist()]
    assert all(s.begin <= s.end for s in slices)
    assert all(0 <= s.sm < 132 for s in slices)
    assert not recorder.left_out and not recorder.is_cut()
    gemms = [at for at, strip in enumerate(recorder.strips) if strip.kernel in ("gemm_kernel", "fused_kernel")]
    assert len(gemms) == (2 if one_launch else 4)
    for step in gemms:
        roles = range(len(ROLES[recorder.strips[step].kernel]))
        by_role = [sorted(s.label for s in slices if (s.step, s.role, s.span) == (step, role, 0)) for role in roles]
        for first in (0, 3) if one_launch else (0,):  # two consumers, then the producer
            assert by_role[first + 2] == tiles_of(by_role[first : first + 2])


def tiles_of(consumers: list[list[int]]) -> list[int]:
    """Return the tiles of a GEMM, which two consumers share or take alternately, or which one of them has."""
    noted = [labels for labels in consumers if labels]
    together = sorted(label for labels in noted for label in labels)
    tiles = noted[0] if all(labels == noted[0] for labels in noted) else together
    assert tiles == list(range(len(tiles)))
    return tiles


def no_workers(*_: object) -> None:
    """Refuse to start processes that compile: they'd choose kernels as always, not as forced in this one."""
    raise OSError


def traced(rank: int, num_ranks: int, one_launch: bool) -> tuple[Timeline, bool, str]:
    """Trace a call between two calls; return the timeline, whether these have equal bits, and an error's text."""
    use(one_launch=one_launch)
    layer, ends = make(**SIZES), shares(num_ranks, 8)
    parallel = open_here(layer, "fp8_block128", rank, ends)
    inputs = inputs_of(layer, rank, shares(num_ranks, 900))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_kernels, "Workers", no_workers)
        timeline = parallel.trace(*inputs)  # before any other call
    outs = [parallel.moe(*inputs) for _ in range(3)]
    again = parallel.trace(*inputs)
    outs.append(parallel.moe(*inputs))
    parallel.check()
    assert [step.name for step in again.steps] == [step.name for step in timeline.steps]
    try:
        parallel.trace(inputs[0][:, :-1] if rank == 0 else inputs[0], inputs[1])
        said = ""
    except ValueError as error:
        said = str(error)
    dist.barrier()
    return timeline, all(torch.equal(out, outs[0]) for out in outs), said


@pytest.mark.gpu
@pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])
def test_all_ranks_get_the_whole(one_launch, tmp_path):
    num_ranks = gpu_ranks()
    outcomes = run_ranks(num_ranks, traced, one_launch, backend="nccl", timeout_s=200)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    timeline = outcomes[0].value[0]
    for rank, outcome in enumerate(outcomes):
        theirs, same, said = outcome.value
        assert torch.equal(theirs.slices, timeline.slices)
        assert same
        assert "tokens" in said if rank == 0 else "rank 0 of the group refused its arguments" in said
    assert timeline.num_ranks == num_ranks
    assert not timeline.left_out and not timeline.is_cut
    names = [step.name for step in timeline.steps if step.name != "quantise"]
    assert names == (ONE_LAUNCH if one_launch else CALL)
    begin, end = (timeline.column(name) for name in ("begin", "end"))
    for rank in range(num_ranks):
        mine = timeline.column("rank") == rank
        firsts = [int(begin[mine & (timeline.column("step") == step)].min()) for step in range(len(timeline.steps))]
        assert firsts == sorted(firsts)
        lasts = [int(end[mine & (timeline.column("step") == step)].max()) for step in range(len(timeline.steps))]
        assert lasts == sorted(lasts)
    assert int(end.max()) < 500_000_000  # the clocks of all ranks are one; other tests' processes have the GPUs in turn
    timeline.save(tmp_path / "trace.json.gz")
    names = {role.name for step in timeline.steps for role in step.roles}
    assert ("consumer 0 in L1" in names) == one_launch
    assert timeline.slices.shape[1] == len(COLUMNS)
