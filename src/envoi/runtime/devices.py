"""Properties of a device and the implementation of operators on it; the only place that decides by device."""

from functools import cache

import torch

from envoi import env

SHARED_BYTES = 232448  # shared memory that one CTA can have on sm_90, sm_100 and sm_103
SMS_WITHOUT_GPU = 132  # multiprocessors assumed for tensors without memory: an H200's


@cache
def implementation(device: torch.device) -> str:
    """Return the implementation for a device: "hopper" (sm_90), "triton" (other GPUs) or "torch".

    A CPU has "triton" under Triton's interpreter, else "torch". Calls that the Hopper kernels refuse
    (`hopper.supports_hopper`, `hopper_mx.supports_mx`) run on the Triton kernels there; float32 runs on torch, which is
    faster.
    """
    if device.type == "cpu":
        return "triton" if env.interpreting() else "torch"
    if device.type != "cuda":
        return "torch"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "triton"


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors: a GPU's own, an H200's for "meta" (recipes), 1 for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return SMS_WITHOUT_GPU if device.type == "meta" else 1
