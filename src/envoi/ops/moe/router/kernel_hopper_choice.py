# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Second kernel of the Hopper router, in Gluon: experts of rows that the first, `router_kernel`, has only multiplied.

    router_kernel:  for each tile:  sums -> workspace; count an arrival in the counter of the tile's rows
    choice_kernel:  for some rows:  wait for the counter; route_rows(sums, of several sets if their tile is cut along K)

It is launched when all CTAs of the first have started. These leave room for it, so that it chooses the experts of
earlier rounds while the last round multiplies.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.moe.router.choose_experts import route_tile
from envoi.ops.moe.router.device_types import Args, Outputs, Scalars, Tables
from envoi.ops.moe.router.kernel_hopper import Counts, finish_counts
from envoi.ops.moe.router.kernel_hopper_logits import biases_of, positions_of, row_layout
from envoi.runtime.sync import let_next_start, wait_for_grid


@gluon.jit
def load_sums(sums, rows, num_tokens, sets, stride, tiling: gl.constexpr, layout: gl.constexpr):
    """Load the sums of rows [R, columns], the sets added in their order; 0 where there is no expert or no row.

    stride: rows from a set to the next.
    """
    columns = gl.arange(0, tiling.columns, gl.SliceLayout(0, layout))
    at = sums + rows.to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    mask = (rows < num_tokens)[:, None] & (columns < tiling.num_experts)[None, :]
    total = gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    if tiling.adds_sets:
        for _ in range(1, sets):
            at += stride.to(gl.int64) * tiling.columns
            total += gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def wait_for_rows(counter, parts):
    """Wait until all parts of a tile are stored."""
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < parts:
        pass


@gluon.jit
def reset_counter(counter, num_waiting):
    """Count that this CTA has waited; the last of num_waiting resets the counter for the next launch."""
    if gl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu") == num_waiting - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit(do_not_specialize=["rest_row", "rest_parts", "rest_sets"])
def choice_kernel(
    sums, counters, num_tokens, tile, parts, rest_row, rest_parts, rest_sets, alpha, routed_scale, k, logit_bias,
    expert_bias, token_ids, hash_table, vocabulary, weights, ids, logits, dense, histogram, counts, offsets, counter,
    tiling: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Choose the experts of rows whose sums the launch before stores; the last CTA of all stores the counts.

    It is launched when that launch has started, and begins with the rows that are stored.
    tile, parts: rows of a tile, and its CTAs. rest_*: from this row on there are so many CTAs for each of these, and
    sets of sums.
    """
    tables = Tables(logit_bias, expert_bias, token_ids, hash_table, vocabulary)
    routing = Args(Scalars(alpha, routed_scale, k), tables, Outputs(weights, ids, logits, dense, histogram))
    layout: gl.constexpr = row_layout(tiling, tiling.lanes)
    positions = positions_of(tiling.lanes, tiling, spec)
    biases = biases_of(tables, tiling.lanes, tiling, spec)
    row = gl.program_id(0) * tiling.rows_per_pass
    rows = row + gl.arange(0, tiling.rows_per_pass, gl.SliceLayout(1, layout))
    let_next_start()
    block = row // tile
    is_rest = row >= rest_row
    wait_for_rows(counters + 2 * block, gl.where(is_rest, parts * rest_parts, parts))
    sets = gl.where(is_rest, rest_sets, 1)
    products = load_sums(sums, rows, num_tokens, sets, num_tokens - rest_row, tiling, layout)
    reset_counter(counters + 2 * block, gl.cdiv(gl.minimum(tile, num_tokens - block * tile), tiling.rows_per_pass))
    route_tile(products, rows, rows < num_tokens, positions, biases, routing, spec)
    finish_counts(histogram, Counts(counts, offsets, counter), spec)
    if gl.program_id(0) == gl.num_programs(0) - 1:
        wait_for_grid()  # so that this launch doesn't end before the one that it reads from
