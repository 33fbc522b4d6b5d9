"""Launches of the kernels around the experts' GEMMs: 2048 tokens, 6 of 32 experts each."""

from envoi.runtime.kernel_case import BLACKWELL, EVERY_ARCH, HOPPER
from tools.kernel_cases.planning import Layer, case_of

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2048, 6, 32, 4096, 2048


def _layer(format: str, num_tokens: int = M, arch: str = HOPPER[0]) -> Layer:
    sizes = HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK
    return Layer(format, num_tokens, *sizes, layout="interleaved", arch=arch)


# Name, description, layer, kernel, and, if it isn't planned on Hopper, for which GPU.
LAUNCHES = (
    ("sort", "rows of the slots, sorted by expert", _layer("bf16"), "sort_kernel"),
    ("gather", "tokens to the rows of their slots, in bf16", _layer("bf16"), "gather_kernel"),
    ("gather-fp8-row", "quantised with a scale a row", _layer("fp8_row"), "gather_kernel"),
    ("gather-fp8-block128", "quantised with a scale per 1x128", _layer("fp8_block128"), "gather_kernel"),
    ("gather-mxfp8", "quantised to MXFP8", _layer("mxfp8"), "gather_kernel"),
    ("quantize-fp8-row", "L1's rows, with a scale a row", _layer("fp8_row"), "quantize_kernel"),
    (
        "quantize-fp8-block128", "with a scale per 1x128", _layer("fp8_block128", arch=BLACKWELL[0]),
        "quantize_kernel", 0, BLACKWELL[0],
    ),
    ("combine", "sums of the rows of each token's slots", _layer("bf16"), "combine_kernel"),
)  # fmt: skip
ON_HOPPER = (
    ("both-gemms", "L1 and L2 in one launch, in fp8_block128", _layer("fp8_block128", M // 2), "fused_kernel"),
    ("both-gemms-few", "with 48 rows an expert", _layer("fp8_block128", M // 8), "fused_kernel"),
)
KERNELS = tuple(
    case_of(f"experts-{name}", about, arches, *launch)
    for arches, launches in ((EVERY_ARCH, LAUNCHES), (HOPPER, ON_HOPPER))
    for name, about, *launch in launches
)
