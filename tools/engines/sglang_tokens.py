"""Greedy tokens of a model that SGLang serves, beside transformers in float32: on a GPU.

    python -m tools.engines.sglang_tokens --model examples/tiny_moe/model --backend envoi
    python -m tools.engines.sglang_tokens --model examples/tiny_moe/model --backend triton

The server is SGLang's engine in processes of its own. Exits with 1 if a token is worse than rounding explains: see
`tools.engines.tokens`.
"""
# pyright: reportMissingImports=false

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.engines import tokens

TOKENS, LOG = "tokens.json", "log.txt"  # what a server leaves in its folder
SHOWN = 6000  # last characters of a server's log that are shown when it failed


def main() -> int:
    """Serve, compare, print a line; return 1 if a token is worse than rounding explains."""
    parser = tokens.parser(__doc__, "triton")
    parser.add_argument("--attention", help="SGLang's --attention-backend")
    parser.add_argument("--limit", type=int, default=600, help="seconds that the server may take")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompts = tokens.prompts_of(args)
    if args.serve:
        serve(args, prompts)
        return 0
    begun = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        untie(Path(args.model), folder)
        command = [sys.executable, "-m", "tools.engines.sglang_tokens", *sys.argv[1:], "--serve", name]
        with (folder / LOG).open("w") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=args.limit).returncode
            except subprocess.TimeoutExpired:
                code = f"none after {args.limit} s"
        text = (folder / LOG).read_text()
        if code != 0:
            print(f"{text[-SHOWN:]}\nFAILED: no server, exit status: {code}")
            return 1
        served, again = json.loads((folder / TOKENS).read_text())
    print("; ".join(re.findall("Engine startup timings.*", text)))
    if not tokens.runs_as_asked(said_in(text), args.backend, time.time() - begun):
        print(text[-SHOWN:])
        return 1
    return tokens.compare(args, prompts, served, served == again)


def untie(model: Path, folder: Path) -> None:
    """Write a checkpoint in which the output's embeddings are a tensor: SGLang's class of Qwen3-MoE ties none."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def said_in(log: str) -> list[str]:
    """Return what Envoi said of MoE layers in the processes of a server."""
    return sorted(set(re.findall(r"(?:Envoi runs|SGLang's kernels run) the MoE layers.*", log)))


def serve(args: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Leave the greedy tokens of two runs in `args.serve`, the folder that has the model."""
    from sglang import Engine

    engine = Engine(
        model_path=str(args.serve), skip_tokenizer_init=True, dtype="bfloat16", context_length=1024, random_seed=0,
        mem_fraction_static=0.2, max_total_tokens=1 << 15,  # whatever else is on the GPU
        max_running_requests=16, chunked_prefill_size=2048, disable_radix_cache=True, grammar_backend="none",
        attention_backend=args.attention, sampling_backend="pytorch", moe_runner_backend=args.backend,
        quantization=args.quantization, disable_cuda_graph=args.eager, cuda_graph_bs_decode=[1, 2, 4, 8, 16],
        log_level="info",
    )  # fmt: skip
    params = {"temperature": 0.0, "max_new_tokens": args.new, "ignore_eos": True}
    runs = [[x["output_ids"] for x in engine.generate(input_ids=prompts, sampling_params=params)] for _ in range(2)]
    (args.serve / TOKENS).write_text(json.dumps(runs))
    engine.shutdown()


if __name__ == "__main__":
    sys.exit(main())
