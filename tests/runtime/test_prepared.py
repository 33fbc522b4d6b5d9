"""Prepared calls: what is planned, what is refused, the guards, threads, streams, memory, and where launches are."""

import inspect
import re
import runpy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

import envoi
from envoi import env, log
from envoi.ops.gemm import grouped_gemm
from envoi.ops.gemm.hopper import host
from envoi.runtime import launch, program, shortcuts
from envoi.runtime.devices import Target
from envoi.runtime.prepared import calls, driver, exactly, replay
from tests.helpers import fresh
from tests.runtime.prepared_cases import gemm_cases, moe_cases, normal, route_cases

SOURCE = Path(envoi.__file__).parent
CPU, CPU_DEVICE = Target("cpu", 1), torch.device("cpu")


def sides(M: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(M, 128, seed=seed), normal(128, 128, seed=seed + 1)


def prepare(function=envoi.gemm, arguments=None, **named):
    """Make the call after which such calls are replayed."""
    function(*(arguments or sides()), **named)


def replays(hopper, function, *arguments, **named) -> bool:
    """Call, and tell whether the driver was handed a launch of kernels that were loaded before."""
    before, num_loaded = len(hopper.calls), hopper.num_loaded
    function(*arguments, **named)
    return len(hopper.calls) > before and hopper.num_loaded == num_loaded


def addresses(hopper) -> set[int]:
    """Return all that may be addresses in the last launch's parameters."""
    return {int.from_bytes(value[:8], "little") for value in hopper.calls[-1][2] if len(value) >= 8}


def test_every_call_runs_on_its_own_tensors(hopper):
    for seed in (0, 5):
        a, b = sides(seed=seed)
        out = envoi.gemm(a, b)
        assert {x.data_ptr() for x in (a, b, out)} <= addresses(hopper)
        assert (out.shape, out.dtype, out.stride()) == ((64, 128), torch.bfloat16, (128, 1))
    assert hopper.num_loaded == 1 and not hopper.always
    (_, config, _) = hopper.calls[1]
    assert config.stream == 7 and config.num_attributes == 0 and config.shared_bytes > 0


@pytest.mark.parametrize(
    "other",
    [
        lambda a, b: ((a[:63], b), {}),
        lambda a, b: ((a.half(), b.half()), {}),
        lambda a, b: ((a, b), {"out_dtype": torch.float32}),
        lambda a, b: ((a.t().contiguous().t(), b), {}),
        lambda a, b: ((a, b, envoi.epilogues.library.swiglu), {}),
        lambda a, b: ((a, b), {"batch_invariant": True}),
    ],
    ids=["shape", "dtype", "out_dtype", "strides", "epilogue", "batch_invariant"],
)
def test_other_calls_have_other_keys(hopper, other):
    prepare()
    arguments, named = other(*sides())
    assert not replays(hopper, envoi.gemm, *arguments, **named)
    assert replays(hopper, envoi.gemm, *sides())


@pytest.mark.parametrize("name", ["moe-bf16", "grouped-bf16"])
def test_batch_invariance_is_in_the_key_of_experts(hopper, name):
    case = (moe_cases(64, 16, 4, 512, 512, "cpu") | gemm_cases(64, 128, 128))[name]
    given, named = case.arguments(0)
    prepare(case.function, given, **named)
    assert not replays(hopper, case.function, *given, **named, batch_invariant=True)
    assert replays(hopper, case.function, *given, **named)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeenBefore(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def profile():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize(
    "context",
    [Seen, SeenBefore, profile, forward_ad.dual_level, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["dispatch mode", "function mode", "profiler", "forward mode", "autocast"],
)
def test_calls_that_are_observed_run_as_always(hopper, context):
    prepare()
    with context():
        assert not replays(hopper, envoi.gemm, *sides())
    assert replays(hopper, envoi.gemm, *sides())


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (log, "LEVEL", 1), (calls, "NVTX", True), (shortcuts, "PREPARED", False), (shortcuts, "ENABLED", False),
        (knobs.runtime.launch_enter_hook, "calls", [print]), (knobs.runtime.launch_exit_hook, "calls", [print]),
    ],
    ids=["log", "nvtx", "off", "safe", "enter hook", "exit hook"],
)  # fmt: skip
def test_switches(hopper, monkeypatch, where, name, value):
    prepare()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, value)
        assert not replays(hopper, envoi.gemm, *sides())
    assert replays(hopper, envoi.gemm, *sides())


