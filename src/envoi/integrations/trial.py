"""Trial of a layer's kernels on random weights, before an engine's own exist, with releases of Triton that need it.

    is_needed     whether this Triton is one with which the GPU tests haven't passed
    expect_right  packed random weights, numbers of tokens -> an error where a token's row isn't torch's in float64

A compiler may accept a kernel and make another of it; nothing but its numbers tells.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from envoi.epilogues.library import activated
from envoi.ops.moe.experts import run_layer
from envoi.ops.moe.packing import unpack
from envoi.ops.moe.support import as_stored
from envoi.quant.formats import format_named
from envoi.types import ExpertWeights, has_gate

TESTED = ("3.6.",)  # releases of Triton with which the GPU tests have passed
NUM_ROWS = 64  # tokens that differ; a call with more has them again
# Error of a token's row that rounding makes at most, with activations in 16 bits and in 8.
LIMIT, LIMIT_FP8 = 0.03, 0.2
E4M3_BITS = 0xBF  # that a random byte keeps: numbers to 1.875, no NaN
E4M3_SIZE, E2M1_SIZE = 0.6, 2.9  # root mean square of such, and of random E2M1
BIAS_SIZE = 0.1
SEED = 0


class WrongNumbersError(Exception):
    """What a layer's kernels compute isn't what its weights mean."""


def is_needed() -> bool:
    """Tell whether this Triton is one with which the GPU tests haven't passed."""
    return not _triton().startswith(TESTED)


def _triton() -> str:
    from envoi.runtime import triton_compat  # not at the top: `import envoi` must not import Triton

    return triton_compat.VERSION


def untested() -> str:
    """Return what a refusal says of this Triton."""
    return f"Triton {_triton()}, with which they are untested"


def random_tensors(
    format: str, activation: str, hidden: int, intermediate: int, num_experts: int, bias: bool, device: torch.device,
    small_factors: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return random tensors of a checkpoint's layer, as arguments of `pack`, by which sums are about 1.

    small_factors: of MX formats; else the first one of each expert is 4.
    """
    source = torch.Generator(device).manual_seed(SEED)
    stored = as_stored(format_named(format), activation, hidden, intermediate, num_experts, bias)
    found: dict[str, Any] = {}
    for name, x in stored.items():
        columns = intermediate if name.startswith("down") else hidden
        kind = stored[name.removesuffix("_sf")].dtype
        size = (E2M1_SIZE if kind == torch.uint8 else E4M3_SIZE) * columns**0.5
        found[name] = torch.empty(x.shape, dtype=x.dtype, device=device)
        _draw(name, found[name], columns, size, source)
        if name.endswith("_sf") and x.dtype == torch.float8_e4m3fn:  # NVFP4, whose factors are too coarse to be small
            found[name.replace("_sf", "_scale")] = torch.full((num_experts,), 1 / size, device=device)
        if x.dtype == torch.float8_e8m0fnu and not small_factors:
            found[name][:, 0, 0] = 4.0
    return found


def _draw(name: str, x: torch.Tensor, columns: int, size: float, source: torch.Generator) -> None:
    """Fill a tensor. columns: of the weight; size: of a sum of so many of its values, before factors."""
    if name.endswith("_bias"):
        x.normal_(0, BIAS_SIZE, generator=source)
    elif x.dtype == torch.bfloat16:
        x.normal_(0, columns**-0.5, generator=source)
    elif name.endswith("_sf") and x.dtype == torch.float32:
        x.uniform_(0.5 / size, 1.5 / size, generator=source)
    elif name.endswith("_sf") and x.dtype == torch.float8_e4m3fn:
        x.copy_(torch.empty(x.shape, device=x.device).uniform_(0.5, 1.5, generator=source))
    elif name.endswith("_sf"):
        exponent = 127 - round(torch.tensor(size).log2().item())
        x.view(torch.uint8).random_(exponent - 1, exponent + 2, generator=source)
    else:
        values = x.view(torch.uint8).random_(0, 256, generator=source)
        if x.dtype == torch.float8_e4m3fn:
            values.bitwise_and_(E4M3_BITS)


def expect_right(
    experts: ExpertWeights, top_k: int, numbers: Iterable[int], batch_invariant: bool = False
) -> None:  # fmt: skip
    """Run a layer with these numbers of tokens. Raises WrongNumbersError for the first whose rows aren't right."""
    device, source = experts.device, torch.Generator().manual_seed(SEED)
    tokens = torch.randn(NUM_ROWS, experts.hidden, generator=source).to(device, torch.bfloat16)
    ids = torch.rand(NUM_ROWS, experts.num_local_experts, generator=source).argsort(1)[:, :top_k]
    weights, ids = torch.rand(ids.shape, generator=source).to(device), ids.to(device, torch.int32)
    want = meant(tokens, weights, ids, experts)
    limit = LIMIT if format_named(experts.format).activations is None else LIMIT_FP8
    for count in sorted(set(numbers)):
        index = torch.arange(count, device=device) % NUM_ROWS
        got = run_layer(tokens[index], weights[index], ids[index], experts, batch_invariant)
        error = ((got.double() - want[index]).norm(dim=1) / want[index].norm(dim=1)).max().item()
        if not error <= limit:
            raise WrongNumbersError(
                f"its kernels compute wrong numbers for {count} tokens under {untested()}: the error of a token's row "
                f"is {error:.1e}, and rounding makes at most {limit:.0e}"
            )


def meant(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Compute a layer in float64 by torch, one expert's weights in float64 at a time."""
    out = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        one = experts._map(lambda x, expert=expert: x[expert : expert + 1])
        gate_up, down, gate_up_bias, down_bias = unpack(one, "interleaved", torch.float64)
        h = tokens[token].double() @ gate_up[0].T
        h = h if gate_up_bias is None else h + gate_up_bias
        parts = (h[:, 0::2], h[:, 1::2]) if has_gate(experts.activation) else (h,)
        y = activated(experts.activation, experts.swiglu_limit, *parts) @ down[0].T
        y = y if down_bias is None else y + down_bias
        out.index_add_(0, token, y * weights[token, slot, None].double())
    return out


def apart(run: Callable[[], object], device: torch.device) -> None:
    """Call a function in a thread of its own, on a device, with torch's own default dtype and without gradients.

    An engine makes its layers with another default dtype, and with a pool for this thread's memory, in which a trial's
    would stay.
    """

    def alone() -> None:
        with torch.no_grad(), torch.cuda.device(device if device.type == "cuda" else -1):
            run()

    with _default_dtype(torch.float32), ThreadPoolExecutor(1) as thread:
        thread.submit(alone).result()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
