"""tokens -> Routing."""

from envoi.router.api import route
from envoi.router.rules import PRESETS, Preset, Rule, preset, rule

__all__ = ["PRESETS", "Preset", "Rule", "preset", "route", "rule"]
