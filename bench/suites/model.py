"""Models in transformers, all of their layers, random weights: Qwen3-MoE with the layer sizes of published models.

    prefill             one forward of sequences of 4096 tokens, logits of the last token alone
    decode              one step of sequences that have 128 tokens in a static cache, called eagerly
    decode in a graph   replays of a CUDA graph of that step: the device's time alone
    decode compiled     the same of a step that torch.compile has compiled whole

Wall time of a step until the device is done, contenders in turn: Envoi in the case's format and transformers' own
"grouped_mm", "batched_mm" (of decode, for which `generate` chooses it) and "eager" in bf16, on the same weights;
"eager" can't be captured. Details: tokens per second, and on GPUs the most memory that a step took, with weights: of
each contender, and of Envoi if `release` had freed the weights that it packed into copies. Error: the first layer's
experts on random tokens, against float64.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch

from bench.shapes import Case, ModelShape, Options
from bench.suites.models import MODELS, Attention, Model
from bench.timing import NUM_WARMUPS, Run, Timing, replay_of, summarize
from bench.trial import OURS, Bench, Compiler, Trial, those_that_run
from envoi.ops.moe.op import tensors_of
from envoi.ops.moe.packing import pack
from envoi.ops.moe.support import experts_without_memory
from envoi.ops.moe.warm_up import LayerCall, compiles
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.planned_kernels import compile_calls
from envoi.tune.problems import generator, relative_error
from tools.oracles.moe import moe_oracle

MAX_BYTES = 40e9  # of weights, and as much again for Envoi's packing of the experts
VOCABULARY = 151936
NUM_LAYERS = {"Qwen3-30B-A3B": 48, "gpt-oss-20b": 24}
FORMATS = {"Qwen3-30B-A3B": ("bf16", "fp8_block128"), "gpt-oss-20b": ("bf16", "mxfp4")}
PREFILL = ((1, 4096), (4, 4096))
DECODE = tuple((num_sequences, 1) for num_sequences in (1, 16, 64, 256))
HOW = {"eager": "", "graph": " in a graph", "compiled": " compiled"}
CONTEXT, ROOM = 128, 128  # tokens in the cache before the first step, and for the steps that are made
TINY = Model("tiny", "", 128, 0, Attention(4, 2, 32), 8, 2, 128)
TINY_VOCABULARY = 256
WAYS = ("eager", "graph")  # of decode, measured before what has to be compiled
BATCHED_AT_MOST = 64  # sequences: batched_mm copies the weights of each slot
ERROR_TOKENS = 64
ROUTED = torch.int64, torch.bfloat16  # ids and weights that transformers' router gives


def cases(options: Options) -> list[Case]:
    """Return the cases; options.layers: of each model, None for as many as fit into 40 GB."""
    found = [_case(shape) for shape in _shapes(options, PREFILL, ("eager",))]
    found += [_case(shape) for shape in _shapes(options, DECODE, WAYS)]
    found += [_case(shape) for shape in _shapes(options, DECODE, ("compiled",))]  # last: they take longest
    layers = options.layers or 2
    small = [
        ModelShape("tiny", layers, "bf16", 2, 8),
        ModelShape("tiny", layers, "mxfp4", 2, 1),
        ModelShape("tiny", layers, "bf16", 2, 1, "graph"),
        ModelShape("tiny", layers, "bf16", 2, 1, "compiled"),
    ]
    return found + [_case(shape, on_cuda=False) for shape in small]


def _shapes(options: Options, steps: Sequence[tuple[int, int]], ways: Sequence[str]) -> Iterator[ModelShape]:
    for name, formats in FORMATS.items():
        layers = options.layers or default_layers(name)
        for format in formats:
            for way in ways:
                for num_sequences, num_tokens in steps:
                    yield ModelShape(name, layers, format, num_sequences, num_tokens, way)


def _case(shape: ModelShape, on_cuda: bool = True) -> Case:
    if shape.num_tokens > 1:
        step = f"prefill {shape.num_sequences}x{shape.num_tokens}"
    else:
        step = f"decode {shape.num_sequences}{HOW[shape.how]}"
    name = f"{shape.model} sizes x{shape.num_layers}, {step} {shape.format}"
    return Case("model", name, shape, on_cuda, not on_cuda)


def sizes_of(name: str) -> Model:
    """Return the sizes of a model of this suite."""
    return TINY if name == "tiny" else next(model for model in MODELS if model.name == name)


def default_layers(name: str) -> int:
    """Return as many layers as fit into 40 GB, at most the model's own."""
    sizes = sizes_of(name)
    attention = cast(Attention, sizes.attention)
    experts = 3 * sizes.num_experts * sizes.hidden * sizes.expert_intermediate
    heads = 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_dim * sizes.hidden
    rest = 2 * VOCABULARY * sizes.hidden
    return max(1, min(NUM_LAYERS[name], int((MAX_BYTES / 2 - rest) / (2 * experts + heads))))


