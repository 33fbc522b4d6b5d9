"""What devices are, and which implementation runs where: whatever depends on that asks here."""

from functools import cache

import torch

from envoi import env


@cache
def implementation(device: torch.device) -> str:
    """ "hopper" on an sm_90 GPU, "triton" on other GPUs and on a CPU if Triton's interpreter is on, else "torch".

    What the Hopper kernels don't take runs on the Triton kernels there too (`hopper.supports_hopper` and
    `hopper_mx.supports_mx` say what), but for float32, where torch is faster.
    """
    if device.type == "cpu":
        return "triton" if env.interpreting() else "torch"
    if device.type != "cuda":
        return "torch"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "triton"


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; without a GPU those of an H200, as recipes want them, or one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 1
