"""Greedy tokens of a model that vLLM serves, beside transformers in float32: on a GPU.

    python -m tools.engines.vllm_tokens --model examples/tiny_moe/model --backend envoi
    python -m tools.engines.vllm_tokens --model examples/tiny_moe/model --backend vllm
    ENVOI_VLLM_EP=1 python -m tools.engines.vllm_tokens --ranks 2    # data-parallel ranks, experts spread over them

Exits with 1 if a token is worse than rounding explains: see `tools.engines.tokens`.
"""
# pyright: reportMissingImports=false

import argparse
import os
import sys
import time

from tools.engines import checks, tokens

RANK, EXCHANGE = "VLLM_DP_RANK", "ENVOI_VLLM_EP"


def main() -> int:
    """Serve, compare, print a line; return 1 if a token is worse than rounding explains."""
    parser = tokens.parser(__doc__, "vllm")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    if args.ranks > 1 and RANK not in os.environ:
        group = {"VLLM_DP_SIZE": str(args.ranks)}
        return checks.run_ranks("tools.engines.vllm_tokens", args.ranks, RANK, "VLLM_DP_MASTER_PORT", **group)
    os.environ |= {
        "ENVOI_VLLM": str(int(args.backend == "envoi")), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_USE_DEEP_GEMM": "0",
    }  # fmt: skip
    prompts = tokens.prompts_of(args)[int(os.environ.get(RANK, "0")) :: args.ranks]
    begun = time.time()
    served, again, lines = _serve(args, prompts)
    if not tokens.runs_as_asked(lines, args.backend, time.time() - begun):
        return 1
    if os.environ.get(EXCHANGE) == "1" and not any("Envoi exchanges tokens" in text for text in lines):
        print(f"FAILED: {EXCHANGE}=1, and vLLM exchanged the tokens")
        return 1
    return tokens.compare(args, prompts, served, again)


def _serve(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[list[int]], bool, list[str]]:
    """Return the greedy tokens of each prompt, whether a second run gives the same, and what Envoi said."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, seed=0,
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30,  # whatever else is on the GPU
        max_num_batched_tokens=2048, max_num_seqs=16, enable_prefix_caching=False,
        enable_expert_parallel=args.ranks > 1, enforce_eager=args.eager, disable_log_stats=True,
        quantization=args.quantization,
        compilation_config=None if args.eager else {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.new, ignore_eos=True, detokenize=False)

    def run() -> list[list[int]]:
        found = llm.generate([TokensPrompt(prompt_token_ids=x) for x in prompts], params, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in found]

    first = run()
    # Not by a handler of the log: vLLM 0.33 takes foreign ones away when it starts.
    said: list[list[str]] = llm.collective_rpc(_said)
    return first, run() == first, sorted({line for lines in said for line in lines})


def _said(worker: object) -> list[str]:
    """Return Envoi's lines of this process, in which a worker of vLLM runs: of several ranks it is one of its own."""
    from envoi.integrations import lines

    return sorted(lines._said)


if __name__ == "__main__":
    sys.exit(main())