@dataclass
class Subject:
    """Model whose experts' implementation is switched.

    packed_bytes: of Envoi's packing, once there is one; freed_bytes: of the weights that it could free then. errors: of
    the implementations, once they are known.
    """

    model: Any
    device: torch.device
    packed_bytes: int = 0
    freed_bytes: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Tell whether memory is counted."""
        return self.device.type == "cuda"

    def allocated(self) -> int:
        """Return the bytes that tensors take on the GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0


@dataclass(frozen=True)
class Contender:
    """Implementation of the experts, by its name in transformers, and the step that is timed.

    peak_bytes: what the step needs at most, with weights, packing and cache, without those of other contenders.
    """

    implementation: str
    step: Run
    peak_bytes: int


@torch.no_grad()
def measure(case: Case, bench: Bench) -> Trial:
    """Measure one step of a model."""
    from envoi.integrations import transformers as integration

    shape = cast(ModelShape, case.shape)
    integration.register()
    torch._dynamo.reset()
    subject = _build(shape.model, shape.num_layers, shape.format, bench.device)
    others, missing = those_that_run(
        {name: lambda name=name: _contender(subject, shape, name, bench.compiler) for name in theirs(shape)}
    )
    ours = _contender(subject, shape, integration.implementation_name(shape.format), bench.compiler)
    contenders = {OURS: ours, **others}
    timings = _rounds(contenders, subject, bench.clock.repeat)
    num_tokens = shape.num_sequences * shape.num_tokens
    details: dict[str, str | float] = {"tokens_per_s": float(f"{num_tokens / timings[OURS].p50_us * 1e6:.5g}")}
    if subject.on_gpu:
        details |= {f"{name}_peak_gb": round(made.peak_bytes / 1e9, 2) for name, made in contenders.items()}
        if subject.freed_bytes:
            details["envoi_released_peak_gb"] = round((ours.peak_bytes - subject.freed_bytes) / 1e9, 2)
    return Trial(timings.pop(OURS), timings, _errors(subject, shape, ours), 0.0, 0.0, "bf16", missing, details)


def theirs(shape: ModelShape) -> list[str]:
    """Return the names of transformers' implementations beside which a step is measured."""
    found = ["grouped_mm"]
    if shape.num_tokens == 1 and shape.num_sequences <= BATCHED_AT_MOST:
        found.append("batched_mm")
    return found if shape.how != "eager" else [*found, "eager"]


@lru_cache(maxsize=1)
def _build(name: str, num_layers: int, format: str, device: torch.device) -> Subject:
    """Build a model. format: a model is built anew for each, so that only one packing of its weights is kept."""
    import transformers

    del format
    sizes = sizes_of(name)
    attention = cast(Attention, sizes.attention)
    options: dict[str, Any] = {
        "vocab_size": TINY_VOCABULARY if sizes is TINY else VOCABULARY, "hidden_size": sizes.hidden,
        "num_hidden_layers": num_layers, "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
        "intermediate_size": sizes.expert_intermediate, "moe_intermediate_size": sizes.expert_intermediate,
        "num_experts": sizes.num_experts, "num_experts_per_tok": sizes.num_topk, "norm_topk_prob": True,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    config = transformers.Qwen3MoeConfig(**options)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        ).eval()
        source = generator(device, sizes.hidden, num_layers)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=source)
    return Subject(model, device)


