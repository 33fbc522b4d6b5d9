"""`workspace=` of ExpertParallel: memory of the caller's that a call's scratch is in, its size, and refusals."""

import pytest
import torch

from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.moe.parallel.interpreted.test_prepared import WAYS, inputs, open_here


@pytest.mark.parametrize("way", WAYS)
def test_scratch_is_where_the_caller_says(fake, monkeypatch, way):
    parallel = open_here(monkeypatch, "bf16", way)
    tokens, routing = inputs(0)
    on_meta = Routing(routing.topk_weights.to("meta"), routing.topk_ids.to("meta"), 4)
    num_bytes = parallel.workspace_bytes(tokens.to("meta"), on_meta)
    assert num_bytes == parallel.workspace_bytes(tokens, routing) > 0
    for seed in range(3):
        tokens, routing = inputs(seed)
        memory, out = torch.full((num_bytes,), 0xA5, dtype=torch.uint8), torch.empty_like(tokens)
        got = parallel.moe(tokens, routing, workspace=memory, out=out)
        assert got is out
        assert_same_bits(out, parallel.moe(tokens, routing))
        assert (memory != 0xA5).any(), "nothing was written there"
    (prepared,) = parallel._calls.known.values()
    assert 4 * prepared._scratch_floats == num_bytes


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_workspace_is_refused_so_that_peers_hear_of_it(fake, monkeypatch, way):
    parallel = open_here(monkeypatch, "bf16", way)
    refused, exchange = [], type(parallel._exchange)
    refuse = exchange.refuse
    monkeypatch.setattr(exchange, "refuse", lambda self: (refused.append(1), refuse(self)))
    tokens, routing = inputs(0)
    num_bytes = parallel.workspace_bytes(tokens, routing)
    memory = torch.empty(2 * num_bytes, dtype=torch.uint8)
    for count, (wrong, said) in enumerate(
        [
            (memory[: num_bytes - 16], f"workspace: expected {num_bytes} contiguous bytes at a multiple of 16"),
            (memory[1:], "workspace: expected 0 contiguous bytes at a multiple of 16"),
            (memory[::2], "workspace: expected 0 contiguous bytes at a multiple of 16"),
            (memory.to("meta"), "workspace: expected a tensor on cpu"), (7, "workspace: expected tensor, got int 7"),
        ], 1,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^" + said):
            parallel.moe(tokens, routing, workspace=wrong)
        assert len(refused) == count
        parallel._exchange.domain.report.zero_()
    assert_same_bits(parallel.moe(tokens, routing, workspace=memory), parallel.moe(tokens, routing))
