"""Launches of the kernels around the experts' GEMMs: 2048 tokens, 6 of 32 experts each."""

from dataclasses import replace

from tools.kernel_cases import BLACKWELL, EVERY_ARCH, HOPPER
from tools.kernel_cases.planning import Layer, case_of

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2048, 6, 32, 4096, 2048


def _layer(format: str, num_tokens: int = M, arch: str = HOPPER[0], mapped: bool = False) -> Layer:
    sizes = HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK
    return Layer(format, num_tokens, *sizes, layout="interleaved", arch=arch, mapped=mapped)


PORTABLE = _layer("fp8_block128", arch=BLACKWELL[0])  # Hopper quantises in L1
SHARED = replace(_layer("bf16"), num_shared=1)
KERNELS = tuple(
    case_of(f"experts-{name}", about, arches, layer, f"{kernel}_kernel", arch=layer.arch)
    for name, about, arches, layer, kernel in (
        ("map", "ids of all experts to those of the experts here", EVERY_ARCH, _layer("bf16", mapped=True), "map"),
        ("shared", "slots of shared experts after a token's", EVERY_ARCH, SHARED, "shared"),
        ("shared-gate", "weighted by a gate", EVERY_ARCH, replace(SHARED, gated=True), "shared"),
        ("sort", "rows of the slots, sorted by expert", EVERY_ARCH, _layer("bf16"), "sort"),
        ("count", "slots of each expert, by chunk", EVERY_ARCH, _layer("bf16", 4 * M), "count"),
        ("place", "rows of the slots from those counts", EVERY_ARCH, _layer("bf16", 4 * M), "place"),
        ("gather", "tokens to the rows of their slots, in bf16", EVERY_ARCH, _layer("bf16"), "gather"),
        ("gather-fp8-row", "quantised with a scale a row", EVERY_ARCH, _layer("fp8_row"), "gather"),
        ("gather-fp8-block128", "quantised with a scale per 1x128", EVERY_ARCH, _layer("fp8_block128"), "gather"),
        ("gather-mxfp8", "quantised to MXFP8", EVERY_ARCH, _layer("mxfp8"), "gather"),
        ("quantize-fp8-row", "L1's rows, with a scale a row", EVERY_ARCH, _layer("fp8_row"), "quantize"),
        ("quantize-fp8-block128", "with a scale per 1x128", BLACKWELL, PORTABLE, "quantize"),
        ("combine", "sums of the rows of each token's slots", EVERY_ARCH, _layer("bf16"), "combine"),
        ("both-gemms", "L1 and L2 in one launch, in fp8_block128", HOPPER, _layer("fp8_block128", M // 2), "fused"),
        ("l1-few", "L1 that asks for weights before its rows are there", HOPPER, _layer("bf16", M // 64), "gemm"),
        ("both-gemms-few", "with 48 rows an expert", HOPPER, _layer("fp8_block128", M // 8), "fused"),
    )
)
