"""Greedy tokens of a model that vLLM serves, beside transformers in float32: on a GPU.

    python -m tools.engines.vllm_tokens --model examples/tiny_moe/model --backend envoi
    python -m tools.engines.vllm_tokens --model examples/tiny_moe/model --backend vllm

The served sequences are read again by the reference, position by position: a token must be the reference's best one, or
no further behind it than twice the error that bf16 usually makes in the reference's logits. Exits with 1 if one isn't.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

MODULES = ("csv", "heapq", "textwrap", "shlex", "queue", "shelve", "fractions", "configparser")  # kept out of training
TIMES = 2  # margin that is allowed, over the error of bf16's logits
# Of positions, by their largest error, in ascending order: at the last ones bf16 routes a token to other experts.
USUAL = 0.9


def main() -> int:
    """Serve, compare, print a line; return 1 if a token is worse than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/tiny_moe/model")
    parser.add_argument("--backend", default="envoi", choices=("envoi", "vllm"))
    parser.add_argument("--quantization")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt-bytes", type=int, default=160)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    os.environ |= {
        "ENVOI_VLLM": str(int(args.backend == "envoi")), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_USE_DEEP_GEMM": "0",
    }  # fmt: skip
    from envoi.integrations import lines

    prompts = [list(_source(name)[: args.prompt_bytes]) for name in MODULES]
    begun = time.time()
    served, again = _serve(args, prompts)
    # Not by a handler of the log: vLLM 0.33 takes foreign ones away when it starts.
    said = sorted(lines._said)
    print(f"served in {time.time() - begun:.0f} s; {'; '.join(said) or 'nothing said'}", flush=True)
    if any("Envoi runs the MoE layers" in text for text in said) != (args.backend == "envoi"):
        print("FAILED: the layers didn't run on what was asked for")
        return 1
    return _compare(args, prompts, served, again)


def _source(name: str) -> bytes:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"Python has no source of {name}")
    return Path(spec.origin).read_bytes()


def _serve(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[list[int]], bool]:
    """Return the greedy tokens of each prompt, and whether a second run gives the same."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, seed=0,
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30,  # whatever else is on the GPU
        max_num_batched_tokens=2048, max_num_seqs=16, enable_prefix_caching=False,
        enforce_eager=args.eager, disable_log_stats=True, quantization=args.quantization,
        compilation_config=None if args.eager else {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.new, ignore_eos=True, detokenize=False)

    def run() -> list[list[int]]:
        found = llm.generate([TokensPrompt(prompt_token_ids=x) for x in prompts], params, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in found]

    first = run()
    return first, run() == first


def _compare(args: argparse.Namespace, prompts: list[list[int]], served: list[list[int]], again: bool) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    whole = torch.tensor([x + y for x, y in zip(prompts, served, strict=True)], device="cuda")
    begin = len(prompts[0])
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="eager")
        model.cuda().eval()
        with torch.inference_mode():
            logits[dtype] = model(whole).logits[:, begin - 1 : -1].float()
        del model
    exact, rounded = logits.values()
    error = float((rounded - exact).abs().amax(-1).flatten().quantile(USUAL))
    chosen = exact.gather(2, whole[:, begin:, None])[..., 0]
    behind = exact.amax(-1) - chosen
    equal, worst = float((behind == 0).float().mean()), float(behind.max())
    torch_equal = float((rounded.argmax(-1) == exact.argmax(-1)).float().mean())
    good = worst <= TIMES * error or args.quantization is not None
    print(
        f"{'ok' if good else 'FAILED'}: {args.backend} {args.quantization or 'bf16'}: {behind.numel()} tokens, "
        f"{100 * equal:.2f} % are float32's best (torch in bf16: {100 * torch_equal:.2f} %), the others at most "
        f"{worst:.3f} behind, mean {float(behind.mean()):.5f}; bf16's error is {error:.3f}; "
        f"{'the same tokens again' if again else 'OTHER TOKENS in a second run'}",
        flush=True,
    )
    return int(not (good and again))


if __name__ == "__main__":
    sys.exit(main())
