"""Humming's MoE layers: products indexed by slots, with the steps of vLLM around them.

    w8a8     fp8_block128: FP8 weights with a scale per 128x128, FP8 activations with a scale per 128
    w4a16    MXFP4 weights beside bf16 activations
    w4a8     MXFP4 weights beside FP8 activations with a scale per 128

Slots are sorted by expert by vLLM's operator and summed by its kernel; the activation is part of Humming's own
quantisation. MXFP4 sizes that its tiles don't divide are padded with zeros, and tokens too, outside the time.
"""

import importlib
import json
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

from bench.suites.torch_moe import Layer
from bench.timing import Run
from envoi.quant.formats import SCHEMES
from envoi.quant.fragments import to_rows
from envoi.tune.problems import in_scheme
from envoi.types import QuantTensor

ALIGNMENTS = (128, 256, 512)  # of padded sizes, tried in turn
DEFAULT_BLOCK = 64  # rows of a tile
# The activation as C++ of a gate a and an up b: from halves of a row, or from columns in turn.
SWIGLU = "(a / (1.f + expf(-a))) * b"
HALVES, IN_TURN = "binary_split", "binary_interleaved"


@dataclass(frozen=True)
class Product:
    """Weights of one product in Humming's form. tuning: (fewest slots excluded, most included, config) by size."""

    config: Any
    tensors: dict[str, torch.Tensor]
    tuning: list[tuple[int, int, dict[str, Any]]]

    def block(self, num_slots: int) -> int:
        """Return the rows of a tile."""
        fitting = (chosen["block_shape"][0] for least, most, chosen in self.tuning if least < num_slots <= most)
        return next(fitting, DEFAULT_BLOCK)

    @property
    def columns(self) -> int:
        """Columns of the result, without those that Humming itself pads."""
        return self.config.shape_n - self.config.pad_shape_n


def w8a8(layer: Layer) -> tuple[Run, str]:
    """Return a call on weights of its own, and its activation."""
    schemas: Any = importlib.import_module("humming.schema.fp8")
    schema = schemas.Fp8WeightSchema(weight_block_size=(128, 128))
    pairs = [
        prepare(schema, _fp8_inputs(), {"weight": values, schema.weight_scale_key: sf}, layer.num_experts)
        for values, sf in (blocks_of(layer.gate_up), blocks_of(layer.down))
    ]
    return call(layer, pairs, layer.tokens, HALVES), "swiglu"


def w4a16(layer: Layer) -> tuple[Run, str]:
    """Return a call on the layer's own MXFP4 weights, and its activation."""
    return _mxfp4(layer, None), "swiglu"


def w4a8(layer: Layer) -> tuple[Run, str]:
    """Return a call on the layer's own MXFP4 weights, and its activation."""
    return _mxfp4(layer, _fp8_inputs()), "swiglu"


def _fp8_inputs() -> Any:
    schemas: Any = importlib.import_module("humming.schema")
    return schemas.HummingInputSchema(
        a_dtype="float8e4m3", input_scale_group_size=128, input_scale_dtype="float32",
        input_quant_mode="dynamic_group",
    )  # fmt: skip