class Other(torch.Tensor):
    """Class that the dispatcher has to be asked about."""


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.as_subclass(Other),
        lambda a: torch._neg_view(a),
        lambda a: torch.cat((a.flatten(), a[0]))[1 : 1 + a.numel()].view(a.shape),
    ],
    ids=["class", "negative", "off 16 bytes"],
)
def test_tensors_that_are_not_plain_run_as_always(hopper, change):
    prepare()
    a, b = sides()
    assert not replays(hopper, envoi.gemm, change(a), b)
    assert replays(hopper, envoi.gemm, a, b)


def test_gradients_are_refused_as_always(hopper):
    prepare()
    a, b = sides()
    a.requires_grad_()
    with pytest.raises(ValueError, match="a: expected a tensor without gradients"):
        envoi.gemm(a, b)
    with torch.no_grad():
        assert replays(hopper, envoi.gemm, a, b)


def test_inference_tensors_come_out_of_inference_mode(hopper):
    prepare()
    with torch.inference_mode():
        assert replays(hopper, envoi.gemm, *sides())
        assert envoi.gemm(*sides()).is_inference()


def test_a_compiled_call_is_traced_as_the_operator(hopper):
    prepare()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch.compile(envoi.gemm, backend=backend, fullgraph=True)(*sides())
    assert len(graphs) == 1 and "torch.ops.envoi.gemm" in graphs[0]


def test_wrong_arguments_are_refused_as_always(hopper):
    case = route_cases(4, 32, 128, 4)["route"]
    tokens, gate, k = case.arguments(0)[0]
    prepare(envoi.route, (tokens, gate, k))
    assert replays(hopper, envoi.route, tokens, gate, k)
    for wrong, said in (
        ((tokens, gate, 4.0), "k: expected an int"),
        ((tokens, gate, k, True), "alpha: expected a number, got bool"),
        ((tokens, gate[:, :64], k), r"gate: expected .* \[num_experts, 128\], got"),
        ((tokens, None, k), "gate: expected .* got NoneType"),
        ((None, gate, k), "tokens: expected .* got NoneType"),
        (("tokens", gate, k), "tokens: expected .* got str"),
        ((tokens, gate, [k]), "k: expected an int"),
        ((tokens.long(), gate, k), "tokens: expected .* got int64"),
    ):
        for _ in range(3):
            with pytest.raises(ValueError, match=said):
                envoi.route(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword"):
        envoi.route(tokens, gate, k, rules="mixtral")


@pytest.mark.parametrize(("x", "y"), [(1, 1.0), (1, True), (0.0, -0.0), (None, 0), (2, 3)])
def test_numbers_that_python_calls_equal_have_other_keys(x, y):
    assert exactly(x) != exactly(y) and exactly(x) == exactly(x)


def test_a_scalar_operand_is_part_of_the_key(hopper):
    from tests.runtime.prepared_cases import several

    def call(by):
        a, b = sides()
        rest = {"row": normal(64), "col": normal(128), "tile": normal(64, 128)}
        return replays(hopper, envoi.gemm, a, b, several, by=by, **rest)

    assert [call(0.5) for _ in range(2)] == [False, True]
    assert not call(-0.5) and call(0.5)


# What can't be replayed. Such calls run as always for good.


def refusal(hopper, monkeypatch, change=lambda compiled: compiled, planned=lambda: None) -> str:
    """Return why a call is refused whose kernels are these, or that does something besides its launches."""
    as_before, original = hopper.load, host.work_of
    monkeypatch.setattr(launch, "load", lambda *given: change(as_before(*given)))
    monkeypatch.setattr(host, "work_of", lambda *given: (planned(), original(*given))[1])
    prepare()
    assert not replays(hopper, envoi.gemm, *sides())
    (reason,) = calls._calls.refusals()
    return reason


def with_metadata(compiled, **changes):
    return SimpleNamespace(**{**vars(compiled), "metadata": compiled.metadata._replace(**changes)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: None, "without a compiled kernel"),
        (lambda c: with_metadata(c, global_scratch_size=8), "scratch memory that Triton allocates"),
        (lambda c: with_metadata(c, num_ctas=2), "clusters"),
        (lambda c: SimpleNamespace(**{**vars(c), "function": None}), "isn't loaded"),
        (lambda c: SimpleNamespace(**{**vars(c), "packed_metadata": (4, 1)}), "ValueError: not enough"),
    ],
    ids=["unknown", "scratch", "cluster", "not loaded", "another Triton"],
)
def test_kernels_that_are_refused(hopper, monkeypatch, change, reason):
    assert re.search(reason, refusal(hopper, monkeypatch, change))


META = torch.device("meta")


