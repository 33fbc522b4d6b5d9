"""Writer of a model's FP8 and MXFP4 checkpoints from its bf16 one, in the layouts of published checkpoints.

Plain torch that shares nothing with the library, so that Envoi reads files that another program has made. Experts are
quantised, rounded to nearest; all else stays in bf16 and is named in modules_to_not_convert.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCK, FP8_MAX = 128, 448.0
GROUP = 32
# Bounds between the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6, whose codes are 0 to 7; 8 is the bit of the sign.
FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [N, K] in e4m3 and float32 factors [N / 128, K / 128]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    amax = blocks.abs().amax((1, 3))
    sf = torch.where(amax > 0, amax, 1.0) / FP8_MAX
    values = (blocks / sf[:, None, :, None]).reshape(weight.shape)
    return values.to(torch.float8_e4m3fn), sf


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [N, K] as int8 [N, K / 2], the even column in the low four bits, and UE8M0 factors [N, K / 32].

    A factor is 2^(floor(log2(amax)) - 2), as in the OCP's MX standard, so that the largest number is 4 to 8 times that.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    sf = torch.exp2((torch.frexp(groups.abs().amax(2)).exponent - 3.0).clamp(-127, 127))
    scaled = groups / sf[:, :, None]
    codes = torch.bucketize(scaled.abs(), torch.tensor(FP4_BOUNDS)) + 8 * (scaled < 0)
    even, odd = codes.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    return (even + 16 * odd).to(torch.uint8).view(torch.int8), sf.to(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Layout:
    """Layout of quantised experts: who publishes it, how a matrix becomes values and factors, the last part of the
    factors' names, and what config.json says: of the quantisation, and else."""

    publisher: str
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    factor: str
    quantisation: dict
    config: dict = field(default_factory=dict)


# gpt-oss's layout of MXFP4 belongs to its own architecture; DeepSeek-V4's is read for any family's experts.
# transformers reads expert_dtype where DeepSeek-V4 has it, since 5.23 where V4.1 does: in quantization_config.
FP4 = {"expert_dtype": "fp4"}
LAYOUTS = {
    "FP8 block-128": Layout("DeepSeek-V3", fp8_blocks, "weight_scale_inv", FP8),
    "MXFP4": Layout("DeepSeek-V4", mxfp4, "scale", FP8 | {"scale_fmt": "ue8m0"} | FP4, FP4),
}


def write(source: Path, folder: Path, layout: Layout) -> Path:
    """Write the checkpoint in source to folder with its experts in a layout; return folder.

    Raises ValueError for experts that aren't matrices of whole blocks: Envoi has no kernels for others.
    """
    stored, left_out = {}, ["lm_head"]  # transformers' FP8 linear layers need kernels from a network
    for name, x in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".experts." in name:
            _check_sizes(name, x)
            stored[name], stored[f"{module}.{layout.factor}"] = layout.quantise(x)
        else:
            stored[name] = x
            left_out += [module] if x.dim() == 2 else []
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | layout.config
    config["quantization_config"] = layout.quantisation | {"modules_to_not_convert": left_out}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _check_sizes(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2 or any(size % BLOCK for size in x.shape):
        raise ValueError(f"--model: expected multiples of {BLOCK} as the sizes of {name}, got {list(x.shape)}")
