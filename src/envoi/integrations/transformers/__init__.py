"""Adapter that runs transformers' experts by Envoi: `from_pretrained(..., experts_implementation="envoi")`.

    import envoi.integrations.transformers
    envoi.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="envoi")

"envoi" runs the experts in bf16, and quantised ones as they are stored: FP8 with a factor per block or matrix, MXFP4.
"envoi_fp8_row", "envoi_fp8_block128", "envoi_mxfp8", "envoi_mxfp4", "envoi_nvfp4" and "envoi_int4" (4-bit
weights, bf16 activations), "envoi_mxfp4_fp8" and "envoi_mxfp4_mxfp8" run them in those formats;
`model.set_experts_implementation(...)` switches.
`report(model)` says what runs by Envoi, and why not. Weights are packed at a module's first call; packings are kept
until the originals are freed.
`torch.compile(fullgraph=True)`, `torch.export` and `generate` with a static cache trace through one operator, which
checks at each call that its packing still fits the weights:

| what happens to the weights between two calls            | the next call, compiled or not           |
|----------------------------------------------------------|------------------------------------------|
| in-place operators, optimizer steps, `load_state_dict`   | packs again                              |
| a new parameter; `p.data = x`; `model.to(...)`           | packs again                              |
| in-place operators through `p.data` (`p.data.mul_(2)`)   | stale: torch counts no such write        |
| in-place operators on inference tensors                  | stale: torch counts none of their writes |
| anything, while CUDA graphs are replayed                 | stale: a replay calls nothing            |
| a parametrization (LoRA by `target_parameters`), offload | packs every time, and warns once         |

Weights that are read in place are never stale: bf16 ones whose experts' rows are concatenated, FP8 blocks and rows.
After a change that makes a packing stale, call `refresh(model)`. Like a call that notices a change, it packs into the
memory of the old packing where that fits, so that CUDA graphs read the new weights: `generate` with a static cache
replays graphs, and its first call, outside of them, packs again. In "envoi_mxfp8", "envoi_mxfp4" and
"envoi_mxfp4_mxfp8" graphs have to be captured anew if the weights had no scale factor above 2 and have one now.

There is no backward: an input or weight that requires grad, with grad mode on, is an error.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from envoi.check import expect_bool
from envoi.integrations import packings
from envoi.integrations.transformers import modules
from envoi.integrations.transformers.activation import recognise_activation
from envoi.integrations.transformers.forward import experts_forward, packed_experts, release_module
from envoi.integrations.transformers.modules import (
    FORMAT_OF,
    STORED_FACTORS,
    implementation_name,
    is_experts,
    module_weights,
    own_weights,
    released,
    unserved,
)
from envoi.quant.formats import FORMATS

if TYPE_CHECKING:
    from envoi.integrations.transformers.reporting import Report

__all__ = [
    "experts_forward",
    "implementation_name",
    "is_experts",
    "module_weights",
    "packed_experts",
    "recognise_activation",
    "refresh",
    "register",
    "release",
    "report",
    "unserved",
]


def register(requantize: bool = False) -> None:
    """Register Envoi's names with transformers (5.17 to 5.23). Calling it again changes nothing but requantize.

    From then on `from_config`, `from_pretrained` (before it reads weights) and `set_experts_implementation` raise
    ValueError for a model in which one of the names would be without effect or fail at the first call; and gpt-oss's
    MXFP4 and compressed-tensors' FP8 experts are loaded as they are stored, not widened, where one of them is chosen;
    without a GPU so are all FP8 ones of checkpoints that have nothing else in FP8.
    requantize: round stored weights again where a format can't hold their numbers exactly, which is refused else.
    """
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from envoi.integrations.transformers import checks, loading

    modules.requantize = expect_bool("requantize", requantize)
    for format in FORMATS:
        for functions in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            functions.register(implementation_name(format), partial(experts_forward, format=format))
    checks.install()
    loading.install()


def refresh(model: torch.nn.Module) -> None:
    """Pack the model's experts again, as far as they are packed: needed after a change that torch doesn't count."""
    expect_model(model)
    for module in model.modules():
        if is_experts(module) and released(module) is None and not unserved(module):
            packings.refresh(own_weights(module))


def release(model: torch.nn.Module) -> int:
    """Free the experts' own weights of a model for which Envoi is chosen, layer by layer; return the bytes freed.

    Only packed weights are kept, as far as they are copies: FP8 rows and blocks, and bf16 weights with concatenated
    rows, are the module's own memory anyway. From then on the experts run by Envoi in this format alone, and what needs
    the originals is refused: other implementations and formats, `state_dict` and `save_pretrained`, `model.to(...)`,
    and changes of the weights. Experts of compressed-tensors keep theirs, which that package moves at the first call.
    """
    freed = 0
    expect_model(model)
    for module in model.modules():
        kept = released(module) is not None or f"down_proj{STORED_FACTORS}" in module._parameters
        if is_experts(module) and not kept:
            config: Any = module.config
            format = FORMAT_OF.get(config._experts_implementation)
            if format is not None:
                freed += release_module(module, format)
    return freed


def report(model: torch.nn.Module) -> "Report":
    """Return what each experts module of a model is stored as, whether Envoi runs it, and why not: print it.

    Reads no weights. `.rows` has a row for each module: `path`; `kind`, its class; `stored`, the format of its weights;
    `chosen`, its experts_implementation; `runs`, True if Envoi runs it; `why` not, else ""; `num_bytes` of its weights;
    `load`, for a module with an `envoi.ExpertParallel`, which rank and expert bound its last calls, else "".
    """
    from envoi.integrations.transformers import reporting

    expect_model(model)
    return reporting.report(model)


def expect_model(model: Any) -> None:
    """Raise ValueError for anything but a module of torch."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
