"""Expert weights: checkpoints, packing, files and state dicts of packed ones; the public names `envoi.experts`."""

from envoi.checkpoints import from_checkpoint
from envoi.ops.moe.packing import pack, unpack
from envoi.ops.moe.save import from_state_dict, load, save, state_dict

__all__ = ["from_checkpoint", "from_state_dict", "load", "pack", "save", "state_dict", "unpack"]
