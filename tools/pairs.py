"""`python tools/pairs.py COMMAND`: the pairs of torch and Triton that Envoi supports, one file each in `constraints/`.

    default, newest, names    names of pairs, `2.11`: the one that `make` installs, the last one, all
    constraints NAME          its constraints file
    triton NAME               its Triton
    other-tritons NAME        the Tritons of all pairs except that of NAME
    oldest-transformers       the oldest transformers of all pairs
    check NAME                exit status 1, with a message, if the running Python isn't one of the pair's
    matrix                    the README's table; `matrix README.md` writes it there

Comments at the top of a constraints file say for which Pythons it is, on which GPU the pair ran, and whether the CPU
test suite runs under it. Uses the standard library only, and of that what Python 3.7 has: the Makefile calls it before
anything is installed, and a Python that is too old must be told so.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "constraints"
BEGIN, END = "<!-- pairs: `python tools/pairs.py matrix README.md` -->", "<!-- /pairs -->"


@dataclass(frozen=True)
class Pair:
    """Supported pair of releases, and the other pins of its constraints file."""

    path: Path
    torch: str
    triton: str
    transformers: str
    pythons: tuple[str, ...]
    gpu: str  # GPUs on which its kernels ran; "" if none
    cpu_suite: bool

    @property
    def name(self) -> str:
        """`2.11`: the release of torch without its patch."""
        return ".".join(self.torch.split(".")[:2])


def read(path: Path) -> Pair:
    """Read the pair of a constraints file. ValueError if one of its three pins or its Pythons are missing."""
    text = path.read_text()
    pins = dict(
        re.findall(r'^(torch|triton|transformers)==([^\s;]+)(?:; python_version >= "[\d.]+")?$', text, re.MULTILINE)
    )
    notes = dict(re.findall(r"^# ([a-z ]+): (.+)$", text, re.MULTILINE))
    if len(pins) < 3 or "python" not in notes:
        raise ValueError(f"{path}: expected pins of torch, triton and transformers and a comment `# python: 3.11 ..`")
    return Pair(
        path, pins["torch"], pins["triton"], pins["transformers"], tuple(notes["python"].split()),
        notes.get("gpu", ""), notes.get("cpu suite") == "yes",
    )  # fmt: skip


def pairs() -> list[Pair]:
    """Return all pairs, the oldest torch first."""
    return sorted(map(read, FOLDER.glob("torch-*.txt")), key=lambda pair: tuple(map(int, pair.torch.split("."))))


def default() -> Pair:
    """Return the pair that `make` installs: the first one that has run on a GPU."""
    return next(pair for pair in pairs() if pair.gpu)


def find(name: str) -> Pair:
    """Return the pair of that name. ValueError lists the known ones."""
    for pair in pairs():
        if pair.name == name:
            return pair
    raise ValueError(f"PAIR: expected one of {', '.join(pair.name for pair in pairs())}, got {name!r}")


def refusal(pair: Pair, python: str) -> str:
    """Return why this Python can't install the pair, and which can; "" if it can."""
    if python in pair.pythons:
        return ""
    others = [other.name for other in pairs() if python in other.pythons]
    instead = f", or `make PAIR={others[-1]} ..`, which has this Python" if others else ""
    return (
        f"Python {python} isn't supported with torch {pair.torch}: it takes Python {', '.join(pair.pythons)}. "
        f"Choose one of those, `make PYTHON=python{pair.pythons[-2]} ..`{instead}."
    )


def other_tritons(name: str) -> list[str]:
    """Return the Tritons of all pairs in order, each once, except that of the named pair."""
    return list(dict.fromkeys(pair.triton for pair in pairs() if pair.triton != find(name).triton))


def oldest_transformers() -> str:
    """Return the oldest transformers of all pairs, which the transformers tests also run with."""
    return min((pair.transformers for pair in pairs()), key=lambda version: tuple(map(int, version.split("."))))


def matrix() -> str:
    """Return the pairs as a Markdown table."""
    lines = [
        "| torch | Triton | Python | transformers | ran on a GPU | checked without a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for pair in pairs():
        python = f"{pair.pythons[0]} to {pair.pythons[-1]}"
        checked = "all kernels compiled" + (", CPU test suite" if pair.cpu_suite else "")
        name = f"{pair.torch} (default)" if pair == default() else pair.torch
        cells = name, pair.triton, python, pair.transformers, pair.gpu or "no", checked
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_matrix(text: str) -> str:
    """Return the README's text with the current table between its two marks. ValueError if the marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a line {BEGIN} and a line {END}")
    return f"{before}{BEGIN}\n{matrix()}\n{END}{after}"


def answer(command: str, name: str) -> str:
    """Return the output of a command."""
    if command == "default":
        return default().name
    if command == "newest":
        return pairs()[-1].name
    if command == "names":
        return " ".join(pair.name for pair in pairs())
    if command == "matrix":
        return matrix()
    if command == "oldest-transformers":
        return oldest_transformers()
    pair = find(name)
    if command == "constraints":
        return str(pair.path.relative_to(ROOT))
    if command == "triton":
        return pair.triton
    if command == "other-tritons":
        return " ".join(other_tritons(name))
    raise ValueError(f"expected a command of `{sys.argv[0]}`'s docstring, got {command!r}")


def main(command: str, name: str = "") -> int:
    """Run one command; return its exit status."""
    if command == "matrix" and name:
        Path(name).write_text(with_matrix(Path(name).read_text()))
        return 0
    try:
        if command == "check":
            problem = refusal(find(name), ".".join(map(str, sys.version_info[:2])))
            print(problem, end="\n" if problem else "", file=sys.stderr)
            return 1 if problem else 0
        print(answer(command, name))
    except ValueError as error:
        print(f"pairs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
