"""Registry of this library's kernels by name, each with its recipe.

To add one: a function that takes an architecture and returns a `Recipe`, under `@kernel(name, arches)`. Its docstring's
first line is printed by `envoi sass --list`. It imports the kernel itself, so that listing stays quick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from tools.machine_code.hopper_cases import CASES
from tools.machine_code.mx_cases import MX_CASES
from tools.machine_code.router_cases import ROUTER_CASES
from tools.machine_code.w4a16_cases import W4A16_CASES

if TYPE_CHECKING:
    from envoi.epilogue.api import Epilogue
    from tools.machine_code.compile import Recipe


@dataclass(frozen=True)
class Entry:
    """Kernel of the library: the architectures it is written for, and its recipe for one of them."""

    name: str
    arches: tuple[str, ...]
    about: str
    recipe: "Callable[[str], Recipe]"


KERNELS: dict[str, Entry] = {}


def kernel(name: str, arches: tuple[str, ...]):
    """Decorate a function from architecture to recipe: add it to `KERNELS`."""

    def register(recipe: "Callable[[str], Recipe]") -> "Callable[[str], Recipe]":
        if name in KERNELS:
            raise ValueError(f"registry: {name!r} stands twice")
        about = (recipe.__doc__ or "").strip().splitlines()[0]
        KERNELS[name] = Entry(name, arches, about, recipe)
        return recipe

    return register


def find(name: str) -> Entry:
    """Return the entry of that name; ValueError lists the known names."""
    if name not in KERNELS:
        raise ValueError(f"KERNEL: expected a .cubin file or one of {', '.join(KERNELS)}, got {name!r}")
    return KERNELS[name]


@kernel("tmem-load", arches=("sm_100", "sm_103"))
def _tmem_load(arch: str) -> "Recipe":
    """128 x 256 GEMM tile, accumulator read from tensor memory 32 columns at a time; --sweep varies that."""
    from tools.machine_code import tmem_sweep

    return tmem_sweep.recipe(tmem_sweep.Case("32x32b", columns=32))


BLACKWELL = ("sm_100", "sm_103")
TRITON_ARCHES = ("sm_90", *BLACKWELL)


@kernel("gemm-sm100", arches=BLACKWELL)
def _gemm_sm100(arch: str) -> "Recipe":
    """GEMM in bf16 with tcgen05, 128 x 256 tiles, plain store."""
    return _blackwell(arch, "store", block_k=64)


@kernel("gemm-sm100-swiglu", arches=BLACKWELL)
def _gemm_sm100_swiglu(arch: str) -> "Recipe":
    """GEMM in bf16 with tcgen05, with silu(gate) * up of interleaved columns."""
    return _blackwell(arch, "swiglu", block_k=64)


@kernel("gemm-sm100-swiglu-fp8", arches=BLACKWELL)
def _gemm_sm100_swiglu_fp8(arch: str) -> "Recipe":
    """GEMM with SwiGLU, quantised to FP8 with a scale factor per 1x128: 8 epilogue warps, one chunk per tile."""
    return _blackwell(arch, "swiglu_fp8", block_k=64, num_warps=8, epilogue_columns=256, num_store_buffers=1)


@kernel("gemm-sm100-grouped", arches=BLACKWELL)
def _gemm_sm100_grouped(arch: str) -> "Recipe":
    """Grouped GEMM in bf16 over 64 experts."""
    return _blackwell(arch, "store", num_experts=64, block_k=64)


@kernel("gemm-sm100-fp8", arches=BLACKWELL)
def _gemm_sm100_fp8(arch: str) -> "Recipe":
    """GEMM of FP8 E4M3 without scale factors along K."""
    return _blackwell(arch, "store", "f8", "f8", block_k=128)


@kernel("gemm-sm100-mxfp8", arches=BLACKWELL)
def _gemm_sm100_mxfp8(arch: str) -> "Recipe":
    """GEMM of MXFP8: scale factors along K go through tensor memory, 128 x 128 tiles."""
    return _blackwell(arch, "store", "f8", "f8", block_y=128, block_k=128, sf_group=32)


@kernel("gemm-sm100-mxfp8-mxfp4", arches=BLACKWELL)
def _gemm_sm100_mixed(arch: str) -> "Recipe":
    """GEMM of MXFP8 tokens and MXFP4 weights."""
    return _blackwell(arch, "store", "f8", "f4", block_y=128, block_k=128, sf_group=32)


@kernel("gemm-sm100-mxfp4", arches=BLACKWELL)
def _gemm_sm100_mxfp4(arch: str) -> "Recipe":
    """GEMM of MXFP4."""
    return _blackwell(arch, "store", "f4", "f4", block_y=128, block_k=256, sf_group=32)


@kernel("gemm-sm100-nvfp4", arches=BLACKWELL)
def _gemm_sm100_nvfp4(arch: str) -> "Recipe":
    """GEMM of NVFP4: E4M3 scale factors per 16 elements."""
    return _blackwell(arch, "store", "f4", "f4", block_y=128, block_k=256, sf_group=16)


@kernel("gemm-sm100-experts", arches=BLACKWELL)
def _gemm_sm100_experts(arch: str) -> "Recipe":
    """First GEMM of 256 experts: MXFP8 rows, MXFP4 weights, bias, clamped SwiGLU, routing weight, MXFP8 out."""
    from envoi.epilogue.library import expert_l1

    epilogue = expert_l1("swiglu_oai", 7.0, True, "mxfp8")
    return _blackwell(arch, epilogue, "f8", "f4", num_experts=256, block_y=128, block_k=128, sf_group=32)


def _blackwell(
    arch: str,
    epilogue: "str | Epilogue",
    a: str = "bf16",
    b: str = "bf16",
    num_experts: int = 0,
    block_y: int = 256,
    **cut: int,
) -> "Recipe":
    """Return the recipe of the Blackwell kernel with an epilogue, or one of the library's by name."""
    from envoi.epilogue import library
    from envoi.gemm.blackwell.config import BlackwellConfig
    from tools.machine_code import blackwell_recipes

    kinds = {"bf16": blackwell_recipes.BF16, "f8": blackwell_recipes.F8, "f4": blackwell_recipes.U8}
    config = BlackwellConfig(block_y=block_y, num_stages=4, **cut)
    dtypes = kinds[a], kinds[b]
    own = getattr(library, epilogue) if isinstance(epilogue, str) else epilogue
    return blackwell_recipes.blackwell(arch, own, config, dtypes, num_experts=num_experts)


