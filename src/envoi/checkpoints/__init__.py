"""Published checkpoints read as they are: safetensors and config.json -> the packed experts of one layer.

Read in this order: load, names, config, activation, keys, shards.
"""

from envoi.checkpoints.load import from_checkpoint

__all__ = ["from_checkpoint"]
