"""`python -m bench.suites.engine_process ..`: a server's engine with one backend of experts, timed when it is asked.

`engine_turns.py` starts it, once for each model and backend. Weights are random, of a trained model's magnitudes, and
the same for every backend: each tensor is drawn from a seed made of its name. Each answer is a line of JSON:

    when it takes requests   version of the engine; gpu; ready_s: seconds from the process's start;
                             memory_gib: what its weights and its cache of keys and values take, where it is known
    asked for "warm"         same_again: whether a greedy run repeats its own tokens, after a call of each step
    asked for "round"        wall times in us, by step: "prefill 16x2048" of one new token for each sequence,
                             "decode 64" of a step of 64 sequences: 2 + STEPS tokens less 2 tokens, over STEPS
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.suites.models import MODELS, Attention, LatentAttention, Model

STEPS = 64
CONTEXT = 32  # tokens of each sequence before decode
WARM_PREFILLS = 3  # DeepGEMM compiles kernels in the first ones
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BACKENDS = {  # name: settings of Envoi in vLLM
    "default": {"ENVOI_VLLM": "0", "ENVOI_VLLM_ROUTE": "0"},
    "envoi": {"ENVOI_VLLM": "1", "ENVOI_VLLM_ROUTE": "0"},
    "routed": {"ENVOI_VLLM": "1", "ENVOI_VLLM_ROUTE": "1"},
}
RUNNERS = {"default": "auto", "envoi": "envoi"}  # name: SGLang's runner of experts
CHUNK = 8192  # tokens of a prefill's step
CACHE_GIB = 3  # of keys and values: 32,000 tokens of a model with 100 KB each, more than any step has
CACHE_TOKENS = 36864  # the same for SGLang, which counts tokens
DRAWN_BYTES = 32 << 20  # of weights at a time: see `envoi.quant.fragments.PART_BYTES`


@dataclass(frozen=True)
class Served:
    """What the engine needs of a model beyond its `Model`: the class, its layers, and keys of its config.json."""

    architecture: str
    model_type: str
    num_layers: int
    vocabulary: int
    keys: dict[str, Any]
    formats: tuple[str, ...]
    attention: str = "FLASH_ATTN"  # vLLM's
    named: tuple[tuple[str, str], ...] = ()  # (format, name for --moe-backend) that vLLM is also timed with
    in_sglang: tuple[str, ...] = ()  # formats

    def formats_in(self, engine: str) -> tuple[str, ...]:
        """Return the formats in which an engine serves it here."""
        return {"vllm": self.formats, "sglang": self.in_sglang}[engine]

    def named_in(self, engine: str, format: str) -> list[str]:
        """Return the backends of experts that are timed beside the engine's own choice."""
        return [name for served, name in self.named if served == format and engine == "vllm"]


