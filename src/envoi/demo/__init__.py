"""`envoi demo`: a trained MoE model answers through Envoi, on any hardware."""

from envoi.demo.run import run

__all__ = ["run"]
