"""Times of MoE layers over ranks as `envoi estimate` predicts them before they are measured."""

from bench.shapes import MoeShape
from envoi.estimates import MoeLayer, Network, estimate
from envoi.estimates.exchange import WITHIN_A_HOST
from envoi.estimates.machines import H200

PREDICTED = "predicted us"  # in the details of a measurement


def predicted_us(shape: MoeShape, num_ranks: int, gpu: str) -> float | None:
    """Return the predicted us of a call without the router, whose experts are chosen evenly; None where no model is.

    gpu: of a measurement. There is a model of several H200s over NVLink, and by host, where NCCL connects both halves
    within a machine.
    """
    num_hosts = {"": 1, "by host": 2}.get(shape.transport)
    if num_hosts is None or num_ranks == 1 or num_ranks % num_hosts or not shape.is_even or H200.name not in gpu:
        return None
    sizes = shape.hidden, shape.intermediate, shape.num_experts, shape.num_topk, shape.num_tokens
    try:
        layer = MoeLayer(*sizes, num_ranks // num_hosts, shape.format, num_hosts)
    except ValueError:  # another number of ranks
        return None
    found = (
        estimate(layer)
        if num_hosts == 1
        else estimate(layer, network=Network(WITHIN_A_HOST.gb_per_s), presum=shape.presum)
    )
    return found.staged_us - found.steps[0].time_us
