"""Expert weights: checkpoints, packing, saved ones, placement on ranks; the public names `envoi.experts`."""

from envoi.checkpoints import from_checkpoint
from envoi.ops.moe.packing import pack, unpack
from envoi.ops.moe.parallel.placement import balanced_placement
from envoi.ops.moe.save import from_state_dict, load, save, state_dict
from envoi.ops.moe.shared import with_shared

__all__ = [
    "balanced_placement", "from_checkpoint", "from_state_dict", "load", "pack", "save", "state_dict", "unpack",
    "with_shared",
]  # fmt: skip
