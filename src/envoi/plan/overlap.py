"""Overlap condition: the experts' products hide the NVLink transfers if C / B <= 2 d."""

from dataclasses import dataclass

from envoi.plan.layer import MoeLayer, element_bits
from envoi.plan.machines import Machine


@dataclass(frozen=True)
class Overlap:
    """Compute rate C (FLOP/s) and NVLink rate B (bytes/s) of a rank, and the layer's FLOP per byte, `work_per_byte`.

    A token at one expert is 6 h d FLOP (three matrices of h x d) for h elements that are pulled and h in bf16 that are
    pushed: with 8-bit tokens 6 h d / 3 h = 2 d FLOP per byte. The model assumes many tokens: full tiles, no time for
    reading weights. Scale factors and rows that stay on their rank are not counted.
    compute_per_byte: C / B, where B combines pull and push.
    hides: C / B <= work_per_byte, or there is one rank.
    """

    compute_per_byte: float
    work_per_byte: float
    hides: bool


def overlap_of(layer: MoeLayer, machine: Machine, block_m: int) -> Overlap:
    """Return the condition for a layer whose tiles have block_m tokens."""
    pulled, pushed = element_bits(layer.formats.activations) / 8, 2.0
    bandwidth = (pulled + pushed) / (pulled / machine.pull_gb_per_s + pushed / machine.push_gb_per_s)
    compute_per_byte = 1e3 * machine.gemm_tflops(layer.format, block_m) / bandwidth
    work_per_byte = 6 * layer.intermediate / (pulled + pushed)
    hides = layer.num_ranks == 1 or compute_per_byte <= work_per_byte
    return Overlap(compute_per_byte, work_per_byte, hides)
