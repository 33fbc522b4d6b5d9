"""Router rules: those of real models by name, and rules of your own; the public names `envoi.router`."""

from envoi.ops.moe.router import PRESETS, Preset, Rule, preset, replay, route, rule, split_identity, weigh_with_shared

__all__ = ["PRESETS", "Preset", "Rule", "preset", "replay", "route", "rule", "split_identity", "weigh_with_shared"]
