"""Changes to weights, row by row of the table in `envoi.integrations.transformers`: noticed or stale; and memory."""

import copy
import gc
import threading
import warnings
import weakref

import accelerate
import peft
import pytest
import torch

from envoi.integrations import packings
from envoi.integrations import transformers as integration
from envoi.integrations.packings import Recipe, Weights, packed
from envoi.integrations.transformers import forward, packed_experts, refresh
from tests.helpers.slow import mostly_slow
from tests.helpers.transformers_models import (
    build,
    expert_modules,
    expert_weights,
    fresh_logits,
    logits,
    loud,
    tokens,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("registered")


def write_in_place(model):
    with torch.no_grad():
        for weight in expert_weights(model):
            weight.mul_(0.5)


def step(model):
    weights = expert_weights(model)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(weights, lr=0.1).step()


def write_in_inference_mode(model):
    with torch.inference_mode():
        for weight in expert_weights(model):
            weight.mul_(0.5)


def load(model):
    model.load_state_dict({k: v * 0.5 if v.dim() == 3 else v for k, v in model.state_dict().items()})


def load_by_assignment(model):
    model.load_state_dict({k: v * 0.5 if v.dim() == 3 else v for k, v in model.state_dict().items()}, assign=True)


def new_parameter(model):
    for module in expert_modules(model):
        module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach() * 0.5)


def alias_written_to(model):
    """Put a new parameter on the old memory, whose count of writes begins again and reaches the old one's."""
    for module in expert_modules(model):
        module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.data)
        with torch.no_grad():
            while module.gate_up_proj._version < 2:
                module.gate_up_proj.mul_(0.7)


def assign_data(model):
    for weight in expert_weights(model):
        weight.data = weight.data * 0.5


def assign_data_to_reused_memory(model):
    """Free the weights' memory and allocate it again, probably at the same address."""
    for weight in expert_weights(model):
        kept = weight.detach().clone()
        weight.data = torch.empty(0, dtype=weight.dtype)
        weight.data = kept * 0.5


def change_dtype(model):
    write_in_place(model.float())
    model.bfloat16()


NOTICED = [
    write_in_place, step, write_in_inference_mode, load, load_by_assignment, new_parameter, alias_written_to,
    assign_data, assign_data_to_reused_memory, change_dtype,
]  # fmt: skip


@pytest.mark.parametrize("format", mostly_slow(["bf16", "mxfp4", "nvfp4"], ["bf16", "mxfp4"]))
@pytest.mark.parametrize("change", NOTICED, ids=lambda change: change.__name__)
def test_counted_changes_are_noticed(change, format):
    model, ids = loud("mixtral"), tokens()
    model.set_experts_implementation(integration.implementation_name(format))
    before = logits(model, ids)
    change(model)
    after = logits(model, ids)
    assert torch.equal(after, fresh_logits(model, ids))
    assert not torch.equal(after, before)


def test_a_write_through_data_is_seen_where_weights_are_read_in_place():
    model, ids = loud("mixtral"), tokens()
    model.set_experts_implementation("envoi")
    before = logits(model, ids)
    for module in expert_modules(model):
        module.gate_up_proj.data.mul_(0.5)
    after = logits(model, ids)
    assert torch.equal(after, fresh_logits(model, ids))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("format", ["fp8_row", "mxfp4"])
