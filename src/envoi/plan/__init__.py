"""How long the expert-parallel MoE should take, what bounds each step, and how it should be cut. Needs no GPU."""

from envoi.plan.api import Plan, plan_moe
from envoi.plan.layer import MoeLayer
from envoi.plan.steps import Step

__all__ = ["MoeLayer", "Plan", "Step", "plan_moe"]
