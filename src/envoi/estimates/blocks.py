"""Block sizes of the two grouped GEMMs: on Hopper the kernels' own choice, on Blackwell the fastest that fit."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2, l1_output_scheme
from envoi.epilogues.lower import lower
from envoi.estimates.layer import MoeLayer, tiles_per_expert
from envoi.estimates.machines import W4A8, WIDENED, Machine
from envoi.ops.gemm.hopper import host as hopper
from envoi.ops.gemm.hopper_mx import config as hopper_mx
from envoi.ops.gemm.hopper_w4a8.config import W4A8Config, costs_of, mean_cost, w4a8_config
from envoi.ops.gemm.hopper_w4a16.few_config import few_configs
from envoi.ops.moe.choose import Choice, LayerPath, choose_experts, choose_layer
from envoi.ops.moe.decode.bf16_fp8 import config as decode
from envoi.ops.moe.support import experts_without_memory
from envoi.quant.formats import Scheme
from envoi.runtime.devices import SHARED_BYTES, Target, standing_for
from envoi.types import ExpertWeights, Matrix, QuantTensor

# Of Blackwell's tiles: tokens and features, of which fewer read the tokens more often; bytes of a stage's row, and of
# shared memory beside the stages.
ROWS, WIDTHS, STAGE_BYTES, OUTPUT_BYTES, MAX_STAGES = 128, (256, 128), 128, 35328, 12
META = torch.device("meta")


@dataclass(frozen=True)
class Blocks:
    """Tiling of one grouped GEMM: tiles of block_m tokens x block_n features, num_stages stages of block_k.

    num_tiles: expected over this rank's experts. shared_evenly: all SMs read as many weights, and launches overlap.
    gathers: L1 finds its tokens by their ids, so that nothing is launched before it, and both GEMMs quantise theirs.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_tiles: float
    shared_evenly: bool = False
    gathers: bool = False

    def rounds(self, num_sms: int) -> float:
        """Number of tiles on the busiest SM; a fraction where they are shared evenly."""
        return self.num_tiles / num_sms if self.shared_evenly else -int(-self.num_tiles // num_sms)


def l1_blocks(layer: MoeLayer, machine: Machine) -> Blocks:
    """Return the tiling of tokens @ gate_up.T, SwiGLU, and quantise if the epilogue supports it."""
    return _blocks(
        layer, machine, layer.l1_nk, expert_l1("swiglu", None, False, l1_output_scheme(layer.formats.activations))
    )


def l2_blocks(layer: MoeLayer, machine: Machine) -> Blocks:
    """Return the tiling of rows @ down.T."""
    return _blocks(layer, machine, layer.l2_nk, expert_l2(False))


def _blocks(layer: MoeLayer, machine: Machine, nk: tuple[int, int], epilogue: Epilogue) -> Blocks:
    if machine.arch == "sm_100":
        return _blackwell(layer, machine, nk)
    choice = choice_of(layer, machine)
    if choice.path in (LayerPath.DECODE, LayerPath.DECODE_MX):
        return (_decode if choice.path is LayerPath.DECODE else _decode_mx)(layer, machine, nk)
    kernels = choice.l1 if nk == layer.l1_nk else choice.l2
    if kernels in ("w4a8", "w4a16"):
        widened = "e4m3" if kernels == "w4a8" else "nvfp4" if layer.format == "nvfp4" else "bf16"
        sizes = *nk, layer.num_rows, layer.num_local_experts, machine.num_sms
        return _widened(layer, nk, w4a8_config(*sizes, widened=widened))
    if layer.format in WIDENED:
        code = lower(epilogue.ir, torch.bfloat16, "gluon", False, False, frozenset())
        bits = 8 if layer.format == "mxfp8" else 4
        mx = hopper_mx.default_config(layer.num_rows, nk[0], layer.num_local_experts, machine.num_sms, code, bits)
        return _counted(layer, nk, mx.block_y, mx.block_x, mx.block_k, mx.num_stages)
    operands = {operand.name: torch.empty(layer.num_rows, device=META) for operand in epilogue.ir.operands}
    config = hopper.planned(
        _matrix((layer.num_rows, nk[1]), layer.formats.activations),
        _matrix((layer.num_local_experts, *nk), layer.formats.weights),
        torch.empty(layer.num_local_experts + 1, dtype=torch.int32, device=META),
        epilogue.ir, torch.bfloat16, operands, machine.num_sms,
    )[1]  # fmt: skip
    counted = _counted(layer, nk, config.block_m, config.block_n, config.block_k, config.num_stages)
    # With `wide_tail_tiles` the count includes both tile widths; most tiles are square.
    return replace(counted, block_m=config.block_x, block_n=config.block_y) if config.wide_tail_tiles else counted


def choice_of(layer: MoeLayer, machine: Machine) -> Choice:
    """Return the kernels of a rank's experts; those for few tokens run where one rank has all experts."""
    target = Target(machine.arch, machine.num_sms)
    with standing_for(target):
        experts = _experts(layer, target)
        if layer.num_gpus > 1:
            return choose_experts(experts, layer.num_rows)
        return choose_layer(experts, layer.num_tokens, layer.num_topk)


def takes_one_launch(layer: MoeLayer, machine: Machine) -> bool:
    """Return True if L1 and L2 are one launch on a rank."""
    return choice_of(layer, machine).path is LayerPath.ONE_LAUNCH


def _experts(layer: MoeLayer, target: Target) -> ExpertWeights:
    """Return a rank's experts without memory, in the order of the target's kernels. target: of `standing_for`."""
    return _packed(layer.hidden, layer.intermediate, layer.num_local_experts, layer.format, target)


@lru_cache(maxsize=64)
def _packed(hidden: int, intermediate: int, num_experts: int, format: str, target: Target) -> ExpertWeights:
    """Return what `_experts` does, kept by what it depends on, which the number of tokens isn't."""
    return experts_without_memory(hidden, intermediate, num_experts, format, packed_layout="interleaved")


def _decode(layer: MoeLayer, machine: Machine, nk: tuple[int, int]) -> Blocks:
    """Return the tiling of the kernel for few tokens."""
    experts = _experts(layer, Target(machine.arch, machine.num_sms))
    config = decode.configs_of(experts, layer.num_tokens, layer.num_topk)[0]
    sizes = decode.TOKENS, decode.FEATURES, config.step * config.stage_steps, config.num_stages
    tile = _counted(layer, nk, *sizes)
    return replace(tile, shared_evenly=True, gathers=nk == layer.l1_nk)


def _decode_mx(layer: MoeLayer, machine: Machine, nk: tuple[int, int]) -> Blocks:
    """Return the tiling of the kernels for few tokens on MXFP4 weights."""
    sizes = layer.hidden, layer.intermediate, layer.num_experts, layer.num_rows
    config = few_configs(*sizes, "swiglu", None, False, layer.format == W4A8)[0]
    tile = _counted(layer, nk, config.tile_tokens, 64 * config.num_row_tiles, 64, config.unroll)
    return replace(tile, shared_evenly=True)


def _widened(layer: MoeLayer, nk: tuple[int, int], config: W4A8Config) -> Blocks:
    """Return the tiling of a config for 4-bit weights; an expert's narrower last tile counts by its time."""
    found = _counted(layer, nk, config.block_y, config.block_x, config.block_k, config.num_stages)
    costs, rows = costs_of(config), layer.num_rows / layer.num_local_experts
    whole = {config.block_y: costs[config.block_y]}
    saved = mean_cost(costs, config.block_y, rows) / mean_cost(whole, config.block_y, rows)
    return replace(found, num_tiles=found.num_tiles * saved)


def _counted(layer: MoeLayer, nk: tuple[int, int], block_m: int, block_n: int, block_k: int, num_stages: int) -> Blocks:
    tiles = layer.num_local_experts * tiles_per_expert(layer, block_m) * -(-nk[0] // block_n)
    return Blocks(block_m, block_n, block_k, num_stages, tiles)


def _matrix(shape: tuple[int, ...], scheme: Scheme | None) -> Matrix:
    """Make a meta Matrix: shapes and dtypes, no memory."""
    if scheme is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)
    group = scheme.group_for(shape)
    factors = torch.empty(
        *shape[:-2], -(-shape[-2] // group[0]), -(-shape[-1] // group[1]), dtype=scheme.sf, device=META
    )
    packed = 2 if scheme.values == torch.uint8 else 1
    values = torch.empty(*shape[:-1], shape[-1] // packed, dtype=scheme.values, device=META)
    return QuantTensor(values, factors, group, scales_at_most_2=scheme.sf == torch.float8_e8m0fnu)


def _blackwell(layer: MoeLayer, machine: Machine, nk: tuple[int, int]) -> Blocks:
    """Choose the widest of Blackwell's tiles among those that give the busiest SM the fewest columns.

    Stages are rows of 128 bytes, as many as fit beside two buffers of outputs. Scale factors take columns of tensor
    memory, so that two accumulators of 256 columns have no room beside them.
    """
    bits = 16 if layer.formats.activations is None else 8
    has_factors = layer.format in WIDENED and bits == 8
    if layer.format == "mxfp4_mxfp8" and nk[1] % 64:
        raise ValueError(f"{layer.format} on sm_100, {nk[0]} x {nk[1]}: FP4 beside FP8 has a K in 64s")
    found = []
    for width in WIDTHS[has_factors:]:
        stage = (ROWS + width) * (STAGE_BYTES + 4 * has_factors)
        num_stages = min(MAX_STAGES, (SHARED_BYTES - OUTPUT_BYTES) // stage)
        found.append(_counted(layer, nk, ROWS, width, 8 * STAGE_BYTES // bits, num_stages))
    return min(found, key=lambda blocks: blocks.rounds(machine.num_sms) * blocks.block_n)
