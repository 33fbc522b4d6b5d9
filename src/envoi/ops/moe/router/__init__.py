"""Router: choose experts and weights for each token. Rules of real models by name."""

from envoi.ops.moe.router.api import replay, route, split_identity, weigh_with_shared
from envoi.ops.moe.router.presets import PRESETS, Preset, preset, rule
from envoi.ops.moe.router.spec import Rule

__all__ = ["PRESETS", "Preset", "Rule", "preset", "replay", "route", "rule", "split_identity", "weigh_with_shared"]
