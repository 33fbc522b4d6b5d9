"""Warm-up without a GPU: what calls on real memory launch is among what was compiled; processes; the command; refusals.

CPU tensors take the path of a Hopper GPU, and their launches are noted, not made.
"""

import random
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
from triton import knobs

import envoi
from envoi import cli
from envoi.epilogues.activation import written
from envoi.ops.moe import api as moe_api
from envoi.ops.moe import warm_up
from envoi.ops.moe.op import IDS, WEIGHTS
from envoi.ops.moe.parallel import counted
from envoi.ops.moe.parallel.counted import SentTokens, sort_by_expert, sum_slots
from envoi.ops.moe.parallel.exchange import OnDevice, compiled_form
from envoi.ops.moe.parallel.nvlink import SharedLayout, allocate
from envoi.ops.moe.parallel.placement import Placed, with_shared
from envoi.ops.moe.parallel.rail import Grid, HostsLayout, open_rail
from envoi.ops.moe.parallel.warm_up import CountedCall, ParallelCall
from envoi.ops.moe.reference import quantize_tokens
from envoi.ops.moe.router import route
from envoi.ops.moe.router.warm_up import RouterCall, call_of_model
from envoi.ops.moe.support import experts_without_memory
from envoi.runtime import devices, launch, planned_kernels, workers
from envoi.runtime.devices import EVERY_ARCH, Target, standing_for
from envoi.runtime.planned_kernels import find, launches_of
from envoi.types import Routing
from tests.helpers.compiling_driver import compile_like_a_launch
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.own import reglu
from tools.kernel_cases import kernel_key

HOPPER = Target("sm_90")
# A CPU's constants differ: no cast to E4M3, no overlap of launches, no clock.
DIFFER_ON_A_CPU = {"widen_kernel", "permute_kernel", "send_routing_kernel", "combine_barrier_kernel"}
FORMATS = ("bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8", "nvfp4")


@pytest.fixture
def launched(monkeypatch) -> list:
    """Let CPU tensors take the Hopper path. Returns the list that launches are appended to."""
    found = []
    stand_ins = {
        devices.implementation: lambda device: "hopper", devices.num_sms: lambda device: 132,
        devices.casts_e4m3: lambda device: True,
    }  # fmt: skip
    for name, module in list(sys.modules.items()):
        if name.startswith("envoi."):
            for original, stand_in in stand_ins.items():
                if getattr(module, original.__name__, None) is original:
                    monkeypatch.setattr(module, original.__name__, stand_in)
    monkeypatch.setattr(moe_api, "check_ids", lambda *_: None)
    monkeypatch.setattr(launch, "run", lambda *given: found.append(given))
    return found


_known: dict[tuple, tuple] = {}


def keys(launches) -> set[tuple]:
    """Return what Triton compiles for each launch: the kernel, its signature, constants and options, as text."""
    found = set()
    for kernel, _, arguments, options in launches:
        if kernel.fn.__name__ not in DIFFER_ON_A_CPU:
            key = launch.key_of(kernel, arguments, options)
            if key not in _known:
                _known[key] = kernel.fn.__module__, kernel.fn.__name__, kernel_key(kernel, (1,), arguments, options)
            found.add(_known[key])
    return found


def compiled(calls, max_tokens: int, least: int = 1) -> set[tuple]:
    """Return the keys of what a warm-up compiles."""
    sites = find(calls, HOPPER, range(least, max_tokens + 1)).values()
    return keys(launches_of(calls[site.call], site.num_tokens, HOPPER)[site.launch] for site in sites)


