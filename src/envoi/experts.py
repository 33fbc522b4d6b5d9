"""Packing of expert weights: the public names `envoi.experts.pack` and `envoi.experts.unpack`."""

from envoi.moe.pack import pack, unpack

__all__ = ["pack", "unpack"]
