"""Router: choose experts and weights for each token. Rules of real models by name."""

from envoi.ops.moe.router.api import replay, route
from envoi.ops.moe.router.presets import PRESETS, Preset, preset, rule
from envoi.ops.moe.router.rules import Rule
from envoi.ops.moe.router.special_experts import split_identity, weigh_with_shared

__all__ = ["PRESETS", "Preset", "Rule", "preset", "replay", "route", "rule", "split_identity", "weigh_with_shared"]
