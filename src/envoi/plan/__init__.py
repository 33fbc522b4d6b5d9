"""Predicted time of the expert-parallel MoE, the bound of each step, and the sizes to run it with. Needs no GPU."""

from envoi.plan.api import Plan, plan_moe
from envoi.plan.layer import MoeLayer
from envoi.plan.steps import Step

__all__ = ["MoeLayer", "Plan", "Step", "plan_moe"]
