"""Parser of a cubin's instructions, from the text that nvdisasm or cuobjdump -sass print."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.machine_code import tools

# The encoding follows the semicolon, in cuobjdump's and `nvdisasm -hex`'s output, on that line and on the next.
LINE = re.compile(r"\s*/\*(?P<address>[0-9a-f]{4,})\*/(?P<body>.*)")
BODY = re.compile(
    r"\s*\{?\s*(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?:\s+(?P<operands>[^;]*?))?\s*\}?\s*;"
)
FUNCTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+),|\s*Function : (\S+)")
BYTES_OF_AN_INSTRUCTION = 16


class CannotDisassembleError(ValueError):
    """Error: no installed disassembler decodes the architecture."""


@dataclass(frozen=True)
class Instruction:
    """Instruction: `@!P0 LDG.E.128 R4, [R2]` is predicate "!P0", opcode "LDG.E.128", operands ("R4", "[R2]")."""

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """Opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Modifiers: the parts of the opcode after its points."""
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Function:
    """Kernel, or function that wasn't inlined into one; without the NOPs that pad its last 128 bytes."""

    name: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Listing:
    """Disassembled cubin: the tool's own text, and the functions in it."""

    tool: str
    text: str
    functions: tuple[Function, ...]


def disassemble(cubin: bytes) -> Listing:
    """Disassemble with the first tool that can; CannotDisassembleError lists each tool's answer."""
    answers = []
    for tool in tools.disassemblers():
        done = tools.run_on(tool, "-c", cubin)
        if not done.returncode:
            functions = parse(done.stdout)
            if functions:
                return Listing(tools.release_of(tool), done.stdout, functions)
        said = done.stderr.strip().partition(": ")[2] or done.stderr.strip() or "printed no instruction"
        answers.append(f"{tools.release_of(tool)}: {said}")
    raise CannotDisassembleError(
        f"nothing here disassembles {tools.arch_of(cubin)} ({'; '.join(answers)}); "
        "pip install 'envoi[sass]' brings a newer nvdisasm, and NVDISASM can name one"
    )


def parse(text: str) -> tuple[Function, ...]:
    """Return the functions of a disassembly. ValueError for an instruction that is malformed or missing."""
    bodies: dict[str, list[Instruction]] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = FUNCTION.match(line)
        if header:
            name = header.group(1) or header.group(2)
            continue
        found = LINE.match(line)
        if found is None:
            continue
        body = bodies.setdefault(name, [])
        instruction = _instruction(int(found["address"], 16), found["body"], number)
        if instruction.address != BYTES_OF_AN_INSTRUCTION * len(body):
            raise ValueError(f"disassembly, line {number}: an instruction is missing before {line.strip()!r}")
        body.append(instruction)
    return tuple(Function(name, tuple(_without_padding(body))) for name, body in bodies.items())


def _instruction(address: int, body: str, number: int) -> Instruction:
    found = BODY.match(body)
    if found is None:
        raise ValueError(f"disassembly, line {number}: expected an instruction, got {body.strip()!r}")
    return Instruction(address, found["predicate"] or "", found["opcode"], tuple(_operands(found["operands"] or "")))


def _operands(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, begin = 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "[({") - (sign in "])}")
        if sign == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _without_padding(body: list[Instruction]) -> list[Instruction]:
    end = len(body)
    while end and body[end - 1].opcode == "NOP":
        end -= 1
    return body[:end]
