"""Experts operator under CUDA graphs, the compiler's and a caller's, on modules like those of transformers."""

import pytest
import torch

from envoi.integrations.transformers import experts_forward, refresh, unserved

pytestmark = pytest.mark.gpu


class Experts(torch.nn.Module):
    """Experts module as transformers' decorator makes it, with the attributes that Envoi reads."""

    has_gate, has_bias, is_transposed, is_concatenated = None, False, False, True
    config = None

    def __init__(self, num_experts=8, hidden=256, intermediate=128):
        super().__init__()
        self.has_gate = True
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.gate_up_proj = torch.nn.Parameter(torch.randn(num_experts, 2 * intermediate, hidden, **options) * 0.06)
        self.down_proj = torch.nn.Parameter(torch.randn(num_experts, hidden, intermediate, **options) * 0.09)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class Layers(torch.nn.Module):
    """Residual stack of experts, all tokens routed alike in each."""

    def __init__(self, format, depth=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(Experts() for _ in range(depth))
        self.format = format
        # Selecting Envoi does this too: the gates' activations are recognised before anything is compiled.
        assert not any(map(unserved, self.layers))

    def forward(self, x, ids, weights):
        for layer in self.layers:
            x = x + experts_forward(layer, x, ids, weights, format=self.format)
        return x


FORMATS = ["bf16", "fp8_row", "mxfp4"]


def given(num_tokens=4):
    x = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    return x, torch.rand(num_tokens, 8, device="cuda").topk(2).indices, torch.rand(num_tokens, 2, device="cuda")


def scale(model, by):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(by)


@pytest.mark.parametrize("format", FORMATS)
@torch.inference_mode()
def test_the_compilers_graphs_have_the_bits_of_the_uncompiled(format):
    model = Layers(format)
    # First called compiled: the experts are packed while the compiler warms its graphs up.
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    inputs = [given() for _ in range(6)]
    got = []
    for x in inputs:
        torch.compiler.cudagraph_mark_step_begin()
        got.append(compiled(*x).clone())
        # A packing in the graphs' memory would be overwritten here.
        torch.full((1 << 22,), float("nan"), device="cuda")
    for x, y in zip(inputs, got, strict=True):
        assert torch.equal(y, model(*x))


@pytest.mark.parametrize("format", FORMATS)
def test_a_replay_follows_after_refresh(format):
    model = Layers(format)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = given()
    with torch.inference_mode():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            before = compiled(*x).clone()
    scale(model, 0.5)
    with torch.inference_mode():
        refresh(model)
        torch.compiler.cudagraph_mark_step_begin()
        after = compiled(*x).clone()
        assert torch.equal(after, model(*x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("format", FORMATS)
def test_a_callers_graph_replays_what_was_packed_last(format):
    model = Layers(format)
    x = given()
    with torch.inference_mode():
        want = model(*x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(*x)
        graph.replay()
        assert torch.equal(out, want)
    scale(model, 0.5)
    with torch.inference_mode():
        want = model(*x)  # packs again
        graph.replay()
        assert torch.equal(out, want)


def test_a_capture_refuses_to_pack():
    model, x = Layers("fp8_row"), given()
    with torch.inference_mode():
        model(*x)
        torch.cuda.synchronize()
    scale(model, 0.5)
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call the model once, or .*refresh"), capture:
        model(*x)
    torch.cuda.synchronize()
    with torch.inference_mode():
        assert model(*x)[0].isfinite().all()


def test_a_call_waits_for_nothing():
    model, x = Layers("fp8_row"), given()
    with torch.inference_mode():
        model(*x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(*x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_threads_on_their_own_streams_read_one_packing():
    import threading

    model, x = Layers("mxfp4"), given()
    torch.cuda.synchronize()
    got = []

    def run():
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            y = model(*x)
            torch.cuda.current_stream().synchronize()
            got.append(y)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.inference_mode():
        want = model(*x)
    assert len(got) == 4
    assert all(torch.equal(y, want) for y in got)
