"""Rows grouped by expert -> rows."""

from envoi.experts.api import moe
from envoi.experts.pack import pack, unpack

__all__ = ["moe", "pack", "unpack"]
