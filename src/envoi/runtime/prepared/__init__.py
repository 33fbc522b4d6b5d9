"""Prepared calls: a call of shapes that have been seen launches its kernels in a few microseconds of host time.

Called eagerly, an operator's Python decides each time what the shapes, dtypes and devices of its arguments have decided
long before: the backend, the config, the buffers, and what each kernel's parameters are. Only addresses change.

    calls     arguments -> what to do: plan, replay, or run as always; found by torch's guards, or by a key
    replay    planned launches (`runtime.program`) -> blocks of parameters, into which each call writes its addresses
    driver    the CUDA driver, by ctypes

The first call with a key is planned, and its kernels are loaded by Triton. Then it runs as all later ones do:

    outputs = one new tensor each; scratch = one allocation for all that the call uses between its launches
    for each address in a parameter block: write that of the input, the output, or the place in the scratch
    for each launch: cuLaunchKernelEx

What isn't plain runs as always: see `calls` for the guards, `runtime.program` for what can't be replayed. All shortcuts
are off with ENVOI_SAFE_LAUNCH=1, this one also with ENVOI_PREPARED=0 (`shortcuts`).

Results are bitwise those of a call without it: the same kernels run with the same parameters in the same order.
"""

from envoi.runtime.prepared.calls import MISSED, Calls, Plannable, clear, exactly, prepared

__all__ = ["MISSED", "Calls", "Plannable", "clear", "exactly", "prepared"]
