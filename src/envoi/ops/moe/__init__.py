"""MoE layer on one rank: api, router/, permute (sort, gather), experts (L1, L2), combine; parallel/ over ranks.

Read in this order: reference, api, experts, permute, combine, kernels.
"""

from envoi.ops.moe.api import moe
from envoi.ops.moe.packing import pack, unpack
from envoi.ops.moe.refit import refit  # noqa: F401  # gives ExpertWeights its `update_`
from envoi.ops.moe.support import supports

__all__ = ["moe", "pack", "supports", "unpack"]
