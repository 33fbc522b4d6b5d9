"""Writer of the PTX that widens MXFP4 or MXFP8 weights to bf16 and multiplies them by their scale factors.

An element's bits, moved to their positions in bf16, are its value times a small power of two. One multiplication by
the scale factor times the inverse of that power completes it; where bf16 can't hold this factor, it takes two.
Weights with `QuantTensor.scales_at_most_2` never need two, and have no NaN except from their scale factors.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    """Format of a weight's elements.

    moved: PTX that expands a word, the last operand, into registers of two bf16 each, the other operands.
    exponent: moved elements are their value times 2^-exponent.
    per_word: registers that a word expands into.
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


def widening(bits: int, bounded: bool) -> str:
    """Return the PTX for what a thread widens at once, to $0 .. $15: 16 elements of a row, then 16 of the row 8 below.

    Each input has 32 operands, one for each element: words from $16, factors' bytes from $48 and, unless bounded, from
    $80 whether one of the warp's factors may take two multiplications.
    """
    element = ELEMENTS[bits]
    rows = (Row("f", 0, element), Row("g", 1, element))
    moved = "".join(row.moved() for row in rows)
    factors = "".join(row.factor() for row in rows)
    scaled = "".join(row.scaled() for row in rows)
    careful = "" if bounded else _two_steps(rows, scaled) + "".join(row.poisoned() for row in rows if bits == 8)
    return f"{{ .reg .b32 x, f, g, n; .reg .pred p, q; {factors}{moved}{careful}\n    {scaled} }}"


def operands(bounded: bool) -> str:
    """Return the constraints of the PTX's operands."""
    return ",".join(["=&r"] * 16 + ["r"] * (64 if bounded else 96))


def _two_steps(rows: tuple["Row", "Row"], scaled: str) -> str:
    first, second = ("".join(step(row) for row in rows) for step in (Row.first_step, Row.second_factor))
    return f"""
    setp.ne.u32 q, $80, 0;
    @!q bra.uni SCALE;{first}
    {scaled}{second}
    SCALE:"""


@dataclass(frozen=True)
class Row:
    """PTX for one of a thread's two rows: 16 elements with one factor, in register `name`."""

    name: str
    index: int
    element: Element

    @property
    def words(self) -> list[str]:
        """PTX operands with the row's packed weights."""
        per_word = self.element.per_word
        return [f"${16 + 16 * self.index + 2 * per_word * w}" for w in range(8 // per_word)]

    @property
    def registers(self) -> list[str]:
        """PTX operands for the row's widened weights, two bf16 each."""
        return [f"${8 * self.index + i}" for i in range(8)]

    @property
    def byte(self) -> str:
        """PTX operand with the byte of the row's scale factor."""
        return f"${48 + 16 * self.index}"

    def moved(self) -> str:
        """Return the PTX that moves the elements' bits to their positions in bf16."""
        n, registers = self.element.per_word, self.registers
        places = (registers[i : i + n] for i in range(0, 8, n))
        return "".join(self.element.moved.format(*place, word) for place, word in zip(places, self.words, strict=True))

    def factor(self) -> str:
        """Return the PTX that computes the multiplier in both halves of register `name`, if bf16 can hold it."""
        return f"mad.lo.u32 {self.name}, {self.byte}, 0x00800080, {_both_halves(self.element.exponent)}; "

    def first_step(self) -> str:
        """Return the PTX that clamps the multiplier to bf16's range, NaN for the byte 255."""
        return FIRST_STEP.format(self.name, self.byte)

    def second_factor(self) -> str:
        """Return the PTX that computes the rest of the multiplier, for the second multiplication."""
        least, exponent = 254 - self.element.exponent, self.element.exponent - 127
        scaled = f"mad.lo.u32 {self.name}, x, 0x00800080, {_both_halves(exponent)};"
        return f"\n    max.u32 x, {self.byte}, {least}; {scaled}"

    def scaled(self) -> str:
        """Return the PTX that multiplies the elements by register `name`."""
        return "".join(f"mul.rn.bf16x2 {i}, {i}, {self.name}; " for i in self.registers)

    def poisoned(self) -> str:
        """Return the PTX that sets the multiplier to NaN if an element is NaN."""
        return "mov.b32 n, 0;" + "".join(map(FIND_NAN.format, self.words)) + POISON.format(self.name)


def _both_halves(exponent: int) -> str:
    """Return the constant that adds an exponent, which may be negative, to both halves of a register."""
    return f"0x{exponent * 0x00800080 & 0xFFFFFFFF:08X}"
