"""Compiled, exported and generating models: the bits of the uncompiled run, also after weights have changed."""

import pytest
import torch
import transformers

from envoi.integrations import packings
from envoi.integrations.transformers import refresh
from tests.helpers.slow import mostly_slow
from tests.helpers.transformers_models import expert_modules, expert_weights, fresh_logits, logits, loud, tokens

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def packs(monkeypatch) -> list:
    """Record the recipes by which weights are packed, in turn."""
    seen = []
    original = packings.pack_weights

    def counted(weights, recipe):
        seen.append(recipe)
        return original(weights, recipe)

    monkeypatch.setattr(packings, "pack_weights", counted)
    return seen


def scaled_state(model) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.5 if tensor.dim() == 3 else tensor for name, tensor in model.state_dict().items()}


def assign(model) -> None:
    for weight in expert_weights(model):
        weight.data = weight.data * 0.5


def write_through_data(model) -> None:
    for weight in expert_weights(model):
        weight.data.mul_(0.5)
    refresh(model)


def write_in_place(model) -> None:
    with torch.no_grad():
        for weight in expert_weights(model):
            weight.mul_(0.5)


CHANGES = {
    "in place": write_in_place,
    "load_state_dict": lambda model: model.load_state_dict(scaled_state(model)),
    "data assigned": assign,
    "written through data, and refreshed": write_through_data,
}


def test_one_graph_of_both_layers_has_every_size():
    """Routers and experts: a compiler takes five times as long over what stands around them."""
    blocks = [layer.mlp for layer in loud("qwen3_moe").model.layers]
    x, fewer = torch.randn(2, 12, 128).bfloat16(), torch.randn(2, 7, 128).bfloat16()
    both = torch.nn.Sequential(*blocks)
    with torch.no_grad():
        # Packed before compiling: if layers wrongly shared the first one's packing, it would show.
        want, want_of_fewer = both(x), both(fewer)
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x), want)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(fewer), want_of_fewer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt_oss", {}), ("qwen3_moe", {"fullgraph": True, "dynamic": True})],
    ids=["default", "dynamic"],
)
def test_a_compiled_model_has_the_bits_of_the_uncompiled(name, options):
    model = loud(name)
    ids = tokens()
    want = logits(model, ids)
    compiled = torch.compile(model, backend="aot_eager", **options)
    assert torch.equal(logits(compiled, ids), want)
    shorter = ids[:, :7]
    if "dynamic" in options:  # one graph has every size, though not other strides
        shorter = shorter.contiguous()
        torch._dynamo.config.patch(error_on_recompile=True)(lambda: logits(compiled, shorter))()
    assert torch.equal(logits(compiled, shorter), logits(model, shorter))


@pytest.mark.parametrize("change", mostly_slow(CHANGES, quick=["in place"]))
def test_weights_may_change_between_compiled_calls(change, packs):
    model, ids = loud("qwen3_moe"), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = logits(compiled, ids)
    assert len(packs) == 2
    logits(compiled, ids)
    assert len(packs) == 2
    CHANGES[change](model)
    after = logits(compiled, ids)
    assert len(packs) == 4
    assert torch.equal(after, fresh_logits(model, ids))
    assert not torch.equal(after, before)


def test_inductor_runs_each_layers_experts():
    modules = expert_modules(loud("qwen3_moe"))

    def both(x, ids, weights):
        return modules[0](x, ids, weights), modules[1](x, ids, weights)

    x = torch.randn(5, 128, dtype=torch.bfloat16)
    ids = torch.rand(5, 8).topk(4).indices
    weights = torch.rand(5, 4)
    with torch.inference_mode():
        want = both(x, ids, weights)
        got = torch.compile(both, fullgraph=True)(x, ids, weights)
    assert not torch.equal(*want)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gpt_oss"], quick=["qwen3_moe"]))
def test_generate_compiles_a_static_cache(name, monkeypatch):
    model, ids = loud(name), tokens(1, 8)
    options = {
        "max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "output_logits": True,
        "return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    want = model.generate(ids, disable_compile=True, **options)
    config = transformers.CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        got = model.generate(ids, compile_config=config, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert all(map(torch.equal, got.logits, want.logits))
        torch._dynamo.reset()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_an_exported_model_runs_with_its_weights():
    model, ids = loud("qwen3_moe"), tokens()
    want = logits(model, ids)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        got = program.module()(ids, use_cache=False).logits
    assert torch.equal(got, want)


def test_the_operator_keeps_its_promises():
    module = expert_modules(loud("gpt_oss"))[0]
    x, ids, weights = torch.randn(3, 160).bfloat16(), torch.tensor([[0, 1], [2, 4], [3, 0]]), torch.rand(3, 2)
    arguments = (
        x, weights, ids, *(t.detach() for t in (
            module.gate_up_proj, module.down_proj, module.gate_up_proj_bias, module.down_proj_bias)),
        None, None, "bf16", "swiglu_oai", 7.0, "interleaved", True, False, True,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.envoi.transformers_experts.default, arguments)


def test_an_activation_unknown_when_compiling_breaks_the_graph_once():
    model = loud("gpt_oss")
    modules = expert_modules(model)
    x, ids, weights = torch.randn(3, 160).bfloat16(), torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)
    with torch.no_grad():
        want = modules[0](x, ids, weights)
        del modules[0]._envoi_activation
        assert torch.equal(torch.compile(modules[0], backend="aot_eager")(x, ids, weights), want)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(modules[0], backend="aot_eager", fullgraph=True)(x, ids, weights), want)
