"""Opcodes of a cubin's functions, from the text that nvdisasm prints."""

import functools
import importlib.metadata
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from envoi.runtime import triton_compat
from tools.machine_code import isolate

LINE = re.compile(r"\s*/\*(?P<address>[0-9a-f]{4,})\*/(?P<body>.*)")
BODY = re.compile(r"\s*\{?\s*(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?:\s[^;]*)?;")
FUNCTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+),")
BYTES_OF_AN_INSTRUCTION = 16
# Code only; without the analysis of where indirect branches lead, which takes a third of the tool's time.
OPTIONS = ("-c", "-ndf")


class CannotDisassembleError(ValueError):
    """Error: no installed disassembler decodes the architecture."""


@dataclass(frozen=True)
class Listing:
    """Disassembled cubin: the tool's own text, and the opcodes of each function, such as `LDG.E.128`."""

    text: str
    functions: dict[str, list[str]]


def disassemble(cubin: bytes, arch: str) -> Listing:
    """Disassemble with the first tool that can; CannotDisassembleError lists each tool's answer."""
    answers = []
    for tool in disassemblers():
        done = isolate.run_on(tool, OPTIONS, cubin)
        if not done.returncode:
            functions = parse(done.stdout)
            if functions:
                return Listing(done.stdout, functions)
        said = done.stderr.strip().partition(": ")[2] or done.stderr.strip() or "printed no instruction"
        answers.append(f"{release_of(tool)}: {said}")
    raise CannotDisassembleError(
        f"nothing here disassembles {arch} ({'; '.join(answers)}); "
        "pip install nvidia-cuda-nvdisasm brings a newer nvdisasm, and NVDISASM can name one"
    )


def parse(text: str) -> dict[str, list[str]]:
    """Return the opcodes of each function, without the NOPs that pad its last 128 bytes.

    Raises ValueError for an instruction that is malformed or missing.
    """
    functions: dict[str, list[str]] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        header, found = FUNCTION.match(line), LINE.match(line)
        if header:
            name = header.group(1)
        if found is None:
            continue
        opcodes, body = functions.setdefault(name, []), BODY.match(found["body"])
        if body is None:
            raise ValueError(f"disassembly, line {number}: expected an instruction, got {found['body'].strip()!r}")
        if int(found["address"], 16) != BYTES_OF_AN_INSTRUCTION * len(opcodes):
            raise ValueError(f"disassembly, line {number}: an instruction is missing before {line.strip()!r}")
        opcodes.append(body["opcode"])
    for opcodes in functions.values():
        while opcodes and opcodes[-1] == "NOP":
            opcodes.pop()
    return functions


def disassemblers() -> list[Path]:
    """Return the tools to try: `NVDISASM` alone if it is set; else the one from PyPI, Triton's, and one on the PATH."""
    if os.environ.get("NVDISASM"):
        chosen = Path(os.environ["NVDISASM"])
        if not chosen.is_file():
            raise FileNotFoundError(f"NVDISASM: expected the path of nvdisasm, {chosen} isn't a file")
        return [chosen]
    on_path = shutil.which("nvdisasm")
    found = _from_pypi(), triton_compat.bundled_tool("nvdisasm"), on_path and Path(on_path)
    return [path for path in found if path]


@functools.lru_cache
def release_of(tool: Path) -> str:
    """Return the tool's name and release: `nvdisasm 13.1`."""
    found = re.search(r"release (\d+\.\d+)", isolate.run([str(tool), "--version"]).stdout)
    return f"{tool.name} {found.group(1) if found else 'of unknown release'}"


def _from_pypi() -> Path | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == "nvdisasm")
    return next((path for path in found if path.is_file()), None)
