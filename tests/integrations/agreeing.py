"""What each of several ranks is told of the others' packed experts; imports no test, which takes a rank seconds."""

import torch
import torch.distributed as dist

from envoi.experts import pack
from envoi.integrations.vllm import balance


def agree(rank: int, num_ranks: int) -> list[str]:
    """Return what ranks are told that agree; of which the last can't pack; of which it packs in another form."""
    gate_up, down = torch.zeros(2, 64, 32).bfloat16(), torch.zeros(2, 32, 32).bfloat16()
    packed, other = pack(gate_up, down), pack(gate_up, down, "mxfp8")
    is_last, said = rank == num_ranks - 1, []
    for mine, failure in (
        (packed, None), (None if is_last else packed, ValueError("no room") if is_last else None),
        (other if is_last else packed, None),
    ):  # fmt: skip
        try:
            balance.expect_agreement(mine, failure, dist.group.WORLD)
            said.append("")
        except (RuntimeError, ValueError) as error:
            said.append(str(error).partition(";")[0])
    return said