def test_a_write_through_data_needs_refresh(format):
    model, ids = loud("mixtral"), tokens()
    model.set_experts_implementation(integration.implementation_name(format))
    before = logits(model, ids)
    for module in expert_modules(model):
        module.gate_up_proj.data.mul_(0.5)
    assert torch.equal(logits(model, ids), before)  # stale, as the table says
    refresh(model)
    after = logits(model, ids)
    assert torch.equal(after, fresh_logits(model, ids))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("format", ["bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "nvfp4"])
def test_a_new_packing_takes_the_old_ones_memory(format):
    """Check that a captured CUDA graph reads the new weights once they are packed again."""
    module = expert_modules(build("mixtral"))[0]
    with torch.inference_mode():  # neither mode may hinder the other
        first = packed_experts(module, format)
    values = (lambda x: x) if format == "bf16" else (lambda x: x.values)
    address = values(first.gate_up).data_ptr()
    scale = first.gate_up.scale.data_ptr() if format == "nvfp4" else 0
    with torch.no_grad():
        module.gate_up_proj.mul_(0.3)
    second = packed_experts(module, format)
    assert values(second.gate_up).data_ptr() == address
    fresh = packed_experts(copy.deepcopy(module), format)
    assert torch.equal(values(second.gate_up).view(torch.uint8), values(fresh.gate_up).view(torch.uint8))
    if format == "nvfp4":
        assert second.gate_up.scale.data_ptr() == scale
        assert torch.equal(second.gate_up.scale, fresh.gate_up.scale)


def sharing_gate_up():
    """Return two experts modules that share gate_up, and their bits as packed alone."""
    one, two = (expert_modules(build("mixtral"))[0] for _ in range(2))
    with torch.no_grad():
        two.down_proj.mul_(-3)
    want = [packed_experts(module, "mxfp8").down.values.clone().view(torch.uint8) for module in (one, two)]
    two.gate_up_proj = one.gate_up_proj
    return one, two, want


def down_bits(experts):
    return experts.down.values.view(torch.uint8)


def test_modules_that_share_a_weight_keep_their_own():
    one, two, want = sharing_gate_up()
    first = packed_experts(one, "mxfp8")
    second = packed_experts(two, "mxfp8")
    assert packed_experts(one, "mxfp8") is first and packed_experts(two, "mxfp8") is second
    assert torch.equal(down_bits(first), want[0]) and torch.equal(down_bits(second), want[1])
    assert [x is first for x in packings.kept(integration.own_weights(one))] == [True]
    with torch.no_grad():
        two.down_proj.mul_(2)
    packed_experts(two, "mxfp8")
    assert packed_experts(one, "mxfp8") is first and torch.equal(down_bits(first), want[0])
    gone = weakref.ref(packed_experts(two, "mxfp8").gate_up.values.untyped_storage())
    del second
    two.down_proj = torch.nn.Parameter(one.down_proj.detach() * 5)
    renewed = packed_experts(two, "mxfp8")
    assert renewed.gate_up.values.untyped_storage() is gone()  # that of weights which are gone
    assert packed_experts(one, "mxfp8") is first and torch.equal(down_bits(first), want[0])


@pytest.mark.parametrize("shared", ["gate_up", "all"])
def test_released_weights_follow_nobody_elses(shared):
    one, two, want = sharing_gate_up()
    if shared == "all":
        two.down_proj = one.down_proj
    handed = packings.hand_over(integration.own_weights(one), forward.recipe_of(one, "mxfp8"))
    assert packed_experts(one, "mxfp8") is handed
    with torch.no_grad():
        two.down_proj.mul_(2)
    after = packed_experts(two, "mxfp8")
    refresh(torch.nn.ModuleList([two]))
    assert after is not handed and torch.equal(down_bits(handed), want[0])


def test_memory_that_is_the_modules_is_not_written_to():
    module = expert_modules(build("mixtral"))[0]
    old = module.down_proj.data
    assert packed_experts(module).down.data_ptr() == old.data_ptr()
    want = old.clone()
    module.down_proj.data = old * 2
    assert torch.equal(packed_experts(module).down, want * 2)
    assert torch.equal(old, want)


def test_packings_go_with_their_model():
    model = loud("mixtral")
    logits(model, tokens())
    alive = [weakref.ref(packed_experts(module).gate_up.untyped_storage()) for module in expert_modules(model)]
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del model
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_deep_copy_packs_its_own():
    model, ids = loud("mixtral"), tokens()
    want = logits(model, ids)
    other = copy.deepcopy(model)
    write_in_place(other)
    changed = logits(other, ids)
    assert torch.equal(logits(model, ids), want)
    assert not torch.equal(changed, want)


def test_threads_share_one_packing(monkeypatch):
    module = expert_modules(build("mixtral"))[0]
    calls = []
    original = packings.pack_weights
    monkeypatch.setattr(packings, "pack_weights", lambda *given: calls.append(0) or original(*given))
    start, got = threading.Barrier(4), []

    def run():
        start.wait()
        got.append(packed_experts(module))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert all(one is got[0] for one in got)


def test_nothing_is_packed_while_a_graph_is_captured(monkeypatch):
    """Check the refusal alone: a capture needs a GPU."""
    weights = Weights(torch.randn(2, 32, 16), torch.randn(2, 16, 16))
    recipe = Recipe("bf16", "swiglu", None, "concat", False)
    kept = packed(weights, recipe)
    monkeypatch.setattr(packings, "capturing", lambda device: True)
    assert packed(weights, recipe) is kept
    weights.gate_up.mul_(2)
    with pytest.raises(RuntimeError, match="can't be packed while a CUDA graph is captured; call the model once"):
        packed(weights, recipe)


def test_lora_on_experts_warns_once_and_names_the_cure(monkeypatch):
    monkeypatch.setattr(forward, "_warned", False)
    model, ids = loud("mixtral"), tokens()
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj"])
    tuned = peft.get_peft_model(model, config)
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    with pytest.warns(UserWarning, match="packed again in every call.*merge_and_unload"):
        ours = logits(tuned, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(tuned, ids), ours)
    merged = tuned.merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close = logits(merged, ids)
    merged.set_experts_implementation("eager")
    want = logits(merged, ids)
    assert (ours - want).norm() < 0.05 * want.norm()
    assert (close - want).norm() < 0.05 * want.norm()


def test_offloaded_experts_run_and_warn_once(monkeypatch):
    monkeypatch.setattr(forward, "_warned", False)
    model, ids = loud("mixtral"), tokens()
    want = logits(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="packed again in every call.*offloading"):
        assert torch.equal(logits(model, ids), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(model, ids), want)