@kernel("gemm-triton", arches=TRITON_ARCHES)
def _gemm_triton(arch: str) -> "Recipe":
    """GEMM in plain Triton in bf16, with silu(gate) * up of interleaved columns."""
    from envoi.epilogue.library import swiglu
    from tools.machine_code import triton_recipes

    return triton_recipes.product(arch, swiglu)


@kernel("gemm-triton-mxfp4", arches=TRITON_ARCHES)
def _gemm_triton_mxfp4(arch: str) -> "Recipe":
    """Grouped GEMM in plain Triton of MXFP8 tokens and MXFP4 weights over 64 experts, widened in registers."""
    from envoi.epilogue.library import expert_l2
    from tools.machine_code import triton_recipes

    return triton_recipes.product(arch, expert_l2(True), "mxfp8", "mxfp4", num_experts=64)


@kernel("rows-triton", arches=TRITON_ARCHES)
def _rows_triton(arch: str) -> "Recipe":
    """Epilogue of whole rows, from accumulators in memory: the experts' SwiGLU, quantised with a scale per row."""
    from envoi.epilogue.library import expert_l1
    from tools.machine_code import triton_recipes

    return triton_recipes.rows(arch, expert_l1("swiglu", None, False, "fp8_row"))


def _around(name: str, about: str, module: str, function: str, *arguments: str | None) -> None:
    """Register a Triton kernel around the experts' GEMMs, whose recipe is `tools.machine_code.<module>.<function>`."""

    def recipe(arch: str) -> "Recipe":
        return getattr(import_module(f"tools.machine_code.{module}"), function)(arch, *arguments)

    recipe.__doc__ = about
    kernel(name, arches=TRITON_ARCHES)(recipe)


_around("experts-sort", "Where each slot's row is among those sorted by expert.", "expert_recipes", "sort")
_around("experts-gather", "Tokens to the rows of their slots, in bf16.", "expert_recipes", "gather", None)
_around("experts-gather-fp8-row", "The same, quantised with a scale a row.", "expert_recipes", "gather", "fp8_row")
_around(
    "experts-gather-fp8-block128",
    "The same, quantised with a scale per 1x128.",
    "expert_recipes",
    "gather",
    "fp8_1x128",
)
_around("experts-gather-mxfp8", "The same, quantised to MXFP8.", "expert_recipes", "gather", "mxfp8")
_around(
    "experts-quantize-fp8-row",
    "Between the experts' GEMMs: rows in bf16, quantised with a scale a row.",
    "expert_recipes",
    "quantize",
    "fp8_row",
)
_around("experts-quantize-fp8-block128", "The same with a scale per 1x128.", "expert_recipes", "quantize", "fp8_1x128")
_around("experts-combine", "Tokens as the sums of their slots' rows.", "expert_recipes", "combine")
_around(
    "ep-publish-bf16",
    "Tokens to where peers read them, slots counted and ranked by expert.",
    "ep_recipes",
    "publish",
    "bf16",
)
_around(
    "ep-publish-fp8-block128",
    "Tokens, quantised to 1x128, to where peers read them.",
    "ep_recipes",
    "publish",
    "fp8_block128",
)
_around("ep-announce", "Which expert each slot wants, to all peers; waits for theirs.", "ep_recipes", "announce")
_around("ep-pull-bf16", "Peers' tokens in bf16 to rows by expert.", "ep_recipes", "pull", "bf16")
_around("ep-pull-fp8-row", "Peers' tokens in fp8_row to rows by expert.", "ep_recipes", "pull", "fp8_row")
_around(
    "ep-pull-fp8-block128", "Peers' tokens in fp8_block128 to rows by expert.", "ep_recipes", "pull", "fp8_block128"
)
_around("ep-pull-mxfp8", "Peers' tokens in MXFP8 to rows by expert.", "ep_recipes", "pull", "mxfp4_mxfp8")
_around("ep-meet", "Tells peers that their rows have been sent, and waits for the same.", "ep_recipes", "meet")
_around("ep-sum", "Sums of tokens' slots.", "ep_recipes", "sums")
_around("ep-return", "Sums of a token's rows on a rank, to the rank that it came from.", "ep_recipes", "returns")
_around("ep-sum-ranks", "Sums of what the ranks sent for a token.", "ep_recipes", "sums_of_ranks")


