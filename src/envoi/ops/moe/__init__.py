"""MoE layer on one rank: router/, api, permute (sort, gather, combine), experts (L1, L2); parallel/ over ranks.

Read in this order: reference, api, experts, choose, permute, kernels; then decode/ and one_launch/.
"""

from envoi.ops.moe.api import moe
from envoi.ops.moe.packing import pack, unpack
from envoi.ops.moe.refit import refit  # noqa: F401  # gives ExpertWeights its `update_`
from envoi.ops.moe.support import supports

__all__ = ["moe", "pack", "supports", "unpack"]
