"""Named arguments of the router's device code, shared by the Triton and the Gluon kernel."""

from typing import Any, NamedTuple


class Scalars(NamedTuple):
    """Scalars of a launch: alpha, routed_scale float32, and k.

    k equals `spec.k`, but as a constant it would unroll loops, and code that runs once is as fast as it is fetched.
    """

    alpha: Any
    routed_scale: Any
    k: Any


class Tables(NamedTuple):
    """Inputs besides tokens and gate, each a pointer or None.

    logit_bias, expert_bias [N]. token_ids [M] and hash_table [vocabulary, k]: experts by token id instead of by score.
    """

    logit_bias: Any
    expert_bias: Any
    token_ids: Any
    hash_table: Any
    vocabulary: Any


class Outputs(NamedTuple):
    """Outputs of the rows, pointers: weights, ids [M, k]; logits, dense [M, N] or None; histogram [N] or None."""

    weights: Any
    ids: Any
    logits: Any
    dense: Any
    histogram: Any


class Args(NamedTuple):
    """Arguments of the functions that route rows."""

    scalars: Any
    tables: Any
    outputs: Any


class Biases(NamedTuple):
    """Biases of a tile's columns [1, C] float32: added to logits, added to selection keys; 0.0 for none."""

    logit: Any
    key: Any


class Positions(NamedTuple):
    """Indices 0, 1, 2, .. of columns [1, C], slots [1, slots] and groups [1, groups] of a tile.

    Columns and groups have the layout of the logits, slots any layout that keeps a row in one warp: sums over slots
    then have one order."""

    columns: Any
    slots: Any
    groups: Any


class Softmax(NamedTuple):
    """Terms of a softmax over all experts, per row: the largest logit and the sum of e^(logit - largest)."""

    largest: Any
    total: Any


class Chosen(NamedTuple):
    """Chosen experts of a tile: ids [R, slots], best first, -1 = none; slots: 0, 1, 2, .. in the layout of ids."""

    ids: Any
    slots: Any


class Places(NamedTuple):
    """Best experts of rows so far: tuples of a vector [R] for each of k places, best first. Empty ones: id -1.

    keys: what experts are ranked by. logits: theirs.
    """

    keys: Any
    ids: Any
    logits: Any