@pytest.mark.parametrize(
    ("planned", "reason"),
    [
        (lambda: torch.zeros(3, device=META), "aten.zeros.default between the launches"),
        (lambda: torch.empty(3, device=META).sum(), "aten.sum.default between the launches"),
        (lambda: torch.empty(3, device=META).sum().item() if program.current() else None, "RuntimeError"),
    ],
    ids=["an operator", "another", "a value that the host reads"],
)
def test_what_calls_do_besides_launches(hopper, monkeypatch, planned, reason):
    assert re.search(reason, refusal(hopper, monkeypatch, planned=planned))


def test_the_driver_is_asked_once_for_the_sizes_of_a_kernel():
    """Again if it had an error, and for another kernel that has the handle of one that is gone."""
    answers = iter([None, 8, 4, None, 2, None])
    asked = driver.Driver.__new__(driver.Driver)
    asked._sizes = weakref.WeakKeyDictionary()

    def parameter(function, number, at, size):
        answer = next(answers)
        driver.SIZE.from_address(size).value = answer or 0
        return answer is None

    asked._parameter = parameter
    kernel = fresh_kernel()
    assert [asked.parameter_sizes(kernel) for _ in range(3)] == [[], [8, 4], [8, 4]]
    del kernel
    assert not asked._sizes and asked.parameter_sizes(fresh_kernel()) == [2]


def fresh_kernel():
    return type("Kernel", (), {"function": 7})()


def test_parameters_that_the_driver_knows_otherwise(hopper, monkeypatch):
    monkeypatch.setattr(type(hopper), "parameter_sizes", lambda self, kernel: self.sizes[kernel.function][:-1])
    prepare()
    assert not replays(hopper, envoi.gemm, *sides())
    assert "where the driver knows of" in calls._calls.refusals()[0]


def test_maps_that_have_their_address_elsewhere(hopper, monkeypatch):
    monkeypatch.setattr(type(hopper), "moved_map", lambda self, one, address: bytes(128))
    prepare()
    assert not replays(hopper, envoi.gemm, *sides())
    assert "address stands elsewhere" in calls._calls.refusals()[0]


def test_an_object_that_is_given_twice_is_planned_for_no_other_call(hopper):
    x = normal(128, 128)
    prepare(arguments=(x, x))
    assert not replays(hopper, envoi.gemm, x, x)
    assert not calls._calls.known, "calls with two objects are none the worse for it"
    prepare(arguments=(x, x.clone()))
    assert replays(hopper, envoi.gemm, x, x)


def test_memory_that_is_nobodys():
    """A tensor made from an argument in an earlier call must not stand for that of the next one."""
    made = program.plan(lambda x: x.view(2, 2), (x := torch.zeros(4),), {}, [x], CPU)
    assert made.place(made.inputs[0][1:]) == (program.INPUT, 0, 4)
    with pytest.raises(program.RefusedError, match="neither an argument nor the call's own"):
        made.place(torch.empty(3, device="meta"))


def test_calls_that_need_much_memory(hopper, monkeypatch):
    monkeypatch.setattr(program, "MAX_SCRATCH_BYTES", 1000)
    prepare()
    assert calls._calls.refusals() == ["more than 1000 bytes of memory"]


def test_a_planned_call_knows_every_tensor():
    x, y = torch.zeros(3), torch.zeros(3)
    with pytest.raises(program.RefusedError, match="isn't among the call's"):
        program.plan(lambda x, y: x, (x, y), {}, [x], CPU)
    with pytest.raises(program.RefusedError, match="given twice"):
        program.plan(lambda x, y: x, (x, x), {}, [x, x], CPU)


def test_stand_ins_have_the_alignment_of_their_tensors():
    whole = torch.zeros(64, dtype=torch.bfloat16)
    for x in (whole[3:].view(1, -1), whole[8:], whole[1:61].view(4, 15)[:, :7]):
        twin = program.stand_in(x)
        assert (twin.shape, twin.stride(), twin.dtype) == (x.shape, x.stride(), x.dtype)
        assert twin.data_ptr() % 16 == x.data_ptr() % 16


def test_numbers_that_do_not_fit():
    for kind, value in (("bf16", 1.0), ("fp32", 1e39)):
        with pytest.raises(program.RefusedError):
            replay._number(kind, value)
    assert replay._number("fp32", float("inf")) == b"\x00\x00\x80\x7f"
    assert replay._number("i32", -1) == b"\xff" * 4


# The rest of the house


