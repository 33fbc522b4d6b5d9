"""Steps after `envoi.route` for models whose gate has rows that are no routed experts: identities, shared experts."""

import torch

from envoi.check import expect_float32, expect_int, expect_tensor
from envoi.types import Routing


def split_identity(routing: Routing, num_experts: int) -> tuple[Routing, torch.Tensor]:
    """Split a routing whose experts from id num_experts on are the identity (LongCat-Flash's zero-computation experts).

    Returns the Routing of the first num_experts, in which slots of the others are masked (id -1, weight 0; no logits,
    dense weights or counts), and each token's weight of the others together, [M] float32. With both:

        real, identity = split_identity(routing, 512)
        y = envoi.moe(tokens, real, experts) + identity[:, None] * tokens

    Raises ValueError unless num_experts is from 1 to routing.num_experts.
    """
    expect_int("num_experts", num_experts, 1, routing.num_experts, "those of the routing")
    others = routing.topk_ids >= num_experts
    identity = routing.topk_weights.masked_fill(~others, 0.0).sum(1, dtype=torch.float32)
    weights, ids = routing.topk_weights.masked_fill(others, 0.0), routing.topk_ids.masked_fill(others, -1)
    return Routing(weights, ids, num_experts), identity


def weigh_with_shared(routing: Routing, num_shared: int, scale: float = 1.0) -> tuple[Routing, torch.Tensor]:
    """Weigh the chosen and the shared experts by their sigmoids, divided by the sum of all of them (Inkling).

    The shared experts are the gate's last num_shared rows, and must be kept from being chosen: give `envoi.route` that
    gate, an expert_bias that is -inf there, and return_logits=True. The weights of the routing aren't read.

        weight_i = scale * sigmoid(logit_i) / (sum of sigmoids of the chosen + sum of sigmoids of the shared)

    Returns the Routing of the other experts, with these weights, and the weights of the shared ones, [M, num_shared]
    float32. Sums are of logarithms, so that tiny sigmoids add up to scale too. Source: Inkling's published model code.
    Raises ValueError unless the routing has logits and num_shared is from 1 to routing.num_experts - 1.
    """
    expect_int("num_shared", num_shared, 1, routing.num_experts - 1, "the routing's experts, less one")
    expect_float32("scale", scale)
    if routing.logits is None:
        raise ValueError("routing.logits: expected the router logits, got None; call route with return_logits=True")
    masked, num_experts = routing.topk_ids < 0, routing.num_experts - num_shared
    logits = expect_tensor("routing.logits", routing.logits, torch.float32, (len(masked), routing.num_experts))
    chosen = logits.gather(1, routing.topk_ids.clamp(min=0).long()).masked_fill(masked, -torch.inf)
    both = torch.cat((chosen, logits[:, num_experts:]), 1)
    weights = torch.nn.functional.logsigmoid(both).softmax(1) * scale
    k = masked.shape[1]
    return Routing(weights[:, :k].masked_fill(masked, 0.0), routing.topk_ids, num_experts), weights[:, k:]
