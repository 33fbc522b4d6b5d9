"""NVIDIA's tools: search paths and calls. Triton ships them; a newer nvdisasm can be added."""

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envoi import env
from envoi.runtime import triton_compat

ELF_MAGIC = b"\x7fELF"
ELF_MACHINE_CUDA = 190
RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Resources:
    """Resources of each thread or block of a function: `shared_bytes` without the dynamic part of a launch."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def is_cubin(content: bytes) -> bool:
    """Return whether these bytes begin like an ELF file for NVIDIA GPUs."""
    return content[:4] == ELF_MAGIC and int.from_bytes(content[18:20], "little") == ELF_MACHINE_CUDA


def read_cubin(path: Path) -> bytes:
    """Return the bytes of a cubin; ValueError if the file is something else."""
    content = path.read_bytes()
    if not is_cubin(content):
        what = (
            "an ELF file for another machine" if content[:4] == ELF_MAGIC else f"{len(content)} bytes of another kind"
        )
        raise ValueError(f"{path}: expected a cubin (an ELF file for NVIDIA GPUs), got {what}")
    return content


def arch_of(cubin: bytes) -> str:
    """Return the architecture of a cubin, `sm_100`, without the letter of its features."""
    found = re.search(r"\.(sm_\d+)[a-z]?\.cubin", _cuobjdump("-lelf", cubin))
    if found is None:
        raise ValueError("cuobjdump doesn't say which architecture the cubin is for; is it damaged?")
    return found.group(1)


def resources(cubin: bytes) -> dict[str, Resources]:
    """Return registers, stack and static shared memory of each function."""
    text = _cuobjdump("--dump-resource-usage", cubin)
    found = {name: Resources(*map(int, numbers)) for name, *numbers in RESOURCES.findall(text)}
    if not found:
        raise ValueError("cuobjdump reports no function in the cubin; is it damaged?")
    return found


def disassemblers() -> list[Path]:
    """Return the tools to try: `NVDISASM` alone if it is set; else the one from PyPI, Triton's, and one on the PATH."""
    chosen = env.nvdisasm()
    if chosen is None:
        on_path = shutil.which("nvdisasm")
        found = _from_pypi(), triton_compat.bundled_tool("nvdisasm"), on_path and Path(on_path)
        return [path for path in found if path]
    if not chosen.is_file():
        raise FileNotFoundError(f"NVDISASM: expected the path of nvdisasm, {chosen} isn't a file")
    return [chosen]


@functools.lru_cache
def release_of(tool: Path) -> str:
    """Return the tool's name and release: `nvdisasm 13.1`."""
    found = re.search(r"release (\d+\.\d+)", _run([str(tool), "--version"]).stdout)
    return f"{tool.name} {found.group(1) if found else 'of unknown release'}"


def run_on(tool: Path, flag: str, cubin: bytes) -> subprocess.CompletedProcess[str]:
    """Run a tool on the bytes of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run([str(tool), flag, str(path)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{command[0]} can't be run: {error.strerror}") from error


def _cuobjdump(flag: str, cubin: bytes) -> str:
    done = run_on(triton_compat.bundled_tool("cuobjdump"), flag, cubin)
    if done.returncode:
        raise ValueError(f"cuobjdump can't read the cubin: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _from_pypi() -> Path | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == "nvdisasm")
    return next((path for path in found if path.is_file()), None)
