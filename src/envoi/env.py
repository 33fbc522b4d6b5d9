"""Environment variables; the only module that reads the process environment."""

import os
from pathlib import Path


def rank() -> int:
    """Return this process's rank as `torchrun` sets it; 0 outside it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes as `torchrun` sets it; 1 outside it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return this process's rank on its host as `torchrun` sets it; 0 outside it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def interpreting() -> bool:
    """Return True when Triton kernels run in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cache_dir() -> Path | None:
    """Return the folder of tuning results: `ENVOI_CACHE_DIR`, else `~/.cache/envoi`; None if this user has no home.

    A container that runs as an arbitrary user id often has neither HOME nor an entry for it in the password database.
    """
    named = os.environ.get("ENVOI_CACHE_DIR")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "envoi"
    except RuntimeError:
        return None


def cache_file(name: str) -> Path | None:
    """Return the path of a file in `cache_dir`; None without one."""
    folder = cache_dir()
    return None if folder is None else folder / name


def for_compilers() -> dict[str, str]:
    """Return the variables of a process whose forks compile: those of this one, but one thread of OpenMP.

    Other threads wouldn't be in the forks, which would wait for them.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def safe_launch() -> bool:
    """Return True to avoid private parts of torch and Triton: `ENVOI_SAFE_LAUNCH=1`, see `runtime.shortcuts`."""
    return _switch("ENVOI_SAFE_LAUNCH", False)


def prepared() -> bool:
    """Return True to launch a planned call's kernels again: unless `ENVOI_PREPARED=0`, see `runtime.prepared`."""
    return _switch("ENVOI_PREPARED", True)


def nvtx() -> bool:
    """Return True for NVTX ranges around the steps of every call: `ENVOI_NVTX=1`; read once, when envoi is imported."""
    return _switch("ENVOI_NVTX", False)


def serves_vllm() -> bool:
    """Return True to run vLLM's MoE layers: `ENVOI_VLLM=1`, see `integrations.vllm`. Read in each of its processes."""
    return _switch("ENVOI_VLLM", False)


def routes_vllm() -> bool:
    """Return True to run vLLM's gates too: `ENVOI_VLLM_ROUTE=1` with `ENVOI_VLLM=1`, see `integrations.vllm.route`."""
    return _switch("ENVOI_VLLM_ROUTE", False)


def exchanges_vllm() -> bool:
    """Return True to exchange vLLM's tokens too: `ENVOI_VLLM_EP=1` with `ENVOI_VLLM=1`, see `integrations.vllm`."""
    return _switch("ENVOI_VLLM_EP", False)


def serves_sglang() -> bool:
    """Return True to run SGLang's MoE layers: `ENVOI_SGLANG=1`, see `integrations.sglang`."""
    return _switch("ENVOI_SGLANG", False)


def is_on(name: str) -> bool:
    """Return True if an engine's own variable is set to anything but 0 or nothing."""
    return os.environ.get(name, "") not in ("", "0")


def _switch(name: str, default: bool) -> bool:
    """Return whether a variable is 1; the default if it is unset or empty. Raises ValueError unless it is 0 or 1."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1" if value else default


LOG_LEVELS = {"": 0, "0": 0, "call": 1, "1": 1, "config": 2, "2": 2, "compile": 3, "3": 3}


def log_level() -> int:
    """Return the level of `envoi.log`, from 0 to 3: `ENVOI_LOG`, "call", "config", "compile" or 1, 2, 3; default off.

    Raises ValueError for another value.
    """
    value = os.environ.get("ENVOI_LOG", "")
    if value not in LOG_LEVELS:
        raise ValueError(f"ENVOI_LOG: expected call, config, compile, 1, 2, 3 or 0, got {value!r}")
    return LOG_LEVELS[value]
