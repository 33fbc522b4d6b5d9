"""`envoi demo`: a trained MoE model answers through Envoi, on whatever hardware is there."""

from envoi.demo.run import run

__all__ = ["run"]