SERVED = {
    "Qwen3-30B-A3B": Served(
        "Qwen3MoeForCausalLM", "qwen3_moe", 48, 151936,
        {
            "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
            "rope_theta": 1e6, "max_window_layers": 48, "use_sliding_window": False,
        },
        ("bf16", "fp8_block128"), named=(("fp8_block128", "deep_gemm"),), in_sglang=("bf16",),
    ),
    "gpt-oss-20b": Served(
        "GptOssForCausalLM", "gpt_oss", 24, 201088,
        {
            "num_local_experts": 32, "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0,
            "initial_context_length": 4096, "rope_theta": 150000, "attention_bias": True, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        ("mxfp4",), named=(("mxfp4", "marlin"),),
    ),
    # As many layers as fit, beside the one whose error is measured while the engines start; the first is dense.
    "DeepSeek-V3": Served(
        "DeepseekV3ForCausalLM", "deepseek_v3", 4, 129280,
        {
            "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1,
            "first_k_dense_replace": 1, "rope_theta": 10000.0, "num_nextn_predict_layers": 0,
        },
        ("fp8_block128",),
        "TRITON_MLA",
    ),
}  # fmt: skip


def config_of(name: str, format: str, num_layers: int | None = None) -> dict[str, Any]:
    """Return a model's config.json; num_layers: if not its own. Raises ValueError for an unknown model or format."""
    if name not in SERVED or format not in SERVED[name].formats:
        known = "; ".join(f"{model}: {', '.join(served.formats)}" for model, served in SERVED.items())
        raise ValueError(f"model, format: expected one of {known}; got {name} {format}")
    served, sizes = SERVED[name], next(model for model in MODELS if model.name == name)
    layers = num_layers or served.num_layers
    found = {
        "architectures": [served.architecture], "model_type": served.model_type, "torch_dtype": "bfloat16",
        "hidden_size": sizes.hidden, "moe_intermediate_size": sizes.expert_intermediate,
        "intermediate_size": sizes.intermediate or sizes.expert_intermediate, "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.num_topk, "num_hidden_layers": layers, "vocab_size": served.vocabulary,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "attention_bias": False, "attention_dropout": 0.0, "use_cache": True,
        **_attention(sizes), **served.keys,
    }  # fmt: skip
    if served.model_type == "gpt_oss":
        found["layer_types"] = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    kept = {
        "qwen3_moe": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(layers))],
        "gpt_oss": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "deepseek_v3": ["lm_head"],
    }[served.model_type]
    if format == "fp8_block128":
        found["quantization_config"] = FP8 | {"modules_to_not_convert": kept}
    if format == "mxfp4":
        found["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return found


def _attention(sizes: Model) -> dict[str, int]:
    part = sizes.attention
    if isinstance(part, Attention):
        return {
            "num_attention_heads": part.num_heads, "num_key_value_heads": part.num_kv_heads, "head_dim": part.head_dim
        }  # fmt: skip
    assert isinstance(part, LatentAttention)
    return {
        "num_attention_heads": part.num_heads, "num_key_value_heads": part.num_heads, "q_lora_rank": part.q_rank,
        "kv_lora_rank": part.kv_rank, "qk_nope_head_dim": part.nope_dim, "qk_rope_head_dim": part.rope_dim,
        "v_head_dim": part.v_dim,
    }  # fmt: skip


def fill(model: Any, *_: object, **__: object) -> None:
    """Write random weights of a trained model's magnitudes; in place of the engine's own dummy ones, all near 0."""
    import torch

    for name, tensor in model.state_dict().items():
        source = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        for part in tensor.split(_together(tensor)) if tensor.dim() == 3 else [tensor]:
            _draw(name, part, source)


def _together(experts: Any) -> int:
    """Return how many experts to draw at a time: a draw takes memory of its own."""
    return max(1, len(experts) * DRAWN_BYTES // max(1, experts.nbytes))


def _replace(place: Any, name: str, new: Any) -> None:
    """Put what is ours in an engine's place. Raises AttributeError if it has none: its weights would be its own."""
    getattr(place, name)
    setattr(place, name, new)


def _draw(name: str, x: Any, source: Any) -> None:
    import torch

    def normal(std: float) -> Any:
        return torch.randn(x.shape, generator=source, device=x.device, dtype=torch.bfloat16) * std

    is_factor = "scale" in name
    if x.numel() == 1:  # a scale of the whole tensor, or of the cache
        x.fill_(1)
    elif x.dtype == torch.uint8:  # two FP4 values, or an E8M0 factor about 2^-8, so that a product's sum is about 1
        low, high = (117, 121) if is_factor else (0, 256)
        x.copy_(torch.randint(low, high, x.shape, generator=source, device=x.device, dtype=torch.uint8))
    elif x.dtype == torch.float8_e4m3fn:
        x.copy_(normal(64.0).clamp(-448, 448).to(x.dtype))
    elif not x.is_floating_point():
        return  # tables that the model has made
    elif is_factor:
        x.copy_(torch.rand(x.shape, generator=source, device=x.device) * 4e-4 + 2e-4)
    elif "norm" in name:
        x.fill_(1.0)
    elif "bias" in name or "sinks" in name:
        x.copy_(normal(0.02))
    elif "embed" in name:
        x.copy_(normal(1.0))
    else:
        is_gate = "gate.weight" in name or "router" in name
        x.copy_(normal((2.0 if is_gate else 1.0) * x.shape[-1] ** -0.5))


class Vllm:
    """vLLM's engine in this process; it reads the environment when it is imported."""

    def __init__(self, arguments: argparse.Namespace, folder: str, sizes: list[int]):
        """folder: has a config.json; sizes: numbers of sequences of its graphs."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # DeepGEMM's kernels are compiled in the first calls that need them, not for all numbers of tokens.
            "VLLM_DEEP_GEMM_WARMUP": "skip", **BACKENDS.get(arguments.backend, BACKENDS["default"]),
        }  # fmt: skip
        loader: Any = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
        attention: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        self.vllm: Any = importlib.import_module("vllm")
        self.torch: Any = importlib.import_module("torch")
        _replace(loader.DummyModelLoader, "load_weights", lambda self, model, *rest: fill(model))
        self.engine = self.vllm.LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=4096,
            # Other engines are in the GPU's memory: what is free at a moment says nothing.
            gpu_memory_utilization=0.2, kv_cache_memory_bytes=CACHE_GIB << 30,
            max_num_batched_tokens=CHUNK, max_num_seqs=max(sizes), seed=0,
            enable_prefix_caching=False, disable_log_stats=True,
            moe_backend="auto" if arguments.backend in BACKENDS else arguments.backend,
            attention_backend=attention.AttentionBackendEnum[SERVED[arguments.model].attention],
            compilation_config={"cudagraph_capture_sizes": sizes},
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """Return its version and memory."""
        memory_gib = round(self.torch.cuda.memory_allocated() / 2**30, 2)
        return {"version": self.vllm.__version__, "memory_gib": memory_gib}

    def generate(self, batch: list[list[int]], new: int) -> list[list[int]]:
        """Return so many new tokens of each sequence."""
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [self.vllm.TokensPrompt(prompt_token_ids=tokens) for tokens in batch]
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        self.torch.cuda.synchronize()
        return [list(output.outputs[0].token_ids) for output in outputs]


class Sglang:
    """SGLang's engine, whose scheduler and model are in a process of their own."""

    def __init__(self, arguments: argparse.Namespace, folder: str, sizes: list[int]):
        """folder: has a config.json; sizes: numbers of sequences of its graphs."""
        if arguments.backend not in RUNNERS:
            raise ValueError(f"backend: expected one of {', '.join(RUNNERS)} for SGLang, got {arguments.backend}")
        self.sglang: Any = importlib.import_module("sglang")
        whole: Any = importlib.import_module("sglang.srt.entrypoints.engine")
        engine = type("Engine", (whole.Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
        self.engine = engine(
            model_path=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", context_length=4096,
            # Other engines are in the GPU's memory: what is free at a moment says nothing.
            mem_fraction_static=0.95, max_total_tokens=CACHE_TOKENS,
            chunked_prefill_size=CHUNK, max_running_requests=max(sizes), random_seed=0, disable_radix_cache=True,
            moe_runner_backend=RUNNERS[arguments.backend], attention_backend="triton", sampling_backend="pytorch",
            grammar_backend="none", cuda_graph_bs_decode=sizes, disable_prefill_cuda_graph=True, log_level="info",
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """Return its version."""
        return {"version": self.sglang.__version__}

    def generate(self, batch: list[list[int]], new: int) -> list[list[int]]:
        """Return so many new tokens of each sequence."""
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        return [output["output_ids"] for output in self.engine.generate(input_ids=batch, sampling_params=params)]


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler, in its process, with a model whose weights are ours."""
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    scheduler: Any = importlib.import_module("sglang.srt.managers.scheduler")
    _replace(loader, "initialize_dummy_weights", fill)
    scheduler.run_scheduler_process(*arguments, **named)


ENGINES = {"vllm": Vllm, "sglang": Sglang}


def main() -> None:
    """Start the engine, and answer what is asked."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", choices=SERVED, required=True)
    parser.add_argument("--format", required=True)
    named = dict.fromkeys(name for served in SERVED.values() for _, name in served.named)
    parser.add_argument("--backend", choices=[*BACKENDS, *named], required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prefill", default="16x2048")
    parser.add_argument("--decode", default="1,16,64,256")
    parser.add_argument("--answers", metavar="FD", type=int, required=True, help="an open file's number")
    arguments = parser.parse_args()
    batches = [int(n) for n in arguments.decode.split(",")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tempfile.mkdtemp()
    config = config_of(arguments.model, arguments.format, arguments.layers)
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = ENGINES[arguments.engine](arguments, folder, sorted({1, 2, 4, 8, *batches}))
    ready_s = round(time.monotonic() - begin, 1)
    import torch

    first = engine.about() | {"gpu": torch.cuda.get_device_name(), "ready_s": ready_s}
    steps = Steps(engine, SERVED[arguments.model].vocabulary, arguments.prefill, batches)
    with os.fdopen(arguments.answers, "w", buffering=1) as answers:
        print(json.dumps(first), file=answers)
        for line in sys.stdin:
            print(json.dumps(steps.warm() if line.strip() == "warm" else steps.round()), file=answers)


class Steps:
    """Prompts of a model, the same in every process, and calls of an engine with them."""

    def __init__(self, engine: Vllm | Sglang, vocabulary: int, prefill: str, batches: Sequence[int]):
        """prefill: sequences x tokens of each."""
        import torch

        self.engine, self.prefill = engine, f"prefill {prefill}"
        source = torch.Generator().manual_seed(0)

        def prompts(count: int, length: int) -> list[list[int]]:
            draws = (torch.randint(0, vocabulary - 1000, (length,), generator=source) for _ in range(count))
            return [draw.tolist() for draw in draws]

        self.greedy, self.long = prompts(8, 64), prompts(*(int(n) for n in prefill.split("x")))
        self.short = {f"decode {size}": prompts(size, CONTEXT) for size in batches}

    def warm(self) -> dict[str, Any]:
        """Make each step once, and the prefill WARM_PREFILLS times."""
        same = self._generate(self.greedy, 32)[1] == self._generate(self.greedy, 32)[1]
        for _ in range(WARM_PREFILLS):
            self._generate(self.long, 1)
        for batch in self.short.values():
            self._generate(batch, 4)
        return {"same_again": same}

    def round(self) -> dict[str, float]:
        """Return the time of each step in us."""
        found = {self.prefill: 1e6 * self._generate(self.long, 1)[0]}
        for name, batch in self.short.items():
            short, long = self._generate(batch, 2)[0], self._generate(batch, 2 + STEPS)[0]
            found[name] = 1e6 * (long - short) / STEPS
        return found

    def _generate(self, batch: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Return the seconds of a call, and its tokens."""
        start = time.perf_counter()
        found = self.engine.generate(batch, new)
        return time.perf_counter() - start, found


if __name__ == "__main__":
    sys.exit(main())
