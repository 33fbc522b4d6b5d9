"""Which orders of adding torch uses on a device: what `envoi indexer certify` found, shipped or on this machine.

    {"NVIDIA H200, torch 2.11.0+cu130": {"64": {"parts": [[1, 4], [129, 16], [177, 1]], "shared_from": 128}}}

For 64 heads, from rows of 1 token on the 128 dimensions of a product are cut into 4 parts, from 129 on into 16; sums
over heads take the shared order from 128 tokens on if 4 divides their number; never, if that is null.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from envoi import env

SHIPPED = Path(__file__).with_name("certified.json")
HEADS = (32, 64)
NUM_ORDERS = 512  # lengths whose order is looked up; longer ones have that of their remainder
SHARED = 256  # beside the number of parts


def name_of(device: torch.device) -> str:
    """What a certificate holds for: this GPU with this torch."""
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def found_here() -> Path:
    """Where `envoi indexer certify` writes."""
    return env.cache_dir() / "indexer.json"


def write(name: str, heads: dict[str, Any]) -> Path:
    """Add a certificate to those of this machine."""
    path = found_here()
    known = _read(path) | {name: heads}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")
    orders.cache_clear()
    return path


@cache
def orders(device: torch.device, num_heads: int) -> torch.Tensor | None:
    """The orders of rows by their length, int32 [NUM_ORDERS + 4] on the device, as `exact_kernel` reads them; None
    without a certificate."""
    known = (_read(SHIPPED) | _read(found_here())).get(name_of(device), {}).get(str(num_heads))
    return None if known is None else expand(known).to(device)


def expand(known: dict[str, Any]) -> torch.Tensor:
    """A certificate as int32 [NUM_ORDERS + 4]: of lengths below NUM_ORDERS, then of longer ones by length % 4."""
    lengths = [*range(NUM_ORDERS), *(NUM_ORDERS + rest for rest in range(4))]
    return torch.tensor([order_of(known, length) for length in lengths], dtype=torch.int32, device="cpu")


def order_of(known: dict[str, Any], length: int) -> int:
    """The order of rows of that length."""
    parts = next((parts for first, parts in reversed(known["parts"]) if first <= length), 1)
    shared = known["shared_from"] is not None and length >= known["shared_from"] and length % 4 == 0
    return parts + SHARED * shared


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
