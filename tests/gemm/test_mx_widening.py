"""PTX that widens MX weights, run by an interpreter of its instructions: exact for every element and factor."""

import re

import pytest
import torch

from envoi.ops.gemm.hopper_mx.dequant import widening
from envoi.quant.bits import e2m1_decode
from envoi.quant.pack import LARGEST_SCALE_BYTE


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def packed(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Pack two vectors of bf16 into one of words."""
    bits = [x.view(torch.int16).to(torch.int64) & 0xFFFF for x in (low, high)]
    return bits[0] | bits[1] << 16


def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute mul.rn.bf16x2 in float64: float32 holds the product of two bf16 except for its range."""
    halves = [(bf16(a >> shift & 0xFFFF).double() * bf16(b >> shift & 0xFFFF).double()).bfloat16() for shift in (0, 16)]
    return packed(*halves)


def permuted(a: torch.Tensor, b: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Compute prmt.b32: byte i of the result is the byte of b, a that bits 4 i .. of the choice name."""
    both, result = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        result |= (both >> 8 * (choice >> 4 * i & 7) & 0xFF) << 8 * i
    return result


def combined(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Compute lop3.b32: bit 4 a + 2 b + c of the table, for each bit of a, b and c."""
    result = torch.zeros_like(a)
    for i in range(8):
        result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) & -(table >> i & 1)
    return result


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "min.u32": torch.minimum,
    "bfe.u32": lambda a, first, count: a >> first & (1 << count) - 1,
    "max.u32": torch.maximum,
    "mov.b32": lambda a: a,
    "cvt.u32.u64": lambda a: a,
    "shr.u64": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": combined,
    "mul.rn.bf16x2": scaled,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, p: torch.where(p, a, b),
}


def run(text: str, registers: dict[str, torch.Tensor]) -> None:
    """Run PTX on vectors of words; either all elements take a branch or none."""
    skip = ""
    for statement in re.findall(r"[^;{}\n:]+[;:]", text):
        statement = statement.strip()
        if statement.endswith(":"):
            skip = "" if statement[:-1] == skip else skip
            continue
        if skip or statement.startswith(".reg"):
            continue
        words = statement.rstrip(";").replace(",", " ").split()
        if words[0].startswith("@!"):
            if not registers[words[0][2:]].any():
                skip = words[2]
            continue
        like = next(iter(registers.values()))
        operands = [registers[w] if w in registers else torch.full_like(like, int(w, 0)) for w in words[2:]]
        result = OPERATIONS[words[0]](*operands)
        registers[words[1]] = result if result.dtype == torch.bool else result & 0xFFFFFFFF


def widen(bits: int, bounded: bool, codes: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """Widen a thread's row: element codes [n, 16] in its order, and the byte of their factor [n] -> bf16 [n, 16]."""
    per_word = 32 // bits
    shifts = bits * torch.arange(per_word)
    words = (codes.view(len(codes), -1, per_word) << shifts).sum(-1)
    registers = {"$80": (byte >= 128).to(torch.int64)}
    for row in (0, 16):
        registers[f"${48 + row}"] = byte
        registers |= {f"${16 + row + per_word * w}": words[:, w] for w in range(words.shape[1])}
    run(widening(bits, bounded), registers)
    rows = [torch.stack([registers[f"${first + i}"] for i in range(8)], 1) for first in (0, 8)]
    assert torch.equal(*rows)
    return torch.stack((bf16(rows[0] & 0xFFFF), bf16(rows[0] >> 16)), -1).flatten(1)


def order(bits: int) -> torch.Tensor:
    """Return the row's element in each half of a register: register j of a word has elements j and j + half."""
    per_word = 32 // bits
    word = torch.arange(16).view(-1, 2, per_word // 2).transpose(1, 2)
    return word.flatten()


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_element_under_every_factor(bits, bounded):
    codes = torch.arange(2**bits).view(-1, 16)
    values = e2m1_decode(codes) if bits == 4 else codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    factors = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")], dtype=torch.float64)
    for some in torch.arange(LARGEST_SCALE_BYTE + 1 if bounded else 256).split(128):  # all take a branch or none
        byte = some.repeat_interleave(len(codes))
        got = widen(bits, bounded, codes.repeat(len(some), 1), byte).double()
        want = (values.double().repeat(len(some), 1) * factors[byte, None])[:, order(bits)]
        if bits == 8:
            nan = want.isnan().any(1, keepdim=True)  # one NaN spoils all elements that its thread has of the row
            want = torch.where(nan, float("nan"), want)
            if bounded:
                got, want = got[~nan[:, 0]], want[~nan[:, 0]]
        rounded = want.bfloat16().double()  # 448 * 2^127 is infinite, 2^-9 * 2^-127 rounds to a multiple of 2^-133
        assert torch.equal(got.isnan(), rounded.isnan())
        assert torch.equal(got.nan_to_num(0.0, 1e39, -1e39), rounded.nan_to_num(0.0, 1e39, -1e39))
