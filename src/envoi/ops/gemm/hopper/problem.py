"""Sizes of one launch of a persistent GEMM kernel, as its roles see them."""

import triton.experimental.gluon.language as gl

from envoi.runtime.aggregate import Scalar, aggregate


@aggregate
class Problem:
    """Sizes of one launch: [M, K] tokens times [N, K] features, or [num_experts, N, K].

    Sizes are int32 scalars. Written by the host, read by every role.
    """

    M: Scalar
    N: Scalar
    K: Scalar
    num_experts: Scalar  # 0 in a dense GEMM
    num_whole_tiles: Scalar  # tiles that are not split along K
    offsets: Scalar  # pointer to int32 [num_experts + 1]: each expert's first row, the last one's end; None if dense
    row_mode: gl.constexpr  # RowMode
    max_experts: gl.constexpr  # length of vectors over experts and the tail: a power of two, at least 32
    cfg: gl.constexpr  # TileConfig
