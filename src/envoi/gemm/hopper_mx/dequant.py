"""The PTX that widens MXFP4 or MXFP8 weights to bf16 with their scale factors in, for `mainloop.py`.

An element's bits, moved to where bf16 has them, are its value times a small power of two; one multiplication by the
factor times what is missing makes it right. A factor so large that bf16 can't hold that takes two multiplications.
Weights that are tame (see `QuantTensor.tame`) never do, and have no NaN but by their factors.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    """A format of elements.

    moved: PTX from a word, the last of its operands, to registers of two bf16 each, the others.
    exponent: moved elements are their value times 2^-exponent.
    per_word: registers that a word fills.
    """

    moved: str
    exponent: int
    per_word: int


# Register j gets nibbles j and j + 4: sign to bit 15, the rest to bits 8 .. 6.
E2M1 = Element(
    """
    and.b32 {0}, {4}, 0x000F000F; mul.lo.u32 {0}, {0}, 0x1040; and.b32 {0}, {0}, 0x81C081C0;
    and.b32 {1}, {4}, 0x00F000F0; mul.lo.u32 {1}, {1}, 0x0104; and.b32 {1}, {1}, 0x81C081C0;
    shr.u32 x, {4}, 8;
    and.b32 {2}, x, 0x000F000F; mul.lo.u32 {2}, {2}, 0x1040; and.b32 {2}, {2}, 0x81C081C0;
    and.b32 {3}, x, 0x00F000F0; mul.lo.u32 {3}, {3}, 0x0104; and.b32 {3}, {3}, 0x81C081C0;""",
    exponent=126,
    per_word=4,
)
# Register j gets bytes j and j + 2: sign to bit 15, the rest to bits 10 .. 4.
E4M3 = Element(
    """
    shl.b32 x, {2}, 8; and.b32 x, x, 0x80008000; shl.b32 {0}, {2}, 4; and.b32 {0}, {0}, 0x07F007F0; or.b32 {0}, {0}, x;
    and.b32 x, {2}, 0x80008000; shr.u32 {1}, {2}, 4; and.b32 {1}, {1}, 0x07F007F0; or.b32 {1}, {1}, x;""",
    exponent=120,
    per_word=2,
)
ELEMENTS = {4: E2M1, 8: E4M3}

FIRST_STEP = """
    min.u32 {0}, {0}, 0x7F007F00; setp.eq.u32 p, {1}, 255; selp.b32 {0}, 0x7FC07FC0, {0}, p;"""
# Bit 7 of each byte of n that is NaN in a word.
FIND_NAN = """
    and.b32 x, {0}, 0x7F7F7F7F; add.u32 x, x, 0x01010101; or.b32 n, n, x;"""
POISON = """
    and.b32 n, n, 0x80808080; setp.ne.u32 p, n, 0; selp.b32 {0}, 0x7FC07FC0, {0}, p;"""


def widening(bits: int, tame: bool) -> str:
    """What a thread widens at once: $0 .. $15 from words of a row, then of the row 8 below it.

    Every operand stands for 32 elements: words from $16, factors' bytes from $48; if not tame, whether one of the
    warp's factors may take two multiplications from $80.
    """
    element = ELEMENTS[bits]
    rows = (Row("f", 0, element), Row("g", 1, element))
    moved = "".join(row.moved() for row in rows)
    factors = "".join(row.factor() for row in rows)
    scaled = "".join(row.scaled() for row in rows)
    careful = "" if tame else _two_steps(rows, scaled) + "".join(row.poisoned() for row in rows if bits == 8)
    return f"{{ .reg .b32 x, f, g, n; .reg .pred p, q; {factors}{moved}{careful}\n    {scaled} }}"


def operands(tame: bool) -> str:
    """The constraints of these operands."""
    return ",".join(["=&r"] * 16 + ["r"] * (64 if tame else 96))


def _two_steps(rows: tuple["Row", "Row"], scaled: str) -> str:
    first, second = ("".join(step(row) for row in rows) for step in (Row.first_step, Row.second_factor))
    return f"""
    setp.ne.u32 q, $80, 0;
    @!q bra.uni SCALE;{first}
    {scaled}{second}
    SCALE:"""


@dataclass(frozen=True)
class Row:
    """The PTX for one of a thread's two rows: 16 elements under one factor, whose register is `name`."""

    name: str
    index: int
    element: Element

    @property
    def words(self) -> list[str]:
        """Its words."""
        per_word = self.element.per_word
        return [f"${16 + 16 * self.index + 2 * per_word * w}" for w in range(8 // per_word)]

    @property
    def registers(self) -> list[str]:
        """Where they go."""
        return [f"${8 * self.index + i}" for i in range(8)]

    @property
    def byte(self) -> str:
        """The factor's."""
        return f"${48 + 16 * self.index}"

    def moved(self) -> str:
        """Elements to where bf16 has them."""
        n, registers = self.element.per_word, self.registers
        places = (registers[i : i + n] for i in range(0, 8, n))
        return "".join(self.element.moved.format(*place, word) for place, word in zip(places, self.words, strict=True))

    def factor(self) -> str:
        """The number to multiply by, in both halves, if bf16 can hold it."""
        return f"mad.lo.u32 {self.name}, {self.byte}, 0x00800080, {_both_halves(self.element.exponent)}; "

    def first_step(self) -> str:
        """As much of it as bf16 can hold, NaN for 255."""
        return FIRST_STEP.format(self.name, self.byte)

    def second_factor(self) -> str:
        """The rest of it."""
        least, exponent = 254 - self.element.exponent, self.element.exponent - 127
        scaled = f"mad.lo.u32 {self.name}, x, 0x00800080, {_both_halves(exponent)};"
        return f"\n    max.u32 x, {self.byte}, {least}; {scaled}"

    def scaled(self) -> str:
        """Elements times it."""
        return "".join(f"mul.rn.bf16x2 {i}, {i}, {self.name}; " for i in self.registers)

    def poisoned(self) -> str:
        """NaN as its factor, if an element is."""
        return "mov.b32 n, 0;" + "".join(map(FIND_NAN.format, self.words)) + POISON.format(self.name)


def _both_halves(exponent: int) -> str:
    """What adds an exponent, which may be negative, to both halves of a register."""
    return f"0x{exponent * 0x00800080 & 0xFFFFFFFF:08X}"
