"""Launches of the kernels between ranks: 4 ranks, 2048 tokens each, 6 of 256 experts each; or two such hosts."""

from dataclasses import replace

from tools.kernel_cases import EVERY_ARCH, HOPPER
from tools.kernel_cases.planning import Layer, LayerOfRanks, case_of

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE, NUM_RANKS = 2048, 6, 256, 4096, 2048, 4
NUM_HOSTS = 2
NUM_ROUTED = 232  # experts of a routing, with a placement


def _layer(way: str, format: str, presum: bool, num_routed: int | None = None) -> LayerOfRanks:
    num_hosts = NUM_HOSTS if way == "hosts" else 1
    num_ranks = NUM_RANKS * num_hosts
    experts = Layer(format, M, HIDDEN, num_experts=NUM_EXPERTS // num_ranks, num_topk=NUM_TOPK)
    return LayerOfRanks(experts, num_ranks, way, presum, num_hosts, num_routed)


# Name, description, format, kernel; in PRESUMMED ranks sum before they send.
LAUNCHES = (
    ("stage-tokens-bf16", "tokens to where peers read them", "bf16", "stage_tokens_kernel"),
    ("stage-tokens-fp8-block128", "quantised to 1x128", "fp8_block128", "stage_tokens_kernel"),
    ("send-routing", "each slot's expert to all peers; waits for theirs", "bf16", "send_routing_kernel"),
    ("pull-bf16", "peers' tokens to rows by expert", "bf16", "pull_kernel"),
    ("pull-fp8-row", "in fp8_row", "fp8_row", "pull_kernel"),
    ("pull-fp8-block128", "in fp8_block128", "fp8_block128", "pull_kernel"),
    ("pull-mxfp8", "in MXFP8", "mxfp4_mxfp8", "pull_kernel"),
    ("combine-barrier", "barrier across ranks after L2", "bf16", "combine_barrier_kernel"),
    ("sum", "sums over each token's slots", "bf16", "sum_kernel"),
    ("send-rows", "rows of other experts to their tokens' ranks", "bf16", "send_rows_kernel"),
    ("send-partial-sums", "sums of a token's rows, sent to its rank", "bf16", "send_partial_sums_kernel"),
    ("sum-ranks", "sums of what the ranks sent for a token", "bf16", "sum_ranks_kernel"),
)
BETWEEN_HOSTS = (
    ("mark", "counts a point of a call around collectives", "bf16", "mark_kernel"),
    ("pack-slots", "slots of a rank into its parcel", "bf16", "pack_slots_kernel"),
    ("unpack-bf16", "parcels of all hosts into this rank's memory", "bf16", "unpack_kernel"),
    ("unpack-fp8-row", "in fp8_row", "fp8_row", "unpack_kernel"),
    ("unpack-fp8-block128", "in fp8_block128", "fp8_block128", "unpack_kernel"),
    ("unpack-mxfp8", "in MXFP8", "mxfp4_mxfp8", "unpack_kernel"),
    ("seal", "the call's number to the end of each part", "bf16", "seal_kernel"),
    ("sum-hosts", "sums of rows from all hosts", "bf16", "sum_hosts_kernel"),
    ("sum-hosts-sums", "of sums from all hosts", "bf16", "sum_hosts_kernel"),
)
PRESUMMED = ("send-partial-sums", "sum-ranks", "sum-hosts-sums")
NVLINK, HOSTS = (
    tuple(
        case_of(f"ep-{name}", about, EVERY_ARCH, _layer(way, format, name in PRESUMMED), kernel)
        for name, about, format, kernel in launches
    )
    for way, launches in (("memory", LAUNCHES), ("hosts", BETWEEN_HOSTS))
)
PLACEMENT = (
    case_of(
        "ep-place", "choices of experts to physical ones", EVERY_ARCH,
        _layer("memory", "bf16", False, NUM_ROUTED), "place_kernel",
    ),
)  # fmt: skip
RESULTS = tuple(
    case_of(f"ep-{name}-fp8", about, EVERY_ARCH, replace(_layer("memory", format, False), results="fp8_1x128"), kernel)
    for name, about, format, kernel in (
        ("sum", "sums over each token's slots, of rows in FP8", "bf16", "sum_kernel"),
        ("send-rows", "rows of other experts, quantised", "bf16", "send_rows_kernel"),
    )
)
# One launch of a rank with 128 experts, whose rows are sent.
SENT = LayerOfRanks(Layer("fp8_block128", M, HIDDEN, INTERMEDIATE, 128, NUM_TOPK, layout="interleaved"), num_ranks=2)
ONE_LAUNCH = tuple(
    case_of(f"experts-both-gemms-sent{name}", f"L1 and L2 in one launch, {about}", HOPPER, layer, "fused_kernel")
    for name, about, layer in (
        ("", "whose rows are sent to their ranks", SENT),
        ("-fp8", "whose rows are sent in FP8", replace(SENT, results="fp8_1x128")),
    )
)
KERNELS = NVLINK + HOSTS + PLACEMENT + RESULTS + ONE_LAUNCH