def _mxfp4(layer: Layer, inputs: Any) -> Run:
    """Pad by the first alignment that Humming has tiles for. Raises its AssertionError if there is none."""
    schemas: Any = importlib.import_module("humming.schema.mxfp4")
    gate_up, down = (to_rows(cast(QuantTensor, w)) for w in (layer.packed.gate_up, layer.packed.down))
    hidden, intermediate = layer.tokens.shape[1], layer.down.shape[2]
    refused: AssertionError | None = None
    for multiple in ALIGNMENTS:
        wide, inner = (-(-size // multiple) * multiple for size in (hidden, intermediate))
        sizes = (gate_up, 2 * inner, wide), (down, wide, inner)
        try:
            pairs = [prepare(schemas.Mxfp4WeightSchema(), inputs, padded(*one), layer.num_experts) for one in sizes]
            run = call(layer, pairs, functional.pad(layer.tokens, (0, wide - hidden)).contiguous(), IN_TURN)
            run()
            return run
        except AssertionError as error:
            refused = error
    raise cast(AssertionError, refused)


def padded(x: QuantTensor, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return MXFP4 weights [E, N, K] by rows with zeros after their rows and columns.

    A scale factor there is its expert's first, so that an expert's range stays what it is.
    """
    values, sf = x.values, x.sf.view(torch.uint8)
    num_experts, n, pairs = values.shape
    factors = sf[:, :1, :1].expand(num_experts, rows, columns // 32).contiguous()
    factors[:, :n, : sf.shape[2]] = sf
    return {"weight": functional.pad(values, (0, columns // 2 - pairs, 0, rows - n)), "weight_scale": factors}


def prepare(schema: Any, inputs: Any, tensors: dict[str, torch.Tensor], num_experts: int) -> Product:
    """Convert the weights of one product, and choose its tiles as Humming does."""
    transform: Any = importlib.import_module("humming.transform")
    tune: Any = importlib.import_module("humming.tune")
    n, k = schema.infer_shape(tensors)[:2]
    own, converted = schema.convert_humming(
        tensors, shape_n_stacks=[n], shape_k_stacks=[k], param_dtype=torch.bfloat16, num_experts=num_experts
    )
    config, done = transform.prepare_and_transform_humming_tensors(
        converted, n, k, own, inputs, num_experts=num_experts, has_bias=False, torch_dtype=torch.bfloat16
    )
    tuning = tune.get_heuristics_config(
        layer_config=config, use_f16_accum=False, use_batch_invariant=False, gemm_type=_indexed()
    )
    return Product(config, done, tuning)


def _indexed() -> Any:
    return importlib.import_module("humming.config").GemmType.INDEXED


def call(layer: Layer, products: list[Product], tokens: torch.Tensor, order: str) -> Run:
    """Return a call of both products and what is around them. order: of gate and up in the first one's rows."""
    forward: Any = importlib.import_module("humming.forward")
    sums: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.moe_fused_mul_sum")
    import_operators()
    weights, ids = layer.routing.topk_weights, layer.routing.topk_ids
    (m, k), hidden = ids.shape, layer.tokens.shape[1]
    blocks = [product.block(m * k) for product in products]
    locks = torch.zeros(2048, dtype=torch.int32, device=tokens.device)
    how = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": _indexed().value})
    tuning = [json.dumps(product.tuning) for product in products]

    def one(number: int, x: torch.Tensor, slots: tuple[torch.Tensor, ...], per_token: int, **activation: str):
        product = products[number]
        x, by_group, by_token = forward.may_process_input(product.config, inputs=x, **activation)
        mode, held = product.config.input_quant_mode, product.tensors
        out = tokens.new_empty(m * k, product.columns)
        forward.humming_forward(
            product.config, inputs=x, weight=held["weight"], weight_scale=held.get("weight_scale"),
            zero_point=held.get("zero_point"), bias=None, weight_scale_2=held.get("weight_scale_2"),
            input_scale=by_group if mode.has_group_scale else by_token,
            input_scale_2=by_token if mode.has_secondary_scale else None, outputs=out, locks=locks,
            sorted_ids=slots[0], expert_ids=slots[1], num_tokens_padded=slots[2], top_k=per_token,
            valid_shape_m=m * k, compute_config=how, tuning_config=tuning[number],
        )  # fmt: skip
        return out

    def run() -> torch.Tensor:
        first = aligned(ids, blocks[0], layer.num_experts)
        second = first if blocks[0] == blocks[1] else aligned(ids, blocks[1], layer.num_experts)
        h = one(0, tokens, first, k)
        rows = one(1, h, second, 1, activation_type=order, activation_impl=SWIGLU)
        return sums.moe_fused_mul_sum(rows.view(m, k, -1), weights, topk_ids=ids)[:, :hidden]

    return run


# Shared with vLLM's layers


def import_operators() -> None:
    """Register vLLM's compiled operators. Raises ModuleNotFoundError if it isn't installed."""
    for module in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        importlib.import_module(module)


def aligned(ids: torch.Tensor, block: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Sort slots by expert, each expert's padded to whole blocks: slots, the blocks' experts, the padded number."""
    room = min(ids.numel(), num_experts) * (block - 1) + ids.numel()
    slots, experts, total = (ids.new_empty(size) for size in (room, -(-room // block), 1))
    torch.ops._moe_C.moe_align_block_size(ids, num_experts, block, slots, experts, total, None)
    return slots, experts, total


def blocks_of(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights [E, N, K] with a scale per 128x128: values, scales [E, N / 128, K / 128]."""
    found = cast(QuantTensor, in_scheme(weights, SCHEMES["fp8_128x128"]))
    return found.values, found.sf
