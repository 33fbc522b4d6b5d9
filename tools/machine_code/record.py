"""Record of one function's machine code, and its JSON form."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.machine_code import tools
from tools.machine_code.compile import Binary
from tools.machine_code.count import Families, count
from tools.machine_code.disassemble import CannotDisassembleError, Listing, disassemble

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """Counts of one function on one architecture.

    None if unknown: `shared_bytes`, `num_warps` and `ptx_sha256` of a cubin read from a file, and `instructions` and
    `families` if the architecture couldn't be disassembled, with the reason in `not_counted`.
    """

    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    shared_bytes: int | None
    num_warps: int | None
    instructions: int | None
    families: Families | None
    not_counted: str
    disassembler: str
    ptx_sha256: str | None

    @property
    def title(self) -> str:
        """Kernel and architecture: `gemm sm_90`."""
        return f"{self.kernel} {self.arch}"


@dataclass(frozen=True)
class Refusal:
    """Kernel without a record for an architecture, and the reason."""

    kernel: str
    arch: str
    reason: str


def of_binary(binary: Binary, kernel: str = "") -> tuple[list[Record], str]:
    """Return the records of a binary, the kernel's own first under the name `kernel`, and the disassembly."""
    records, text = of_cubin(binary.cubin, binary.name)
    own = next(record for record in records if record.kernel == binary.name)
    known = dataclasses.replace(
        own, kernel=kernel or binary.name, shared_bytes=binary.shared_bytes, num_warps=binary.num_warps,
        ptx_sha256=binary.ptx_sha256,
    )  # fmt: skip
    return [known, *(record for record in records if record is not own)], text


def read_cubin(path: Path) -> tuple[list[Record], str]:
    """Return `of_cubin` of a file."""
    return of_cubin(tools.read_cubin(path), str(path))


def of_cubin(cubin: bytes, name: str) -> tuple[list[Record], str]:
    """Return the records of all functions in a cubin, and the disassembly, empty if there is none."""
    arch, used = tools.arch_of(cubin), tools.resources(cubin)
    listing, reason = None, ""
    try:
        listing = disassemble(cubin)
    except CannotDisassembleError as error:
        reason = str(error)
    found = [_record(name, arch, function, used[function], listing, reason) for function in used]
    return found, "" if listing is None else listing.text


def _record(
    name: str, arch: str, function: str, used: tools.Resources, listing: Listing | None, reason: str
) -> Record:  # fmt: skip
    body = [] if listing is None else [part.instructions for part in listing.functions if part.name == function]
    if listing is not None and not body:
        raise ValueError(f"{name}: {listing.tool} shows no code of {function}")
    return Record(
        kernel=function, arch=arch, registers=used.registers, stack_bytes=used.stack_bytes,
        static_shared_bytes=used.shared_bytes, shared_bytes=None, num_warps=None,
        instructions=len(body[0]) if body else None, families=count(body[0]) if body else None,
        not_counted=reason, disassembler="" if listing is None else listing.tool, ptx_sha256=None,
    )  # fmt: skip


def to_json(records: Iterable[Record], refusals: Iterable[Refusal], versions: dict[str, str]) -> str:
    """Return the text of the file that `read` reads."""
    content = {
        "format": FORMAT, "versions": versions,
        "kernels": [dataclasses.asdict(record) for record in records],
        "refusals": [dataclasses.asdict(refusal) for refusal in refusals],
    }  # fmt: skip
    return json.dumps(content, indent=1) + "\n"


def read(path: Path) -> list[Record]:
    """Return the records in a JSON file or in a cubin; ValueError if the file is neither."""
    content = path.read_bytes()
    if tools.is_cubin(content):
        return of_cubin(content, str(path))[0]
    try:
        return _from_json(json.loads(content))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a cubin, or JSON that tools.machine_code wrote; {error}") from error


def _from_json(content: Any) -> list[Record]:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, this version reads {FORMAT}")
    return [Record(**entry) for entry in content["kernels"]]


def find_twins(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[Record | None, Record | None]]:
    """Return pairs of the same kernel on the same architecture; two files of one record each pair under any name."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    first = {record.title: record for record in before}
    second = {record.title: record for record in after}
    return [(first.get(title), second.get(title)) for title in dict.fromkeys([*first, *second])]