@pytest.mark.parametrize("missing", ["libnone.so.1", "libc.so.6"])
def test_without_a_driver_or_with_an_old_one_calls_run_as_always(monkeypatch, missing):
    monkeypatch.setattr(shortcuts, "ENABLED", True)
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    monkeypatch.setattr(driver, "LIBRARY", missing)
    monkeypatch.setattr(driver, "active", driver.active.__wrapped__)
    assert driver.active() is None
    a, b = sides()
    assert all(torch.equal(envoi.gemm(a, b), envoi.gemm(a, b)) for _ in range(2))


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, True),
        ({"ENVOI_PREPARED": "1"}, True),
        ({"ENVOI_PREPARED": ""}, True),
        ({"ENVOI_PREPARED": "0"}, False),
        ({"ENVOI_PREPARED": "1", "ENVOI_SAFE_LAUNCH": "1"}, False),
    ],
)
def test_the_variables_decide(monkeypatch, variables, on):
    for name in ("ENVOI_PREPARED", "ENVOI_SAFE_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = runpy.run_path(shortcuts.__file__)
    assert (found["PREPARED"], found["ENABLED"]) == (on, "ENVOI_SAFE_LAUNCH" not in variables)


@pytest.mark.parametrize("name", ["ENVOI_PREPARED", "ENVOI_SAFE_LAUNCH", "ENVOI_NVTX"])
@pytest.mark.parametrize("value", ["false", "2", "on"])
def test_other_values_are_refused(monkeypatch, name, value):
    for other in ("ENVOI_PREPARED", "ENVOI_SAFE_LAUNCH", "ENVOI_NVTX"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}: expected 0 or 1, got '{value}'$"):
        [env.prepared(), env.safe_launch(), env.nvtx()]


def test_kernels_are_launched_in_one_place():
    """A recorder would miss other launches."""
    named = (path for path in SOURCE.rglob("*.py") if re.search(r"\bFP_FUSION\b", path.read_text()))
    found = {str(path.relative_to(SOURCE)) for path in named}
    assert found == {"runtime/launch.py", "runtime/triton_compat.py"}


# Fields that a call depends on


@pytest.mark.parametrize("function", [envoi.gemm, grouped_gemm, envoi.route, envoi.moe, envoi.indexer_topk])
def test_every_parameter_is_taken(function):
    """The function that lists a call's key has the parameters of the call."""
    run = inspect.getclosurevars(function).nonlocals["run"]
    listed = inspect.getclosurevars(run).nonlocals["listed"]
    taken = [name for name in inspect.signature(function).parameters if name not in ("out", "workspace", "num_sms")]
    assert list(inspect.signature(listed).parameters) == taken


# Forms: calls found by torch's guards


def test_calls_are_found_by_torchs_guards(hopper, monkeypatch):
    prepare()
    monkeypatch.setattr(calls.Calls, "run", None)  # what looks for keys
    assert replays(hopper, envoi.gemm, *sides(seed=3))


def test_calls_are_found_by_key_where_torch_has_no_guards(hopper, monkeypatch):
    monkeypatch.setattr(calls, "_guards", None)
    prepare()
    assert replays(hopper, envoi.gemm, *sides(seed=3))
    assert not replays(hopper, envoi.gemm, *sides(M=63))
    assert not calls._calls.forms.known


def test_a_tensor_in_place_of_none_is_another_form():
    made = calls.Forms(8)
    x, y, call = torch.zeros(2, 3), torch.zeros(4), SimpleNamespace()
    made.add(("f",), (x, None, y), call)
    here = -1
    assert made.find(("f",), (x, None, y), here) is call
    assert made.find(("f",), (x, y, None), here) is None
    assert made.find(("f",), (x, None, None), here) is None
    assert made.find(("f",), (x, y, torch.zeros(4)), here) is None
    assert made.find(("g",), (x, None, y), here) is None
    assert made.find(("f",), (x, None, y), 0) is None
    with torch.inference_mode():
        assert made.find(("f",), (x, None, y), here) is None
    made.forget(call)
    assert not made.known


def test_forms_are_bounded():
    made, call = calls.Forms(8), SimpleNamespace()
    for size in range(1, 30):
        for columns in range(1, 9):  # as many variants of a form
            made.add(("f",), (torch.zeros(size), torch.zeros(columns)), call)
        assert len(made.known) <= 8
        assert all(len(variants) <= calls.MOST_VARIANTS for variants in made.known.values())


RECORD = """
import sys
import torch
from envoi.runtime import program
from envoi.runtime.devices import Target
from envoi.runtime.prepared import calls

program.plan(lambda: torch.empty(3, device="meta").view(3).contiguous(), (), {}, [], Target("sm_90"))
calls.Forms(8).add(("f",), (torch.zeros(3),), None)
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))))
"""


def test_planning_leaves_torchs_compiler_alone():
    """Check what would take a call, and its peers, seconds: the first use of a dispatch mode may import it."""
    done = fresh.run(RECORD)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
