"""Cut an epilogue in two: a head that tiles of the product can run, and a tail that a second kernel runs on its output.

What quantises in groups of 128 after a gate needs tiles of 256 columns. Cut, it leaves the kernel as the tile that is
to be quantised:

    swiglu_fp8 of [M, N]     head: silu(gate) * up -> float32 [M, N / 2]     tail: quantize of that, [M, N / 2]

An epilogue that needs whole rows is cut before its first operation: its tail runs on the product.
"""

from dataclasses import dataclass, replace

import torch

from envoi.epilogue.ir import IR, TILE, kept_with_ir
from envoi.epilogue.library import store
from envoi.epilogue.outputs import deferred


@dataclass(frozen=True)
class Cut:
    """Epilogue in two parts; together they compute the same bits.

    head: its only output is a tile [M, N / divisor] of `dtype`, which loses no bit. tail: takes that tile as its
    accumulator and has all outputs of the whole.
    """

    head: IR
    tail: IR
    dtype: torch.dtype
    divisor: int


@kept_with_ir
def cut(ir: IR) -> Cut:
    """Return an epilogue cut before the quantisation that is its only output, or else before its first operation."""
    outputs = [ir.nodes[position] for _, position in ir.outputs]
    if [node.op for node in outputs] != ["quantize"] or deferred(ir):
        return Cut(store.ir, ir, torch.float32, 1)
    quantize = outputs[0]
    source = quantize.args[0]
    made = ir.nodes[source]
    acc = next(node for node in ir.nodes if node.op == "acc")
    head = IR(f"{ir.name}_head", ir.operands, ir.nodes[: source + 1], (("", source),))
    tail = IR(f"{ir.name}_tail", (), (acc, replace(quantize, args=(0,), shape=TILE)), ((ir.outputs[0][0], 1),))
    return Cut(head, tail, torch.bfloat16 if made.op == "round_bf16" else torch.float32, made.shape.divisor)
