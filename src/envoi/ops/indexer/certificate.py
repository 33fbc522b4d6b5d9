"""Certificates of the orders in which torch adds on a device, found by `envoi indexer certify`; shipped or local.

    {"NVIDIA H200, torch 2.11.0+cu130, cuBLAS 13.1.0":
        {"64": {"parts": [[1, 4], [129, 16], [177, 1]], "shared_from": 128}}}

For 64 heads, from rows of 1 token on the 128 dimensions of a product are cut into 4 parts, from 129 on into 16; sums
over heads take the shared order from 128 tokens on if 4 divides their number; never, if that is null.

The order depends on each part of the name. cuBLAS chooses the kernel of torch.mm, and with it how the 128 dimensions
are cut, by its own version and by the GPU. How torch.sum cuts the heads, and which of equal scores torch.topk takes
first, is code that torch's build compiled: 2.11.0+cu128 is another build than 2.11.0+cu130, with another cuBLAS, and a
private build that calls itself 2.11.0 may be either. So a certificate is used only if its whole name matches. PyPI's
wheel of torch 2.11.0 says 2.11.0+cu130 in `torch.__version__`, though pip lists it as 2.11.0. A certificate holds for
torch's own choice of BLAS library (`torch.backends.cuda.preferred_blas_library`).
"""

import ctypes
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from envoi import cache_file, env

SHIPPED = Path(__file__).with_name("certified.json")
HEADS = (32, 64)  # for which the exact mode has kernels
# Least k for which it has them: torch puts up to 32 in order by a network, which the kernels do for short rows alone.
LEAST_K = 33
NUM_ORDERS = 512  # lengths whose order is looked up; the order of longer ones depends on length % 4
SHARED = 256  # flag of the shared order, added to the number of parts


class UncertifiedWarning(UserWarning):
    """Warning that the exact mode runs on torch's operators: no certificate, or no kernel, is for this call."""


def name_of(device: torch.device) -> str:
    """Return the name under which certificates are stored: this GPU, this build of torch and this cuBLAS."""
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuBLAS {cublas_version()}"


@cache
def cublas_version() -> str:
    """Return the version of the cuBLAS that torch has loaded; "built in" if it is linked into torch's libraries."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return "built in"
    value, parts = ctypes.c_int(), []
    for property in range(3):  # major, minor, patch
        library.cublasGetProperty(property, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


def found_here() -> Path | None:
    """Return the path to which `envoi indexer certify` writes; None if this user has no home and no cache folder."""
    return env.cache_file("indexer.json")


def write(name: str, heads: dict[str, Any]) -> Path:
    """Add a certificate to those of this machine; return their path. Raises OSError if nothing is kept."""
    path = cache_file.add(found_here(), {name: heads})
    orders.cache_clear()
    return path


@cache
def orders(device: torch.device, num_heads: int) -> torch.Tensor | None:
    """Load the orders of rows by length, int32 [NUM_ORDERS + 4], for `exact_kernel`; None without a certificate."""
    certificates = json.loads(SHIPPED.read_text()) | cache_file.entries(found_here(), _whole)
    known = certificates.get(name_of(device), {}).get(str(num_heads))
    return None if known is None else expand(known).to(device)


def has_kernels(num_heads: int, k: int) -> bool:
    """Tell whether the exact mode has kernels for this number of heads and this k, if a certificate is there."""
    return num_heads in HEADS and isinstance(k, int) and k >= LEAST_K


@cache
def warn_uncertified(name: str) -> None:
    """Warn once a process that the exact mode uses torch's operators; name the remedy. name: `name_of` a device."""
    _warn(f"there is no certificate for {name}; `envoi indexer certify` makes one here in less than a minute")


@cache
def warn_no_kernels(num_heads: int, k: int) -> None:
    """Warn once a process that the exact mode has no kernels for this number of heads or this k."""
    heads = " or ".join(map(str, HEADS))
    _warn(f"these are for {heads} heads and k from {LEAST_K} on, not for {num_heads} heads and k = {k}")


def _warn(why: str) -> None:
    text = "indexer_topk: mode='exact' takes torch's operators row by row, many times slower than its kernels, as"
    warnings.warn(f"{text} {why}", UncertifiedWarning, stacklevel=3)


def expand(known: dict[str, Any]) -> torch.Tensor:
    """Expand a certificate to orders [NUM_ORDERS + 4] int32: by length below NUM_ORDERS, then by length % 4."""
    lengths = [*range(NUM_ORDERS), *(NUM_ORDERS + rest for rest in range(4))]
    return torch.tensor([order_of(known, length) for length in lengths], dtype=torch.int32, device="cpu")


def order_of(known: dict[str, Any], length: int) -> int:
    """Return the order of rows of that length: number of parts, + SHARED for the shared order."""
    parts = next((parts for first, parts in reversed(known["parts"]) if first <= length), 1)
    shared = known["shared_from"] is not None and length >= known["shared_from"] and length % 4 == 0
    return parts + SHARED * shared


def _whole(heads: Any) -> dict[str, Any]:
    """Return the certificate. Raises ValueError unless it has the layout above."""
    if not isinstance(heads, dict):
        raise ValueError(f"expected an object, got {type(heads).__name__}")
    for num_heads, known in heads.items():
        if not isinstance(known, dict) or known.keys() != {"parts", "shared_from"}:
            raise ValueError(f"{num_heads} heads: expected parts and shared_from, got {known!r}")
        parts = known["parts"]
        if not isinstance(parts, list) or not parts or not all(map(_pair, parts)):
            raise ValueError(f"{num_heads} heads: expected parts of [tokens, parts], got {parts!r}")
        if known["shared_from"] is not None and type(known["shared_from"]) is not int:
            raise ValueError(f"{num_heads} heads: expected an int or null in shared_from, got {known['shared_from']!r}")
    return heads


def _pair(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(type(value) is int and value > 0 for value in entry)
