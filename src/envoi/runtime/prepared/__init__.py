"""Prepared calls: a call whose like has been seen launches its kernels again in a few microseconds of host time.

Called eagerly, an operator's Python decides each time what the shapes, dtypes and devices of its arguments have decided
long before: the backend, the config, the buffers, and what each kernel's parameters are. Only addresses change.

    calls       arguments -> key -> what to do: run as always, record, or replay; the guards
    forms       a replay found by torch's own guards, without a key
    recording   one call as always, observed: what it launched, allocated and returned
    parameters  a launch's arguments -> the kernel's parameters, as the driver takes them
    replay      recorded launches -> blocks of parameters, into which each call writes its addresses
    results     what a call returned -> how to make the like from other tensors
    driver      the CUDA driver, by ctypes

The first call with a key runs as always and is counted, the second is recorded, and the later ones are replayed (a
warm-up records the first already):

    outputs = one new tensor each; scratch = one allocation for all that the call used between its launches
    for each address in a parameter block: write that of the input, the output, or the place in the scratch
    for each launch: cuLaunchKernelEx

An address is told by the tensor that it lies in, and the recorder keeps all of them until the call has ended, so that
no address stands for two tensors. What isn't plain runs as always: see `calls` for the guards, `recording` for what
can't be replayed. All shortcuts are off with ENVOI_SAFE_LAUNCH=1, this one also with ENVOI_PREPARED=0 (`shortcuts`).

Results are bitwise those of a call without it: the same kernels run with the same parameters in the same order.
"""

from envoi.runtime.prepared.calls import MISSED, Calls, clear, prepared, recording_first_calls

__all__ = ["MISSED", "Calls", "clear", "prepared", "recording_first_calls"]