def _of_case(module: str, case: object, about: str) -> "Callable[[str], Recipe]":
    """Return a function from architecture to a case's recipe, by `tools.machine_code.<module>.recipe`."""

    def recipe(arch: str) -> "Recipe":
        return import_module(f"tools.machine_code.{module}").recipe(case, arch)

    recipe.__doc__ = about
    return recipe


for _case in CASES:
    kernel(_case.title, arches=("sm_90",))(_of_case("hopper_recipes", _case, f"GEMM on Hopper: {_case}."))

for _case in MX_CASES:
    _about = f"GEMM on Hopper for MX weights: {_case}."
    kernel(_case.title, arches=("sm_90",))(_of_case("mx_recipes", _case, _about))


for _case in W4A16_CASES:
    _about = (
        f"4-bit weights, bf16 tokens on Hopper: {_case.launch} for {_case.num_tokens} tokens of gpt-oss-20b's layer."
    )
    kernel(_case.title, arches=("sm_90",))(_of_case("w4a16_recipes", _case, _about))


@kernel("mx-tokens-4", arches=("sm_90",))
def _mx_tokens_4(arch: str) -> "Recipe":
    """MXFP8 tokens to bf16, in the order of K that MXFP4 weights require."""
    from tools.machine_code import mx_recipes

    return mx_recipes.tokens(4, arch)


@kernel("mx-tokens-8", arches=("sm_90",))
def _mx_tokens_8(arch: str) -> "Recipe":
    """MXFP8 tokens to bf16, in the order of K that MXFP8 weights require."""
    from tools.machine_code import mx_recipes

    return mx_recipes.tokens(8, arch)


for _case in ROUTER_CASES:
    _about = f"Router {'on Hopper' if _case.kernel == 'sm90' else 'in plain Triton'}: {_case}."
    kernel(_case.title, arches=_case.arches)(_of_case("router_recipes", _case, _about))


@kernel("indexer-scores-sm90", arches=("sm_90",))
def _indexer_scores_sm90(arch: str) -> "Recipe":
    """Scores of the sparse-attention indexer on Hopper: FP8 tensor cores, pages by TMA."""
    return _indexer("scores-sm90", arch)


@kernel("indexer-scores", arches=("sm_90", "sm_100", "sm_103"))
def _indexer_scores(arch: str) -> "Recipe":
    """Scores of the sparse-attention indexer in plain Triton."""
    return _indexer("scores", arch)


@kernel("indexer-sift", arches=("sm_90", "sm_100", "sm_103"))
def _indexer_sift(arch: str) -> "Recipe":
    """Candidates for the k best, in one pass over the scores, by a bound from groups of them."""
    return _indexer("sift", arch)


@kernel("indexer-rank", arches=("sm_90", "sm_100", "sm_103"))
def _indexer_rank(arch: str) -> "Recipe":
    """Output places of the candidates."""
    return _indexer("rank", arch)


@kernel("indexer-exact", arches=("sm_90", "sm_100", "sm_103"))
def _indexer_exact(arch: str) -> "Recipe":
    """Scores of the exact mode: float32, every rounding in torch's order."""
    return _indexer("exact", arch)


@kernel("indexer-short", arches=("sm_90", "sm_100", "sm_103"))
def _indexer_short(arch: str) -> "Recipe":
    """Order of rows of at most 32 tokens, sorted as by torch's network."""
    return _indexer("short", arch)


def _indexer(name: str, arch: str) -> "Recipe":
    from tools.machine_code import indexer_recipes

    return indexer_recipes.recipe(name, arch)
