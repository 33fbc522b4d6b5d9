"""PTX that widens INT4 weights, run by an interpreter of its instructions, for every weight, zero point and factor."""

import itertools

import pytest
import torch

from envoi.ops.gemm.hopper_w4a16 import int4
from envoi.quant.int4 import LARGEST_ZERO, to_codes
from tests.gemm import test_mx_widening as interpreter
from tests.gemm.test_mx_widening import bf16, packed, run
from tests.helpers.slow import mostly_slow


def float32(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def by_halves(f, *words: torch.Tensor) -> torch.Tensor:
    """Apply a function of float64 to both bf16 of each word, and round once."""
    halves = [f(*(bf16(x >> shift & 0xFFFF).double() for x in words)) for shift in (0, 16)]
    return packed(*(half.bfloat16() for half in halves))


def permuted(a: torch.Tensor, b: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Compute prmt.b32 also where bit 3 of a choice asks for the highest bit of a byte in all eight."""
    plain, result = interpreter.permuted(a, b, choice), torch.zeros_like(a)
    for i in range(4):
        byte = plain >> 8 * i & 0xFF
        result |= torch.where(choice >> 4 * i & 8 > 0, (byte >> 7) * 0xFF, byte) << 8 * i
    return result


MORE = {
    "prmt.b32": permuted,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a & 0xFFFFFFFF,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.f32.f16": lambda a: bits_of(a.to(torch.int32).to(torch.int16).view(torch.float16)),
    "cvt.rn.bf16x2.f32": lambda a, b: packed(float32(b).bfloat16(), float32(a).bfloat16()),
    "sub.rn.f32": lambda a, b: bits_of(float32(a) - float32(b)),
    "sub.rn.bf16x2": lambda a, b: by_halves(lambda x, y: x - y, a, b),
    "fma.rn.bf16x2": lambda a, b, c: by_halves(lambda x, y, z: x * y + z, a, b, c),
}


@pytest.fixture(autouse=True)
def operations(monkeypatch):
    for name, operation in MORE.items():
        monkeypatch.setitem(interpreter.OPERATIONS, name, operation)


# Bytes that hold every q of block 0 with every one of block 1, as they are.
FIRST, SECOND = torch.arange(16).repeat(16), torch.arange(16).repeat_interleave(16)


def words(symmetric: bool) -> torch.Tensor:
    """Four different bytes a word: that of `FIRST` and `SECOND` at i, i - 1, i - 2, i - 3."""
    first, second = (to_codes(q) if symmetric else q for q in (FIRST, SECOND))
    by = first | second << 4
    return by | by.roll(1) << 8 | by.roll(2) << 16 | by.roll(3) << 24


def e4m3(word: torch.Tensor, byte: int) -> torch.Tensor:
    return (word >> 8 * byte & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_every_pair_becomes_e4m3():
    registers = {"$2": words(True)}
    run(int4.INT4_CODE.value, registers)
    for i, (name, q) in itertools.product(range(4), (("$0", FIRST), ("$1", SECOND))):
        assert torch.equal(e4m3(registers[name], i) * 2**8, q.roll(i).double() - 8)


@pytest.mark.parametrize("per_step", [1, 2])
def test_every_pair_less_every_zero_point_becomes_its_difference_in_bf16(per_step):
    for zero in range(LARGEST_ZERO + 1):
        zeros = [(zero + 5 * i) % (LARGEST_ZERO + 1) for i in range(2 * per_step)]  # by block, then row
        given = words(False)
        registers = {f"${16 + 8 * k16 + 2 * row}": given.roll(4 * k16 + row) for k16 in range(2) for row in range(2)}
        registers["$32"] = torch.full_like(given, sum(z << 8 * i for i, z in enumerate(zeros)))
        run(int4.less_zeros_code(per_step), registers)
        for block, k16, k8, row in itertools.product(range(2), repeat=4):
            got = registers[f"${8 * block + 4 * k16 + 2 * k8 + row}"]
            z = zeros[row + 2 * block * (per_step - 1)]
            for b in range(2):  # byte k8 + 2 b of the word
                q = (FIRST, SECOND)[block].roll(k8 + 2 * b + 4 * k16 + row)
                assert torch.equal(bf16(got >> 16 * b & 0xFFFF).double(), q.double() - z)


def random_factors(half: bool) -> torch.Tensor:
    """Four factors each: of every size that isn't infinite or NaN."""
    source = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 1 << 16, (40, 4), generator=source)
    x = bits.to(torch.int32).to(torch.int16).view(torch.float16 if half else torch.bfloat16)
    x[0] = torch.tensor([0.0, 1.0, -0.01, 65504.0])
    x[1] = torch.tensor([2.0**-24, 3 * 2.0**-24, 1.1, 0.3])
    return torch.where(x.isfinite() & (x.float().abs() < 1e30), x, torch.ones_like(x))


@pytest.mark.parametrize(("per_step", "half", "has_zeros"), mostly_slow(
    itertools.product((1, 2), (False, True), (False, True)),
    quick=[(1, False, False), (1, True, True), (2, False, True), (2, True, False)],  # each pair of values
))  # fmt: skip
def test_every_pair_under_many_factors_is_rounded_once(per_step, half, has_zeros):
    for turn, x in enumerate(random_factors(half)):
        x = x[:2].repeat(2) if per_step == 1 else x  # block, half
        bits = (x.view(torch.int16).to(torch.int64) & 0xFFFF).tolist()
        zeros = [(turn + 5 * i) % (LARGEST_ZERO + 1) if has_zeros else 8 for i in range(2 * per_step)]
        given = words(not has_zeros)
        registers = {f"${16 + 8 * k16 + 2 * row}": given.roll(k16 + 2 * row) for k16 in (0, 1) for row in (0, 1)}
        factors = torch.zeros_like(given)
        for i in range(2 * per_step):
            factors |= bits[i] << 16 * i if i < 3 else (bits[i] - (1 << 16 if bits[i] >> 15 else 0)) << 16 * i
        registers["$48"] = factors
        registers["$80"] = torch.full_like(given, sum(z << 8 * i for i, z in enumerate(zeros)))
        run(int4.int4_code(per_step, half, has_zeros), registers)
        for block, k16, k8, row, b in itertools.product((0, 1), repeat=5):
            got = bf16(registers[f"${8 * block + 4 * k16 + 2 * k8 + row}"] >> 16 * b & 0xFFFF)
            q = (SECOND if block else FIRST).roll(2 * b + k8 + k16 + 2 * row).double()
            n = q - zeros[row + 2 * block * (per_step - 1)]
            want = (n * x[2 * block + row].double()).bfloat16()
            assert torch.equal(got.double(), want.double()), (x, block, k16, k8, row, b)
