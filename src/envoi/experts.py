"""Expert weights: checkpoints, packing, files and state dicts of packed ones; the public names `envoi.experts`."""

from envoi.checkpoints import from_checkpoint
from envoi.moe.pack import pack, unpack
from envoi.moe.save import from_state_dict, load, save, state_dict

__all__ = ["from_checkpoint", "from_state_dict", "load", "pack", "save", "state_dict", "unpack"]
