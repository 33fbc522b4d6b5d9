"""Weights of layers that the engines' own classes hold: random ones, and what they mean."""

from typing import Any

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def fill(layer: torch.nn.Module, seed: int = 0) -> None:
    """Write random weights and factors of a trained model's sizes."""
    device = next(layer.parameters()).device
    here: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(shape: Any) -> torch.Tensor:
        return torch.randn(shape, **here)

    for name, parameter in layer.named_parameters():
        x = parameter.data
        if x.dtype == torch.uint8:
            low, high = (118, 122) if "scale" in name else (0, 256)
            x.copy_(torch.randint(low, high, x.shape, **here))
        elif x.dtype == torch.float8_e4m3fn:
            x.copy_((normal(x.shape) * (0.3 if "scale" in name else 64)).abs().clamp(0.05, 448).to(x.dtype))
            if "scale" not in name:
                x.copy_((normal(x.shape) * 64).clamp(-448, 448).to(x.dtype))
        elif "scale" in name:
            x.copy_(torch.rand(x.shape, **here) * 4e-4 + 2e-4)
            if x.dim() == 2 and x.shape[1] == 2:
                x.copy_(x[:, :1].expand(x.shape).clone())  # engines want gate's and up's to be one
        elif "bias" in name:
            x.copy_(normal(x.shape) * 0.02)
        else:
            x.copy_(normal(x.shape) / x.shape[-1] ** 0.5)


def widened(values: torch.Tensor, sf: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    """Return weights in float64 [E, R, C]: values times the factor of their group, times a scale a matrix."""
    wide = values.double() if values.dtype != torch.uint8 else None
    if wide is None:
        code, table = values.long(), E2M1.to(values.device)
        wide = torch.stack((table[code & 15], table[code >> 4]), -1).flatten(-2)
    if sf is not None:
        factor = torch.exp2(sf.double() - 127) if sf.dtype == torch.uint8 else sf.double()
        if factor.dim() == 1:
            factor = factor[:, None, None]
        elif factor.dim() == 2:  # of gate and up
            factor = factor[:, :, None]
        for axis in (1, 2):
            factor = factor.repeat_interleave(wide.shape[axis] // factor.shape[axis], axis)
        wide = wide * factor
    return wide if scale is None else wide * scale.double().reshape(len(wide), -1)[:, :1, None]
