"""Router: choose experts and weights for each token. Rules of real models by name."""

from envoi.moe.router.api import route
from envoi.moe.router.rules import PRESETS, Preset, Rule, preset, rule

__all__ = ["PRESETS", "Preset", "Rule", "preset", "route", "rule"]
