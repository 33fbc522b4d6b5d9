"""Whether the experts' products are long enough to hide the rows' way over NVLink: C / B <= 2 d."""

from dataclasses import dataclass

from envoi.plan.layer import MoeLayer, element_bits
from envoi.plan.machines import Machine


@dataclass(frozen=True)
class Overlap:
    """A rank computes C FLOP/s and moves B bytes/s over NVLink; the layer has `work_per_byte` FLOP for each byte.

    A token at one expert is 6 h d FLOP (three matrices of h x d) for h elements that are pulled and h in bf16 that are
    pushed: with 8-bit tokens 6 h d / 3 h = 2 d FLOP a byte. This is about many tokens: tiles are full, weights are read
    in no time. Scale factors, and the rows that stay on their rank, are left out.
    compute_per_byte: C / B, where B is what pull and push come to together.
    hides: C / B <= work_per_byte, or there is one rank.
    """

    compute_per_byte: float
    work_per_byte: float
    hides: bool


def overlap_of(layer: MoeLayer, machine: Machine, block_m: int) -> Overlap:
    """The condition for a layer whose tiles have block_m tokens."""
    pulled, pushed = element_bits(layer.formats.activations) / 8, 2.0
    bandwidth = (pulled + pushed) / (pulled / machine.pull_gb_per_s + pushed / machine.push_gb_per_s)
    compute_per_byte = 1e3 * machine.gemm_tflops(layer.format, block_m) / bandwidth
    work_per_byte = 6 * layer.intermediate / (pulled + pushed)
    hides = layer.num_ranks == 1 or compute_per_byte <= work_per_byte
    return Overlap(compute_per_byte, work_per_byte, hides)
