"""Serve a transformers MoE model through Envoi, here the repository's tiny Qwen3-MoE.

python examples/serve_transformers.py [DIR]        needs pip install 'envoi[demo]'
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import envoi.integrations.transformers

MODEL = Path(__file__).with_name("tiny_moe") / "model"


def main(path: str | Path = MODEL, experts: str = "envoi_fp8_block128") -> torch.Tensor:
    """Return the tokens that the model continues a prompt with; the tiny model's tokens are bytes."""
    envoi.integrations.transformers.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation=experts)
    prompt = torch.tensor([list(b"import ")], device=device)

    out = model.to(device).eval().generate(prompt, max_new_tokens=24, do_sample=False)

    print(bytes(out[0].tolist()).decode(errors="replace"))
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
