"""The demo's story, told in order."""

import argparse
import platform
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from envoi.check import expect_int
from envoi.demo import layer as moe_layer
from envoi.demo import model as lm
from envoi.demo import picture
from envoi.demo.text import find_model, read_text
from envoi.integrations.transformers import implementation_name, packed_experts
from envoi.quant.formats import format_named

LAYER = 1  # the layer that is run over several ranks


def run(args: argparse.Namespace) -> int:
    """Run the demo with the arguments of `envoi demo`; returns 0. Raises ValueError for what the user can mend."""
    start = time.perf_counter()
    formats = [format_named(name, "--formats").name for name in args.formats.split(",")]
    expect_int("--bytes", args.bytes, 2)
    expect_int("--new-bytes", args.new_bytes, 1)
    expect_int("--ranks", args.ranks, 1)
    folder = find_model(args.model)
    text = read_text(args.text, folder, args.bytes)
    device = pick_device(args.device)
    model = lm.load(folder, device)
    print(f"{folder.name}: {describe_model(model)}\non {describe_device(device)}, torch {torch.__version__}\n")
    batches = lm.windows(text.data, device)
    print_bits(model, batches, formats, text.source, len(text.data))
    print_continuation(model, args.prompt, args.new_bytes)
    load = lm.expert_load(model, batches[0])
    stages = print_layer(model, batches[0], args.ranks)
    out = Path(args.out)
    picture.draw(out, load, stages, f"{describe_model(model)} | {describe_device(device)} | torch {torch.__version__}")
    print(f"\n{out}: expert load per layer and stage times. Whole demo: {time.perf_counter() - start:.0f} s")
    return 0


def pick_device(name: str) -> torch.device:
    """ "auto" -> the GPU if there is one. Raises ValueError for "cuda" without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected a CUDA device for 'cuda', this machine has none that torch can use")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def describe_device(device: torch.device) -> str:
    """The hardware's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def describe_model(model: Any) -> str:
    """Kind and sizes in one line."""
    c = model.config
    total = sum(p.numel() for p in model.parameters())
    return (
        f"{c.model_type}, {total / 1e6:.1f} M parameters, {c.num_hidden_layers} layers of {c.num_experts} experts, "
        f"top-{c.num_experts_per_tok}, hidden {c.hidden_size}, intermediate {c.moe_intermediate_size}"
    )


def print_bits(model: Any, batches: list[torch.Tensor], formats: list[str], source: str, num_bytes: int) -> None:
    """The table of bits per byte: transformers' own experts, then Envoi's formats."""
    from tqdm import tqdm

    names = {"eager": "eager", **{f"envoi {name}": implementation_name(name) for name in formats}}
    rows = []
    with tqdm(total=len(names) * len(batches), desc="bits per byte", leave=False) as bar:
        for label, implementation in names.items():
            model.set_experts_implementation(implementation)
            begin = time.perf_counter()
            bits = lm.bits_per_byte(model, batches, bar.update)
            rows.append((label, bits, time.perf_counter() - begin))
    print(f"Bits per byte on {num_bytes} bytes: {source}")
    print(f"  {'experts':<20}{'bits/byte':>10}{'- eager':>10}{'seconds':>9}")
    for label, bits, seconds in rows:
        print(f"  {label:<20}{bits:>10.4f}{bits - rows[0][1]:>+10.4f}{seconds:>9.1f}")


def print_continuation(model: Any, prompt: str, num_bytes: int) -> None:
    """A prompt continued through Envoi in bf16."""
    model.set_experts_implementation("envoi")
    text = lm.continue_prompt(model, prompt, num_bytes)
    print(f"\nContinued from {prompt!r}:")
    print("\n".join("  | " + line for line in text.splitlines()))


def print_layer(model: Any, ids: torch.Tensor, num_ranks: int) -> dict[str, dict[str, float]]:
    """One layer on one rank and on several, in fp8_block128: equal bits or an error. Returns the stage times."""
    block = model.model.layers[LAYER].mlp
    tokens = lm.moe_inputs(model, ids, LAYER)
    experts = packed_experts(block.experts, "fp8_block128")
    layer = moe_layer.Layer(tokens, block.gate.weight.detach(), model.config.num_experts_per_tok, experts)
    layer = moe_layer.to_device(layer, moe_layer.rank_device(num_ranks, 0))
    alone, alone_ms = moe_layer.one_rank(layer)
    together, together_ms = moe_layer.many_ranks(layer, num_ranks)
    if not torch.equal(alone.cpu(), together):
        different = int((alone.cpu() != together).any(1).sum())
        raise RuntimeError(f"{different} of {len(alone)} tokens differ between 1 and {num_ranks} ranks")
    shares = moe_layer.token_shares(len(tokens), num_ranks)
    sizes = ", ".join(str(b - a) for a, b in pairwise(shares))
    print(f"\nOne MoE layer, fp8_block128, {len(tokens)} tokens: {num_ranks} ranks with {sizes} tokens")
    print("give the same bits as one rank. Milliseconds a stage:")
    stages = {"1 rank": alone_ms, f"{num_ranks} ranks": together_ms}
    for series, times in stages.items():
        print(f"  {series:<8}" + "  ".join(f"{name} {ms:.2f}" for name, ms in times.items()))
    return stages
