"""transformers side of the demo: load, evaluate, continue a prompt, inspect the routing."""

import contextlib
import math
from pathlib import Path
from typing import Any

import torch

from envoi.integrations.transformers import register

WINDOW = 512  # bytes of context; each byte of a window but the first is predicted from those before it
BATCH = 8


def load(folder: Path, device: torch.device, widen: bool = False) -> Any:
    """Load the checkpoint as a transformers model in bf16, with its experts through Envoi, as they are stored.

    widen: quantised experts in bf16 and by transformers' own code.
    Raises ValueError if tensors are missing or don't have the configuration's shapes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        if widen:
            config.quantization_config["dequantize"] = True
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.bfloat16, experts_implementation="eager" if widen else "envoi",
            output_loading_info=True,
        )  # fmt: skip
    except (RuntimeError, OSError, KeyError) as error:
        raise ValueError(f"--model: {folder} doesn't load: {str(error).splitlines()[0]}") from error
    model, report = loaded
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[problem]:
            first = sorted(map(str, report[problem]))[0]
            raise ValueError(
                f"--model: {folder} has {problem.replace('_', ' ')}: {first} and {len(report[problem]) - 1} more"
            )
    return model.to(device).eval()


def windows(data: bytes, device: torch.device) -> list[torch.Tensor]:
    """Return batches of int64 [at most BATCH, WINDOW]; a shorter tail is a batch of its own; below 2 bytes, dropped."""
    ids = torch.tensor(list(data), dtype=torch.int64, device=device)
    whole = len(ids) // WINDOW * WINDOW
    batches = list(ids[:whole].view(-1, WINDOW).split(BATCH)) if whole else []
    if len(ids) - whole >= 2:
        batches.append(ids[whole:].unsqueeze(0))
    return batches


@torch.no_grad()
def bits_per_byte(model: Any, batches: list[torch.Tensor], advance=lambda: None) -> float:
    """Return the mean of -log2 p(byte | bytes before it in its window)."""
    nats, count = 0.0, 0
    for ids in batches:
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        targets = ids[:, 1:]
        nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
        advance()
    return nats / count / math.log(2)


def expect_bytes(prompt: str) -> bytes:
    """Return a prompt's bytes. Raises ValueError for none."""
    if not prompt:
        raise ValueError("--prompt: expected at least one byte, got an empty string")
    return prompt.encode()


@torch.no_grad()
def continue_prompt(model: Any, prompt: str, num_bytes: int, advance=lambda: None, seed: int = 0) -> str:
    """Return the prompt and num_bytes more, sampled at temperature 0.7. advance is called for each byte."""

    def go_on(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        advance()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    raw = expect_bytes(prompt)
    torch.manual_seed(seed)
    ids = torch.tensor([list(raw)], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_bytes, do_sample=True, temperature=0.7,
        top_k=0, pad_token_id=0, eos_token_id=None, stopping_criteria=[go_on],
    )  # fmt: skip
    return bytes(out[0].tolist()).decode(errors="replace")


@contextlib.contextmanager
def watch_routers(model: Any, seen: list[torch.Tensor]):
    """Context in which every router call appends the chosen ids [M, k] to `seen`, in layer order."""
    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [router.register_forward_hook(lambda _m, _i, out: seen.append(out[2])) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def expert_load(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the fraction of routed slots per expert and layer: float32 [layers, N], rows sum to 1."""
    seen: list[torch.Tensor] = []
    with watch_routers(model, seen):
        model(ids, use_cache=False)
    num_experts = model.config.num_experts
    counts = torch.stack([torch.bincount(chosen.flatten(), minlength=num_experts) for chosen in seen])
    return (counts / counts.sum(1, keepdim=True)).cpu()


@torch.no_grad()
def moe_inputs(model: Any, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Return the input of a layer's MoE block: bf16 [M, H]."""
    seen: list[torch.Tensor] = []
    block = model.model.layers[layer].mlp
    hook = block.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        model(ids, use_cache=False)
    finally:
        hook.remove()
    return seen[0].flatten(0, 1).contiguous()
