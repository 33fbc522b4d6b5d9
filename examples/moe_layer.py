"""Run one Mixture-of-Experts layer: choose experts, pack their weights, compute.

python examples/moe_layer.py        on a GPU or a CPU
"""

import torch

import envoi

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 64, 256, 128, 8, 2


def main() -> dict[str, float]:
    """Return the relative difference of each format to bf16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    gate = torch.randn(EXPERTS, HIDDEN, device=device).bfloat16() / HIDDEN**0.5
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device).bfloat16() / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device).bfloat16() / INTERMEDIATE**0.5

    routing = envoi.route(tokens, gate, k=TOPK)  # topk_ids and topk_weights [64, 2]
    out = {}
    for format in ("bf16", "fp8_row", "fp8_block128"):
        experts = envoi.experts.pack(gate_up, down, format)  # once, for every later call
        out[format] = envoi.moe(tokens, routing, experts).float()  # [64, 256]

    differences = {format: ((y - out["bf16"]).norm() / out["bf16"].norm()).item() for format, y in out.items()}
    print(", ".join(f"{format}: {difference:.3f}" for format, difference in differences.items()))
    return differences


if __name__ == "__main__":
    main()
