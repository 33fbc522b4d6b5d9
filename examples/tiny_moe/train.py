"""Train the tiny byte-level Qwen3-MoE checkpoint of `make demo` on the Python standard library.

A token is a byte, so there is no tokenizer. The files named in heldout.json are kept out of training and score the
model. On CUDA the model runs in bfloat16, as its checkpoint will, and the optimiser holds float32 master weights;
a CPU, slow at bfloat16, trains the same model in float32. Either way the checkpoint is bfloat16.
"""

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

DEMO = Path(__file__).resolve().parent
MAX_CHECKPOINT_BYTES = 16_000_000
SKIPPED_DIRS = {"site-packages", "dist-packages", "__pycache__"}
BALANCE_COEF = 0.001  # on sum(load * probability) * experts, per layer: enough that no expert dies, skew remains


@dataclass
class Corpus:
    """Training and held-out bytes as flat uint8 tensors, with the facts that training.json records about them."""

    train: torch.Tensor
    heldout: torch.Tensor
    facts: dict[str, Any]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=stdlib, help="standard library to train on (the running one's)")
    parser.add_argument("--out", type=Path, default=DEMO, help="gets model/ and training.json (%(default)s)")
    parser.add_argument("--steps", type=int, default=16_000, help="optimiser steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step (%(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="bytes per sequence (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the crops (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    return parser.parse_args()


def python_sources(stdlib: Path) -> dict[str, bytes]:
    """Return every .py file under stdlib by its relative path, installed packages and caches left out."""
    relative = (path.relative_to(stdlib) for path in sorted(stdlib.rglob("*.py")))
    return {p.as_posix(): (stdlib / p).read_bytes() for p in relative if not SKIPPED_DIRS & set(p.parts)}


def line_overlap(train: list[bytes], heldout: bytes, shortest: int = 40) -> float:
    """Return the share of held-out bytes that lie in lines of 40 bytes or more also found in training."""
    seen = {line.strip() for text in train for line in text.splitlines()}
    lines = heldout.splitlines(keepends=True)
    return sum(len(line) for line in lines if len(line.strip()) >= shortest and line.strip() in seen) / len(heldout)


def load_corpus(stdlib: Path, manifest: dict[str, Any], device: str) -> Corpus:
    """Split stdlib into training and held-out bytes: held-out files leave by name, their exact copies by hash."""
    sources = python_sources(stdlib)
    wanted = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    held = [sources.pop(name) for name in wanted]
    hashes = [hashlib.sha256(text).hexdigest() for text in held]
    banned = {*hashes, *wanted.values()}
    train = [text for text in sources.values() if hashlib.sha256(text).hexdigest() not in banned]
    facts = {
        "python": manifest["python"] if hashes == list(wanted.values()) else platform.python_version(),
        "train_files": len(train),
        "train_bytes": sum(map(len, train)),
        "copies_of_heldout_dropped": len(sources) - len(train),
        "heldout_files": len(held),
        "heldout_bytes": sum(map(len, held)),
        "heldout_matches_manifest": hashes == list(wanted.values()),
        "heldout_bytes_in_lines_also_in_training": round(line_overlap(train, b"".join(held)), 4),
    }
    flat = [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).to(device) for part in (train, held)]
    return Corpus(flat[0], flat[1], facts)


def model_config() -> Qwen3MoeConfig:
    """Return the architecture: four sparse layers of 16 experts, four chosen per byte."""
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        moe_intermediate_size=128,
        intermediate_size=512,  # of dense layers; this model has none
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # pyright: ignore[reportCallIssue]
        hidden_act="silu",
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        router_aux_loss_coef=BALANCE_COEF,
    )


class MasterWeights:
    """Float32 copies of a model's parameters, stepped by AdamW under warm-up and cosine decay to zero."""

    def __init__(self, model: torch.nn.Module, lr: float, steps: int) -> None:
        self.working = list(model.parameters())
        self.masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in self.working]
        groups = [
            {"params": [p for p in self.masters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.ndim <= 1], "weight_decay": 0.0},  # norms
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        warmup = max(1, min(200, steps // 10))

        def rate(step: int) -> float:
            done = max(0, step - warmup) / max(1, steps - warmup)
            return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * done))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def step(self) -> None:
        """Move the gradients to the masters, clip, step, and copy the result back to the model."""
        for master, weight in zip(self.masters, self.working, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        for master, weight in zip(self.masters, self.working, strict=True):
            weight.data.copy_(master.detach())


def expert_counts(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Count how often each expert is among a token's top_k, with no device-to-host wait."""
    chosen = router_logits.topk(top_k, dim=-1).indices.flatten()
    counts = torch.zeros(router_logits.shape[-1], device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Return the Switch load-balancing loss, averaged over the layers rather than pooled across them."""
    load = torch.stack([expert_counts(x, top_k) / len(x) for x in router_logits])
    return load.shape[-1] * (load * torch.stack(router_logits).float().softmax(-1).mean(1)).sum(-1).mean()


def forward(model: Qwen3MoeForCausalLM, windows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the mean cross-entropy in nats of each window's bytes but the first, and every layer's router logits."""
    ids = windows.long()
    out = model.model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).float()
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), out.router_logits


@torch.no_grad()
def evaluate(model: Qwen3MoeForCausalLM, data: torch.Tensor, seq: int) -> tuple[float, torch.Tensor]:
    """Score data in disjoint windows of seq bytes: bits per byte, and each layer's load per expert (rows sum to 1)."""
    windows = data[: len(data) // seq * seq].view(-1, seq)
    bits, counts = 0.0, torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for part in windows.split(32):
        loss, router_logits = forward(model, part)
        bits += loss.item() / math.log(2) * len(part)
        counts += torch.stack([expert_counts(x, model.config.num_experts_per_tok) for x in router_logits]).cpu()
    return bits / len(windows), counts / counts.sum(-1, keepdim=True)


def fit(model: Qwen3MoeForCausalLM, corpus: Corpus, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train model in place on random crops and return the curve, about forty rows long."""
    weights = MasterWeights(model, args.lr, args.steps)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    span = torch.arange(args.seq + 1, device=args.device)
    curve, start, every = [], time.perf_counter(), max(1, args.steps // 40)
    total, since = torch.zeros((), device=args.device), 0
    for step in range(1, args.steps + 1):
        first = torch.randint(len(corpus.train) - args.seq, (args.batch, 1), generator=generator, device=args.device)
        loss, router_logits = forward(model, corpus.train[first + span])
        (loss + BALANCE_COEF * balance_loss(router_logits, model.config.num_experts_per_tok)).backward()
        weights.step()
        total, since = total + loss.detach(), since + 1
        if step % every == 0 or step == args.steps:
            bits = {"train": total.item() / since / math.log(2)}
            bits["heldout"], _ = evaluate(model, corpus.heldout, args.seq)
            row = {"step": step} | {f"{name}_bits_per_byte": round(value, 4) for name, value in bits.items()}
            curve.append(row | {"seconds": round(time.perf_counter() - start, 1)})
            print(json.dumps(curve[-1]), flush=True)
            total, since = torch.zeros_like(total), 0
    return curve


def load_table(load: torch.Tensor) -> dict[str, Any]:
    """Describe the held-out expert load for training.json."""
    return {
        "definition": "share of the (held-out byte, chosen expert) pairs that each expert of a layer takes",
        "busiest_over_mean": [round(x, 2) for x in (load.amax(-1) / load.mean(-1)).tolist()],
        "quietest_over_mean": [round(x, 2) for x in (load.amin(-1) / load.mean(-1)).tolist()],
        "layers": [[round(x, 4) for x in row] for row in load.tolist()],
    }


def save_model(model: Qwen3MoeForCausalLM, folder: Path) -> int:
    """Write config.json and one safetensors file, and return the size of the latter."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if (size := (folder / "model.safetensors").stat().st_size) > MAX_CHECKPOINT_BYTES:
        raise RuntimeError(f"the checkpoint has {size} bytes, over {MAX_CHECKPOINT_BYTES}")
    return size


def main() -> None:
    """Train, save the model, and write training.json."""
    args = parse_args()
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    corpus = load_corpus(args.stdlib, json.loads((DEMO / "heldout.json").read_text()), args.device)
    print(json.dumps(corpus.facts), flush=True)
    on_gpu = args.device.startswith("cuda")
    model = Qwen3MoeForCausalLM(model_config()).to(args.device, torch.bfloat16 if on_gpu else torch.float32)
    curve = fit(model, corpus, args)
    model.bfloat16()
    bits, load = evaluate(model, corpus.heldout, args.seq)
    record = {
        "heldout_bits_per_byte": round(bits, 4),
        "heldout_window_bytes": args.seq,
        "parameters": model.num_parameters(),
        "checkpoint_bytes": save_model(model, args.out / "model"),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "wall_seconds": round(time.perf_counter() - started, 1),
        "train_seconds": curve[-1]["seconds"],
        "args": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "corpus": corpus.facts,
        "expert_load": load_table(load),
        "curve": curve,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
