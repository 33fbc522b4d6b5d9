"""`envoi info`: versions, devices, and which implementation each operator uses on this machine, and why."""

import argparse
import itertools
import json
import platform
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import envoi
from envoi import env
from envoi.table import WIDTH, align, fold

PACKAGES = ("torch", "triton", "transformers", "safetensors")
OPERATORS = ("route", "gemm", "grouped_gemm", "moe", "ExpertParallel.moe", "indexer_topk")
WITH_KERNELS = {
    "gemm": "formats that it doesn't take run on the Triton kernels",
    "grouped_gemm": "formats that it doesn't take run on the Triton kernels",
    "route": "for bf16 or fp16, both sides the same; float32 and mixed dtypes run on the Triton kernel",
    "moe": "both GEMMs; Triton kernels around them",
    "ExpertParallel.moe": "as moe; Triton kernels between ranks whose GPUs reach each other's memory",
}
GIB = 1 << 30


def run(args: argparse.Namespace) -> int:
    """Print the result of `collect`, as text or with args.json as one JSON object; return 0."""
    found = collect()
    print(json.dumps(found, indent=2) if args.json else to_text(found))
    return 0


def collect() -> dict[str, Any]:
    """Return versions {package: version or null}, devices [..], operators [..], transport {name, why}."""
    devices = _devices()
    versions = {"envoi": envoi.__version__, "python": platform.python_version()}
    return {
        "versions": {**versions, **{name: version_of(name) for name in PACKAGES}},
        "devices": devices,
        "operators": [{"operator": name, **backend(name, devices)} for name in OPERATORS],
        "transport": transport(devices),
    }


def cpu_name() -> str:
    """Return the CPU's model as Linux reports it, followed by " (CPU)"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()} (CPU)"


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package, None if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def backend(operator: str, devices: list[dict[str, Any]]) -> dict[str, str]:
    """Return the implementation that an operator uses on the first device, and why."""
    gpu = _first_gpu(devices)
    return _indexer_backend(gpu) if operator == "indexer_topk" else _kernels(gpu, WITH_KERNELS[operator])


def _kernels(gpu: dict[str, Any] | None, on_hopper: str) -> dict[str, str]:
    if gpu is None:
        if env.interpreting():
            return {"backend": "Triton kernels", "why": "no GPU, and Triton's interpreter is on"}
        return {"backend": "torch reference", "why": "no GPU"}
    if gpu["arch"] == "sm_90":
        return {"backend": "Hopper kernel", "why": f"sm_90; {on_hopper}"}
    return {"backend": "Triton kernels", "why": f"no kernel of its own is run on {gpu['arch']}"}


def _indexer_backend(gpu: dict[str, Any] | None) -> dict[str, str]:
    if gpu is None:
        return _kernels(gpu, "")
    import torch

    from envoi.ops.indexer import certificate

    certified = certificate.orders(torch.device("cuda", 0), certificate.HEADS[-1]) is not None
    exact = "certified for this torch and cuBLAS" if certified else "slow until `envoi indexer certify` has run"
    return {"backend": "Hopper kernel" if gpu["arch"] == "sm_90" else "Triton kernels", "why": f"exact mode: {exact}"}


def transport(devices: list[dict[str, Any]]) -> dict[str, str]:
    """Return the transport of rows between the ranks of ExpertParallel here, and why."""
    num_gpus = sum(device["kind"] == "cuda" for device in devices)
    if num_gpus == 0:
        return {"name": "gloo", "why": "no GPU: ranks are processes on CPUs"}
    if num_gpus == 1:
        return {"name": "NCCL", "why": "one GPU here: ranks on other hosts, through an NCCL group"}
    if not _all_reach_each_other(num_gpus):
        return {"name": "NCCL", "why": f"{num_gpus} GPUs that don't all reach each other's memory"}
    why = f"{num_gpus} GPUs that reach each other's memory; ExpertParallel needs max_tokens and num_topk, else NCCL"
    return {"name": "NVLink", "why": why}


def _all_reach_each_other(num_gpus: int) -> bool:
    import torch

    pairs = itertools.permutations(range(num_gpus), 2)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def to_text(found: dict[str, Any]) -> str:
    """Format the result of `collect` as text of 80 columns."""
    versions = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines = [fold(", ".join(versions)), ""]
    lines += [_device_line(device) for device in found["devices"]]
    name, why = found["transport"]["name"], found["transport"]["why"]
    return "\n".join([*lines, "", _operators(found["operators"]), "", fold(f"ranks exchange rows by {name}: {why}")])


def _operators(entries: list[dict[str, str]]) -> str:
    """Return a table with one row per (backend, reason), its operators joined; one line if all operators share one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        alike.setdefault((entry["backend"], entry["why"]), []).append(entry["operator"])
    if len(alike) == 1:
        ((backend, why),) = alike
        return f"all operators: {backend} ({why})"
    names = {kind: ", ".join(operators) for kind, operators in alike.items()}
    left = WIDTH - max(map(len, names.values())) - max(len(backend) for backend, _ in alike) - 4
    rows = []
    for (backend, why), operators in names.items():
        first, *others = textwrap.wrap(why, left)
        rows += [[operators, backend, first], *(["", "", line] for line in others)]
    return align(("operator", "backend", "why"), rows, left=(0, 1, 2))


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        found.append(
            {
                "kind": "cuda", "name": p.name, "arch": f"sm_{p.major}{p.minor}", "num_sms": p.multi_processor_count,
                "memory_gib": round(p.total_memory / GIB, 1),
            }
        )  # fmt: skip
    found.append({"kind": "cpu", "name": cpu_name(), "num_threads": torch.get_num_threads()})
    return found


def _device_line(device: dict[str, Any]) -> str:
    if device["kind"] == "cpu":
        return f"{device['name']}, {device['num_threads']} threads"
    return f"{device['name']}, {device['arch']}, {device['num_sms']} SMs, {device['memory_gib']} GiB"


def _first_gpu(devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((device for device in devices if device["kind"] == "cuda"), None)