def drawn_layer(draw: random.Random, format: str, **fixed):
    activation = draw.choice(["swiglu", "swiglu_oai", "geglu", "relu2", written(reglu)])
    sizes = {
        "tokens": 1, "hidden": 128 * draw.randint(1, 4), "intermediate": 128 * draw.randint(1, 3),
        "experts": draw.choice([1, 2, 4, 8]), "activation": activation, "bias": draw.random() < 0.4,
        "packed_layout": draw.choice([None, "concat"]) if format in ("bf16", "fp8_row", "fp8_block128") else None,
    }  # fmt: skip
    sizes |= fixed
    k = draw.randint(1, min(4, sizes["experts"]))
    return make(**sizes, k=k), k


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", mostly_slow(range(3), [0]))
def test_no_call_launches_what_was_not_compiled(launched, format, seed):
    draw = random.Random(f"{format} {seed}")
    layer, k = drawn_layer(draw, format)
    experts, most = layer.pack(format), draw.randint(1, 400)
    if experts.num_local_experts > k:
        gated, num_shared = draw.random() < 0.5, draw.randint(0, 1)
        gate = torch.ones(experts.hidden) if gated and num_shared else None
        experts = replace(experts, num_shared=num_shared, shared_gate=gate)
    dtypes = draw.choice(IDS), draw.choice(WEIGHTS)
    known = compiled([warm_up.LayerCall(warm_up.without_tensors(experts), k, dtypes)], most)
    for num_tokens in [1, most, *(draw.randint(1, most) for _ in range(40))]:
        tokens = torch.zeros(num_tokens, experts.hidden, dtype=draw.choice([torch.bfloat16, torch.float16]))
        ids, weights = (torch.zeros(num_tokens, k, dtype=dtype) for dtype in dtypes)
        expert_map = torch.zeros(draw.randint(1, 50), dtype=torch.int32) if draw.random() < 0.3 else None
        num_experts = experts.num_routed if expert_map is None else len(expert_map)
        launched.clear()
        envoi.moe(tokens, Routing(weights, ids, num_experts), experts, expert_map=expert_map)
        assert launched and keys(launched) <= known, f"{num_tokens} tokens, at most {most}"


@pytest.mark.parametrize("format", mostly_slow(FORMATS, ["bf16", "fp8_block128", "mxfp4"]))
@pytest.mark.parametrize(("presum", "results"), [(False, None), (True, None), (False, "fp8_1x128")])
def test_no_call_across_ranks_does(launched, format, presum, results):
    draw = random.Random(f"{format} {presum}")
    layer, k = drawn_layer(draw, format, experts=8)
    most, rank, ends = draw.randint(1, 300), draw.randint(0, 3), [0, 2, 4, 6, 8]
    layout = SharedLayout(4, 8, most, k, layer.tokens.shape[1], format, presum, results)
    launched_by(launched, layout, k, rank, ends, layer.pack(format, ends[rank], ends[rank + 1]))


def launched_by(launched, layout, k, rank, ends, experts, hosts=(), num_experts=None, placed=None) -> None:
    """Run a rank's layer with many numbers of tokens; all that it launches has to be among what was compiled."""
    cpu, most = torch.device("cpu"), layout.max_tokens
    call = ParallelCall(layout, k, rank, tuple(ends), 10.0, warm_up.without_tensors(experts), hosts, num_experts)
    known = compiled([call], most, least=0)
    if hosts:
        grid = Grid.of(hosts)
        owner = open_rail(HostsLayout(layout, grid.grid.shape[1]), grid, rank, ends, 10.0, cpu, shared=False)
    else:
        owner = allocate(layout, rank, ends, 10.0, cpu, shared=False)
    draw = random.Random(most)
    for num_tokens in [0, 1, 1, 1, most, *(draw.randint(0, most) for _ in range(20))]:
        tokens = any_form(draw, torch.zeros(num_tokens, layout.hidden).bfloat16())
        weights, ids = (any_form(draw, torch.zeros(num_tokens, k, dtype=t)) for t in (torch.float32, torch.int32))
        slots = draw.randint(1, k)
        rows = compiled_form(tokens, weights[:, :slots], ids[:, :slots], k)
        launched.clear()
        OnDevice(owner).run_layer(*rows, experts, placed)
        assert launched and keys(launched) <= known, f"{num_tokens} tokens, at most {most}"
    assert placed is None or any(kernel == "place_kernel" for _, kernel, _ in known)


