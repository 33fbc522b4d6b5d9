"""Predicted time of the expert-parallel MoE, the bound of each step, and the sizes to run it with. Needs no GPU."""

from envoi.estimates.layer import MoeLayer
from envoi.estimates.steps import Network, Step
from envoi.estimates.total import Estimate, estimate

__all__ = ["Estimate", "MoeLayer", "Network", "Step", "estimate"]
