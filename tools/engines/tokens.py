"""Greedy tokens of a model that an engine serves, held to transformers in float32.

The served sequences are read again by the reference, position by position: a token must be the reference's best one, or
no further behind it than twice the error that bf16 usually makes in the reference's logits. With `--quantization` that
is only printed: a second run must give the same tokens.
"""

import argparse
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

MODULES = ("csv", "heapq", "textwrap", "shlex", "queue", "shelve", "fractions", "configparser")  # kept out of training
TIMES = 2  # margin that is allowed, over the error of bf16's logits
# Of positions, by their largest error, in ascending order: at the last ones bf16 routes a token to other experts.
USUAL = 0.9


def parser(doc: str | None, own: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all engines have. own: what `--backend` calls the engine's own kernels."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="examples/tiny_moe/model")
    found.add_argument("--backend", default="envoi", choices=("envoi", own))
    found.add_argument("--quantization")
    found.add_argument("--new", type=int, default=128)
    found.add_argument("--prompt-bytes", type=int, default=160)
    found.add_argument("--eager", action="store_true")
    return found


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Return the first bytes of each module: a token is a byte."""
    return [list(_source(name)[: args.prompt_bytes]) for name in MODULES]


def _source(name: str) -> bytes:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"Python has no source of {name}")
    return Path(spec.origin).read_bytes()


def runs_as_asked(said: Collection[str], backend: str, seconds: float) -> bool:
    """Print what Envoi said in the engine; tell whether all layers ran on what was asked for."""
    print(f"served in {seconds:.0f} s; {'; '.join(said) or 'nothing said'}", flush=True)
    ours = any("Envoi runs the MoE layers" in text for text in said)
    refused = any("kernels run the " in text for text in said)
    good = ours and not refused if backend == "envoi" else not ours
    if not good:
        print("FAILED: the layers didn't run on what was asked for")
    return good


def compare(args: argparse.Namespace, prompts: list[list[int]], served: list[list[int]], again: bool) -> int:
    """Print how far behind the reference's best ones the served tokens are; return 1 if rounding doesn't explain it.

    again: whether a second run gave the same tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = torch.tensor([x + y for x, y in zip(prompts, served, strict=True)], device=device)
    begin = len(prompts[0])
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="eager")
        model.to(device).eval()
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