def any_form(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values off 16 bytes, with columns or rows apart, or as it is."""
    if not x.numel():
        return x
    shift, apart, more = draw.randint(0, 1), draw.choice((1, 1, 2)), draw.choice((0, 0, 8, 16))
    columns = x.shape[1] * apart
    room = torch.zeros(len(x) * (columns + more) + shift, dtype=x.dtype)[shift:]
    return room.view(len(x), -1)[:, :columns:apart].copy_(x)


def test_arguments_of_any_form_are_brought_into_the_one_that_is_compiled_for():
    draw = random.Random(0)
    for _ in range(50):
        tokens = any_form(draw, torch.randn(draw.randint(1, 9), 64).bfloat16())
        weights = any_form(draw, torch.rand(len(tokens), 3))
        ids = any_form(draw, torch.randint(0, 8, (len(tokens), 3), dtype=torch.int32))
        got = compiled_form(tokens, weights, ids, 5)
        assert torch.equal(got[0], tokens)
        assert torch.equal(got[1][:, :3], weights) and not got[1][:, 3:].any()
        assert torch.equal(got[2][:, :3], ids) and (got[2][:, 3:] == -1).all()
        assert all(x.stride(1) == 1 and x.data_ptr() % 16 == 0 for x in got)
        assert got[0].stride(0) % 16 == 0 and all(x.is_contiguous() for x in got[1:])
    same = torch.zeros(4, 96)[:, :64], torch.zeros(4, 5), torch.zeros(4, 5, dtype=torch.int32)
    assert all(x is y for x, y in zip(compiled_form(*same, 5), same, strict=True))


@pytest.mark.parametrize("format", mostly_slow(FORMATS, ["bf16", "fp8_block128", "mxfp4"]))
@pytest.mark.parametrize(
    ("hosts", "presum"), mostly_slow(product(("aabb", "abcd"), (False, True)), [("aabb", True), ("abcd", False)])
)
def test_no_call_around_collectives_does(launched, format, presum, hosts):
    draw = random.Random(f"{format} {presum} {hosts}")
    layer, k = drawn_layer(draw, format, experts=8)
    most, rank, ends = draw.randint(1, 200), draw.randint(0, 3), [0, 2, 4, 6, 8]
    layout = SharedLayout(4, 8, most, k, layer.tokens.shape[1], format, presum)
    launched_by(launched, layout, k, rank, ends, layer.pack(format, ends[rank], ends[rank + 1]), tuple(hosts))


ON_HOSTS = pytest.mark.parametrize("hosts", [(), tuple("aabb")], ids=["memory", "hosts"])


@ON_HOSTS
@pytest.mark.parametrize("num_experts", [1, 7, 16])
def test_no_call_with_a_placement_does(launched, num_experts, hosts):
    layer, k = drawn_layer(random.Random(num_experts), "bf16", experts=16, tokens=1)
    rank, ends = 2, [0, 3, 8, 12, 16]
    layout = SharedLayout(4, 16, 40, k, layer.tokens.shape[1], "bf16")
    placed = Placed.on(torch.device("cpu"), [p % num_experts for p in range(16)], num_experts, rank)
    experts = layer.pack("bf16", ends[rank], ends[rank + 1])
    launched_by(launched, layout, k, rank, ends, experts, hosts, num_experts, placed)


@pytest.mark.parametrize("gated", [False, True])
@ON_HOSTS
def test_no_call_with_shared_experts_does(launched, hosts, gated):
    layer, k = drawn_layer(random.Random(gated), "bf16", experts=16, tokens=1)
    rank, ends, hidden = 2, [0, 3, 8, 12, 16], layer.tokens.shape[1]
    gate = torch.ones(hidden) if gated else None
    experts = replace(layer.pack("bf16", ends[rank], ends[rank + 1]), num_shared=2, shared_gate=gate)
    shared = {"first_shared": ends[rank + 1] - 2, "num_shared": 2, "shared_gate": gate}
    placed = Placed.on(torch.device("cpu"), with_shared(None, ends, 2), 8, rank, **shared)
    launched_by(launched, SharedLayout(4, 16, 40, k + 2, hidden, "bf16"), k, rank, ends, experts, hosts, 8, placed)


@pytest.mark.parametrize("format", mostly_slow(FORMATS, ["bf16", "fp8_block128", "mxfp4"]))
def test_no_call_of_counted_rows_does(launched, format):
    draw = random.Random(format)
    layer, k = drawn_layer(draw, format, experts=4)
    experts, most = layer.pack(format), draw.randint(1, 400)
    known = compiled([CountedCall(most, k, warm_up.without_tensors(experts))], most, least=0)
    for num_rows in [0, 1, most, *(draw.randint(0, most) for _ in range(40))]:
        tokens = torch.zeros(num_rows, experts.hidden).bfloat16()
        ids = torch.zeros(num_rows, 1, dtype=torch.int32)
        launched.clear()
        sent = SentTokens(quantize_tokens(tokens, format), ids, torch.ones(num_rows, 1))
        done = counted.run_local_experts(sort_by_expert(sent, 0, 4, num_rows), experts)
        sum_slots(done, torch.arange(num_rows, dtype=torch.int32), -(-num_rows // k) + 1, k)
        assert launched and keys(launched) <= known, f"{num_rows} rows, at most {most}"


@pytest.mark.parametrize("rule", ["deepseek-v3", "mixtral"])
def test_no_router_call_does(launched, rule):
    draw = random.Random(rule)
    gate, bias = torch.zeros(256, 512).bfloat16(), torch.zeros(256) if rule == "deepseek-v3" else None
    options = {"gate": gate, "k": 8, "rule": rule, "expert_bias": bias, "return_counts": True}
    known = compiled([RouterCall({name: warm_up.without_tensors(x) for name, x in options.items()})], 700)
    for num_tokens in [1, 700, *(draw.randint(1, 700) for _ in range(30))]:
        launched.clear()
        route(torch.zeros(num_tokens, 512).bfloat16(), **options)
        assert launched and keys(launched) <= known, f"{num_tokens} tokens"


def test_more_tokens_need_more(launched):
    layer, k = drawn_layer(random.Random(1), "bf16", experts=8)
    call = warm_up.LayerCall(warm_up.without_tensors(layer.pack()), k)
    assert compiled([call], 8) < compiled([call], 200)


@pytest.mark.parametrize("how", mostly_slow(["by workers", "without processes", "workers that fail"], ["by workers"]))
def test_a_call_compiles_nothing_afterwards(monkeypatch, tmp_path, how):
    # Another format for each: this process remembers what it has compiled.
    format, num_topk = {
        "by workers": ("bf16", 5), "without processes": ("fp8_row", 9), "workers that fail": ("fp8_block128", 17),
    }[how]  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planned_kernels, "CHUNK", 10)  # each process looks at some of the numbers
    if how == "without processes":
        monkeypatch.setattr(workers.sys, "executable", "/nowhere/python")
    if how == "workers that fail":
        monkeypatch.setattr(planned_kernels, "compile_at", fails)
    with standing_for(HOPPER):
        calls = [warm_up.LayerCall(experts_without_memory(256, 128, 4, format, "swiglu", bias=True), 3)]
    sites = planned_kernels.compile_calls(calls, HOPPER, range(1, 26), 2, progress=False, for_launch=False)
    assert set(sites) == set(find(calls, HOPPER, range(1, 26)).values()) and len(sites) >= 10
    events = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **event: events.append((event["src"].fn.__name__, event["cache_hit"]))
    )
    for num_tokens in random.Random(how).sample(range(1, 26), 12):
        for kernel, _, arguments, options in launches_of(calls[0], num_tokens, HOPPER):
            compile_like_a_launch(kernel, arguments, options)
    assert events and all(hit for _, hit in events), events
    kernel, _, arguments, options = launches_of(replace(calls[0], num_topk=num_topk), 5, HOPPER)[-1]
    compile_like_a_launch(kernel, arguments, options)
    assert events[-1] == ("combine_kernel", False)  # the test would see it


def fails(calls, target, for_launch, site) -> str:
    return "OSError: no memory"


def refuse(*arguments):
    raise ValueError("too much\nshared memory")


class Here:
    """Stand in for `Workers`: this process does the work."""

    def __init__(self, arch, num_jobs):
        self.map = lambda function, items: [(item, function(item)) for item in items]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_a_kernel_that_is_refused_is_an_error_of_this_process(monkeypatch):
    monkeypatch.setattr(planned_kernels, "Workers", Here)
    monkeypatch.setattr(planned_kernels, "compile_at", fails)
    monkeypatch.setattr(planned_kernels, "compile_here", refuse)
    with standing_for(HOPPER):
        calls = [warm_up.LayerCall(experts_without_memory(256, 128, 4, "bf16", "swiglu", bias=False), 2)]
    with pytest.raises(RuntimeError, match=r"for \d tokens can't be compiled: ValueError: too much shared memory") as e:
        planned_kernels.compile_calls(calls, HOPPER, range(1, 3), 2, progress=False, for_launch=False)
    assert isinstance(e.value.__cause__, ValueError)


def test_on_a_cpu_there_is_nothing_to_compile():
    assert envoi.warm_up(make().pack(), 64, 3) == 0


@pytest.mark.parametrize(
    ("arguments", "named", "text"),
    [
        ((None, 8, 2), {}, r"experts: expected ExpertWeights from envoi.experts.pack, got NoneType"),
        (("pack", 0, 2), {}, r"max_tokens: expected an int of at least 1, got 0"),
        (("pack", 8, True), {}, r"num_topk: expected an int of at least 1, got True"),
        (("pack", 8, 2), {"jobs": 0}, r"jobs: expected an int of at least 1, got 0"),
        (("pack", 8, 2), {"dtypes": (torch.int8, torch.float32)}, r"dtypes: expected int32 or int64, and float32"),
        (("pack", 8, 2), {"dtypes": torch.int32}, r"dtypes: expected int32 or int64, and .*, got torch.int32"),
        (("pack", 8, 2), {"progress": None}, r"progress: expected True or False, got None"),
    ],
)
def test_refusals(arguments, named, text):
    experts = make().pack() if arguments[0] == "pack" else arguments[0]
    with pytest.raises(ValueError, match=text):
        envoi.warm_up(experts, *arguments[1:], **named)


SMALL = ["warm-up", "--hidden", "320", "--intermediate", "128", "--experts", "4", "--topk", "2", "--max-tokens", "3"]


@pytest.fixture
def found(monkeypatch) -> list[planned_kernels.Site]:
    """Have the command find kernels and compile none. Returns the list that they are appended to."""
    sites: list[planned_kernels.Site] = []

    def compile_calls(calls, target, most, *_, **__):
        sites.extend(find(calls, target, most if most[-1] < 100 else range(100, 101)).values())
        return sites

    monkeypatch.setattr(import_module("envoi.ops.moe.parallel.command"), "compile_calls", compile_calls)
    return sites


def test_the_command(found, capsys):
    assert cli.main([*SMALL, "--max-tokens", "9", "--arch", "sm_90", "--sms", "78", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert " kernels for sm_90 with 78 SMs are in Triton's cache" in out.splitlines()[-1]
    assert {"few_kernel", "combine_kernel"} <= set(out.split())  # up to 8 tokens
    assert {"gemm_kernel", "sort_kernel", "gather_kernel", "combine_kernel"} <= set(out.split())
    names = [site.name for site in found]
    assert names.count("gemm_kernel") >= 2 and names.count("sort_kernel") >= 2  # for ids in int32 and in int64


def test_the_command_takes_inter_as_the_others_do(capsys):
    sizes = "--hidden 320 --inter 100 --experts 4 --topk 2 --max-tokens 3 --format mxfp8"
    assert cli.main(["warm-up", *sizes.split(), "--arch", "sm_90"]) == 2
    assert "--intermediate: expected a positive multiple of 32" in capsys.readouterr().err


@pytest.mark.parametrize("arch", EVERY_ARCH)
@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-120b"])
def test_the_command_compiles_a_models_router(arch, model, found):
    sizes = "--hidden 320 --intermediate 128 --experts 128 --topk 4 --max-tokens 40"
    assert cli.main(["warm-up", *sizes.split(), "--arch", arch]) == 0
    without = {site.name for site in found}
    found.clear()
    assert cli.main(["warm-up", *sizes.split(), "--arch", arch, "--router", model]) == 0
    assert {site.name for site in found} - without == {"router_kernel"}


def test_the_commands_router_is_the_models(launched):
    known = compiled([call_of_model("--router", "deepseek-v3", 256, 8, 512)], 40)
    launched.clear()
    gate, bias = torch.zeros(256, 512).bfloat16(), torch.zeros(256)
    route(torch.zeros(33, 512).bfloat16(), gate, 8, rule="deepseek-v3", expert_bias=bias)
    assert launched and keys(launched) <= known


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        ([], {"pull_kernel", "send_partial_sums_kernel"}),
        (["--no-presum"], {"pull_kernel", "sum_kernel"}),
        (["--results", "fp8_1x128"], {"pull_kernel", "sum_kernel"}),
    ],
)
def test_the_command_takes_the_path_of_an_object(flags, kernels, found):
    sizes = "--hidden 2048 --intermediate 768 --experts 16 --topk 8 --max-tokens 512 --format fp8_block128 --arch sm_90"
    assert cli.main(["warm-up", *sizes.split(), "--ranks", "2", *flags]) == 0
    names = {site.name for site in found} & {"pull_kernel", "send_partial_sums_kernel", "sum_kernel"}
    assert names == kernels


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "sm_90", "--no-presum"], "--presum: expected it only with --ranks of 2 or more, got --ranks 1"),
        (["--arch", "sm_90", "--results", "fp8"], "--results: expected one of 'bf16', 'fp8_1x128', got 'fp8'"),
        (
            ["--arch", "sm_90", "--hidden", "128", "--results", "fp8_1x128"],
            "--results: expected 'bf16' with --ranks 1, got 'fp8_1x128'",
        ),
        (["--arch", "sm_75"], "--arch: expected one of sm_90, sm_100, sm_103, got 'sm_75'"),
        (["--arch", "sm_90", "--topk", "5"], "--topk: expected at most the 4 experts, got 5"),
        (["--arch", "sm_90", "--ranks", "3"], "--experts: expected a multiple of 3 (each rank has as many), got 4"),
        (["--arch", "sm_90", "--jobs", "0"], "--jobs: expected an int of at least 1, got 0"),
        (["--arch", "sm_90", "--format", "int3"], "--format: expected"),
        (["--arch", "sm_90", "--activation", "tanh"], "activation: expected"),
        (["--arch", "sm_90", "--sms", "0"], "--sms: expected an int of at least 1, got 0"),
        (["--arch", "sm_90", "--router", "qwen9"], "--router: expected one of 'mixtral'"),
        (["--arch", "sm_90", "--router", "deepseek-v3"], "--router: gate.shape[0]: expected a multiple of 8"),
        (["--sms", "78"], "--sms: expected it only beside --arch; the GPU here has its own"),
    ],
)
def test_the_command_refuses(arguments, text, capsys):
    assert cli.main([*SMALL, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_command_needs_a_gpu_or_an_architecture(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(SMALL) == 2
    assert "--arch: expected one of sm_90, sm_100, sm_103 on a machine without a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (7, "router: expected a dict of named arguments of envoi.route, got int"),
        ({"gates": 1, "k": 2}, "router: expected names among gate, k, alpha, rule, .*, got 'gates'"),
        ({"k": 2}, "router: gate: expected bfloat16 or .*, got NoneType"),
        ({"gate": torch.zeros(8, 128)}, "router: k: expected an int from 1 to 32, got None"),
        ({"gate": torch.zeros(8, 64), "k": 2}, r"router: gate: expected .* \[num_experts, 128\], got float32"),
        ({"gate": torch.zeros(8, 128), "k": 2, "rule": "deepseek-v3x"}, "router: rule: expected one of"),
        ({"gate": torch.zeros(8, 128), "k": 9}, "router: k: expected at most num_experts = 8, got 9"),
        ({"gate": torch.zeros(8, 128), "k": 2, "alpha": 1e39}, "router: alpha: expected a finite number that"),
        ({"gate": torch.zeros(8, 128), "k": 2, "return_counts": 1}, "router: return_counts: expected True or False"),
    ],
)
def test_a_routers_arguments_are_checked_on_a_cpu_too(router, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        envoi.warm_up(make(hidden=128).pack(), 8, 2, router)


def test_a_routers_arguments():
    gate, ids = torch.zeros(8, 128), torch.zeros(5, dtype=torch.int64)
    table = torch.zeros(9, 2, dtype=torch.int32)
    for more in ({}, {"rule": "mixtral"}, {"alpha": 2, "return_logits": True}, {"token_ids": ids, "hash_table": table}):
        assert envoi.warm_up(make(hidden=128).pack(), 8, 2, {"gate": gate, "k": 2} | more) == 0