def _contender(subject: Subject, shape: ModelShape, implementation: str, compiler: Compiler) -> Contender:
    """Make a contender and warm it up; count the memory that its steps take."""
    subject.model.set_experts_implementation(implementation)
    own = implementation.startswith(OURS)
    known = _weights(subject) + subject.packed_bytes * own  # allocated by now, and this contender's too
    before = subject.allocated()
    step = _prefill(subject, shape) if shape.num_tokens > 1 else _decode(subject, shape, implementation, compiler)
    step()  # packs
    _synchronize(subject)
    if own and not subject.packed_bytes:
        subject.packed_bytes, subject.freed_bytes = _packed(subject, shape)
    if subject.on_gpu:
        torch.cuda.reset_peak_memory_stats(subject.device)
    for _ in range(NUM_WARMUPS):
        step()
    _synchronize(subject)
    most = torch.cuda.max_memory_allocated(subject.device) if subject.on_gpu else 0
    return Contender(implementation, step, known + most - before)


def _weights(subject: Subject) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())


def _packed(subject: Subject, shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of Envoi's packing of all experts without tensors that it shares with the weights, and the bytes
    of the weights that it doesn't share."""
    from envoi.integrations.transformers import packed_experts

    total = freed = 0
    for layer in subject.model.model.layers:
        packed = [x for x in tensors_of(packed_experts(layer.mlp.experts, shape.format)) if x is not None]
        own = list(layer.mlp.experts.parameters())
        total += _bytes_without(packed, own)
        freed += _bytes_without(own, packed)
    return total, freed


def _bytes_without(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    there = {x.data_ptr() for x in others}
    return sum(x.numel() * x.element_size() for x in tensors if x.data_ptr() not in there)


def _prefill(subject: Subject, shape: ModelShape) -> Run:
    ids = _tokens(subject, shape.num_sequences, shape.num_tokens)
    return lambda: subject.model(ids, use_cache=False, logits_to_keep=1).logits


def _decode(subject: Subject, shape: ModelShape, implementation: str, compiler: Compiler) -> Run:
    """Return a step; each adds a token to the cache, which has room for ROOM of them."""
    import transformers

    cache = transformers.StaticCache(config=subject.model.config, max_cache_len=CONTEXT + ROOM)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if implementation == "batched_mm":  # of so many tokens it would copy more weights than a GPU holds
        subject.model.set_experts_implementation("grouped_mm")
    subject.model(_tokens(subject, shape.num_sequences, CONTEXT), **options)
    subject.model.set_experts_implementation(implementation)
    ids = _tokens(subject, shape.num_sequences, 1)
    if shape.how == "compiled":
        fast = compiler.whole(subject.model.forward, lambda f: f(ids, **options))
        return _captured(subject, lambda: fast(ids, **options).logits)
    step = lambda: subject.model(ids, **options).logits  # noqa: E731
    return step if shape.how == "eager" else _captured(subject, step)


def _captured(subject: Subject, step: Run) -> Run:
    """Return replays of a step from a CUDA graph; on a CPU the step itself."""
    if not subject.on_gpu:
        return step
    side = torch.cuda.Stream(subject.device)
    side.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(side):
        for _ in range(NUM_WARMUPS):
            step()
    torch.cuda.current_stream(subject.device).wait_stream(side)
    _synchronize(subject)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return replay_of(graph, step)


def _tokens(subject: Subject, num_sequences: int, num_tokens: int) -> torch.Tensor:
    source = generator(subject.device, num_sequences, num_tokens)
    most = subject.model.config.vocab_size
    return torch.randint(0, most, (num_sequences, num_tokens), generator=source, device=subject.device)


def _rounds(contenders: dict[str, Contender], subject: Subject, n: int) -> dict[str, Timing]:
    """Time a step of each contender once a round, from an idle device until it is done."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(min(n, ROOM - 3 * NUM_WARMUPS - 2)):
        for name, contender in contenders.items():
            subject.model.set_experts_implementation(contender.implementation)
            _synchronize(subject)
            start = time.perf_counter()
            contender.step()
            _synchronize(subject)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: summarize(found) for name, found in times.items()}


def _synchronize(subject: Subject) -> None:
    if subject.on_gpu:
        torch.cuda.synchronize(subject.device)


def _errors(subject: Subject, shape: ModelShape, ours: Contender) -> dict[str, float]:
    """Return the errors of the first layer's experts: Envoi's, and grouped_mm's."""
    names = {"ours": ours.implementation, "torch": "grouped_mm"}
    if not set(names.values()) <= set(subject.errors):
        subject.errors |= _errors_of(subject, shape, list(names.values()))
    return {name: subject.errors[implementation] for name, implementation in names.items()}


def _errors_of(subject: Subject, shape: ModelShape, implementations: Sequence[str]) -> dict[str, float]:
    module = subject.model.model.layers[0].mlp.experts
    sizes, source = sizes_of(shape.model), generator(subject.device, shape.num_layers)
    tokens = torch.randn(ERROR_TOKENS, sizes.hidden, generator=source, device=subject.device).to(torch.bfloat16)
    scores = torch.rand(ERROR_TOKENS, sizes.num_experts, generator=source, device=subject.device)
    weights, ids = scores.softmax(-1).topk(sizes.num_topk)
    weights = weights.to(torch.bfloat16)
    want = torch.zeros(tokens.shape, dtype=torch.float64, device=subject.device)
    for expert in range(sizes.num_experts):  # one at a time: all of them in float64 are many
        one = slice(expert, expert + 1)
        packed = pack(module.gate_up_proj.data[one], module.down_proj.data[one], "bf16")
        want += moe_oracle(tokens, weights, (ids == expert).to(torch.int32) - 1, packed)
    found = {}
    for implementation in implementations:
        subject.model.set_experts_implementation(implementation)
        found[implementation] = relative_error(module(tokens, ids, weights), want)
    return found


def compile_ahead(cases: Sequence[Case], device: torch.device, num_processes: int | None) -> None:
    """Compile in processes the kernels of Envoi that these cases launch. An error is printed: the case will say it."""
    shapes = [cast(ModelShape, case.shape) for case in cases if case.suite == "model"]
    if not shapes or not compiles(device):
        return
    target = Target.of(device)
    with standing_for(target):
        calls = [_layer_call(*kind) for kind in dict.fromkeys((shape.model, shape.format) for shape in shapes)]
    start = time.monotonic()
    try:
        sites = compile_calls(calls, target, token_counts(shapes), num_processes, progress=False, for_launch=True)
    except RuntimeError as error:
        print(f"model: {error}", file=sys.stderr, flush=True)
        return
    print(f"model: {len(sites)} kernels compiled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def token_counts(shapes: Sequence[ModelShape]) -> list[int]:
    """Return the numbers of tokens with which the experts are called, the context before decode and errors too."""
    found = {ERROR_TOKENS}
    for shape in shapes:
        found.add(shape.num_sequences * shape.num_tokens)
        if shape.num_tokens == 1:
            found.add(shape.num_sequences * CONTEXT)
    return sorted(found)


def _layer_call(name: str, format: str) -> LayerCall:
    sizes = sizes_of(name)
    experts = experts_without_memory(
        sizes.hidden, sizes.expert_intermediate, sizes.num_experts, format, "swiglu", False
    )
    return LayerCall(experts, sizes.num_topk, ROUTED)
