"""Boxes of the Hopper GEMM, their own methods run over simulated buffers: what a stage loads of y and x, and where."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from envoi.ops.gemm.hopper import pipeline, y_boxes
from envoi.ops.gemm.hopper.config import NARROWED, SHORT_BYTES, SHORT_ROWS, TWO_WIDTHS, Config
from envoi.ops.gemm.hopper.pipeline import Pipeline

STAGE, FIRST_ROW, EXPERT, K = 1, 1000, 3, 128
ELEMENT_BYTES = 2
Rows = tuple[str, int, int]  # buffer, its first row, number of rows


class Buffer:
    """Buffer [count, rows, block_k] of shared memory; its parts are `Rows`."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows

    def index(self, i: int) -> "Part":
        return Part((self.name, i * self.rows, self.rows))


class Part:
    """Rows of a buffer."""

    dtype = layout = None

    def __init__(self, rows: Rows) -> None:
        self.rows, self.shape = rows, (rows[2], 64)

    def slice(self, first: int, count: int) -> "Part":
        assert first + count <= self.rows[2]
        return Part((self.rows[0], self.rows[1] + first, count))

    def permute(self, order: tuple[int, int]) -> "Part":
        assert order == (1, 0)
        return self


def reinterpret(part: Part, dtype: None, shape: list[int], layout: None) -> Part:
    return Part((part.rows[0], part.rows[1], shape[0]))


def as_python(function: Any) -> Any:
    """Return a device function as the Python function that it was written as."""
    return getattr(function, "fn", function)


def with_methods(kind: Any, **fields: Any) -> Any:
    """Return an object with the methods of an aggregate."""
    methods = {name: member.fn for name, member in vars(kind).items() if isinstance(member, JITFunction)}
    return type(kind.__name__, (), {**methods, **fields})()


def boxes_of(config: Config, halves: bool = False) -> Any:
    if config.narrowed:
        rows = 8 if config.stage_y == config.block_y else config.tensor_y
        return with_methods(y_boxes.Narrowed, bufs=Buffer("y", rows), cfg=config)
    main = with_methods(y_boxes.OneWidth, bufs=Buffer("y", config.main_y), takes_halves=halves, cfg=config)
    if config.rest_y == 0:
        return main
    return with_methods(y_boxes.TwoWidths, main=main, rest=Buffer("rest", config.rest_y))


def desc(rows: int, config: Config) -> Any:
    return SimpleNamespace(rows=rows, block_type=SimpleNamespace(nbytes=rows * config.block_k * ELEMENT_BYTES))


def loads(config: Config, monkeypatch, is_low: bool = False, halves: bool = False):
    """Return what a stage's fill loads of y, (descriptor's rows, coordinates, Rows), and the bytes that it expects."""
    found, expected = [], []
    for module in (pipeline, y_boxes):
        for name in ("corner", "num_x_boxes", "num_y_boxes", "y_box_index", "as_matrix"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, as_python(getattr(module, name)))
        monkeypatch.setattr(module, "gl", SimpleNamespace(static_range=range))
        monkeypatch.setattr(module, "tma_load", lambda desc, at, full, part: found.append((desc.rows, at, part.rows)))
    monkeypatch.setattr(y_boxes, "reinterpret", reinterpret)
    second = config.small_box if config.narrowed else config.rest_y
    boxes, tile = boxes_of(config, halves), SimpleNamespace(y=FIRST_ROW, expert=EXPERT)
    y_desc = desc(config.main_y, config)
    boxes.load(y_desc, desc(second, config), None, STAGE, tile, K, is_low)
    ring = SimpleNamespace(expect=lambda stage, num_bytes: expected.append(num_bytes))
    with_methods(Pipeline, cfg=config, ring=ring).expect(desc(0, config), y_desc, None, STAGE, tile, is_low)
    return boxes, found, expected[0]


def num_bytes(found: list, config: Config) -> int:
    return sum(rows for _, _, (_, _, rows) in found) * config.block_k * ELEMENT_BYTES


PLAIN = Config(64, 2, 128, 64, 4)


@pytest.mark.parametrize("block_y", [8, 64, 128, 256, *TWO_WIDTHS])
def test_each_row_is_loaded_once_where_its_width_is_read(block_y, monkeypatch):
    config = replace(PLAIN, block_y=block_y)
    boxes, found, expected = loads(config, monkeypatch)
    widths = as_python(y_boxes.accumulator_widths)(config)
    assert sum(widths) == block_y
    first = FIRST_ROW
    for width, (rows, at, place) in enumerate(found):
        assert (rows, at) == (widths[width], [first, K])
        assert place == boxes.operand(STAGE, 0, width).rows
        first += rows
    assert len(found) == len(widths) and expected == num_bytes(found, config)


@pytest.mark.parametrize("block_y", NARROWED)
def test_narrowed_rows_are_loaded_once_each_next_to_one_another(block_y, monkeypatch):
    config = replace(PLAIN, block_y=block_y, swap_ab=True)
    boxes, found, expected = loads(config, monkeypatch)
    name, start, seen = boxes.operand(STAGE, 0, 0).rows
    assert seen == config.tensor_y >= block_y
    row = 0
    for rows, at, place in found:
        assert at == [FIRST_ROW + row, K] and place == (name, start + row, rows)
        row += rows
    assert row == block_y and expected == num_bytes(found, config)


@pytest.mark.parametrize("is_low", [False, True])
def test_a_wide_tail_tile_has_two_boxes_and_another_tile_one(is_low, monkeypatch):
    config = replace(PLAIN, wide_tail_tiles=True)
    boxes, found, expected = loads(config, monkeypatch, is_low)
    assert [at for _, at, _ in found] == [[FIRST_ROW + 128 * i, K] for i in range(1 + is_low)]
    assert [place for _, _, place in found] == [boxes.operand(STAGE, i, 0).rows for i in range(1 + is_low)]
    assert expected == num_bytes(found, config)


@pytest.mark.parametrize("block_y", [128, *TWO_WIDTHS])
def test_halves_are_counted_within_an_expert(block_y, monkeypatch):
    config = replace(PLAIN, block_y=block_y)
    _, found, _ = loads(config, monkeypatch, halves=True)
    rows = [at[1] for _, at, _ in found]
    assert rows == [FIRST_ROW // 2, (FIRST_ROW + config.main_y) // 2][: len(found)]


class Matrices:
    """Shared memory as matrices [rows, columns] of bytes; its parts are (first byte, number of bytes)."""

    def __init__(self, shape: list[int]) -> None:
        _, rows, columns = shape
        self.size = rows * columns

    def index(self, i: int) -> tuple[int, int]:
        return i * self.size, self.size


@pytest.mark.parametrize("rows", [1, SHORT_ROWS, SHORT_ROWS + 1, 64, 200])
@pytest.mark.parametrize("block_k", [128, 256])
def test_a_tile_of_few_rows_loads_them_alone_where_its_box_has_them(rows, block_k, monkeypatch):
    config = Config(64, 2, 128, block_k, 4, pingpong=True, short_boxes=True)
    found, expected = [], []
    monkeypatch.setattr(pipeline, "gl", SimpleNamespace(static_range=range))
    monkeypatch.setattr(pipeline, "reinterpret", lambda bufs, dtype, shape, layout: Matrices(shape))
    for name in ("num_x_boxes", "num_y_boxes", "x_box_index"):
        monkeypatch.setattr(pipeline, name, as_python(getattr(pipeline, name)))

    def load(desc, at, full, part, pred):
        if pred:
            found.append((desc.rows, at, part))

    def box_desc(rows: int, columns: int) -> Any:
        block = SimpleNamespace(shape=[rows, columns], nbytes=rows * columns)
        return SimpleNamespace(rows=rows, block_type=block, dtype=None, layout=None)

    monkeypatch.setattr(pipeline, "tma_load", load)
    ring = SimpleNamespace(
        full=SimpleNamespace(index=lambda stage: stage),
        expect=lambda stage, num_bytes, pred: expected.append(num_bytes) if pred else None,
    )
    bufs = Matrices([config.num_x_boxes, 64, block_k])
    stages = with_methods(Pipeline, cfg=config, ring=ring, x_bufs=bufs, takes_halves=False)
    x, y, short = box_desc(64, block_k), box_desc(128, block_k), box_desc(SHORT_ROWS, SHORT_BYTES)
    tile = SimpleNamespace(x=FIRST_ROW, row_end=FIRST_ROW + rows, expert=EXPERT)
    stages.expect(x, y, short, STAGE, tile, False)
    stages.load_x(x, short, STAGE, tile, K, False)
    first = STAGE * 64 * block_k
    if rows > SHORT_ROWS:
        assert found == [(64, [FIRST_ROW, K], (first, 64 * block_k))]
    else:
        # A box of 64 rows of block_k bytes is block_k / 128 matrices of 64 rows of 128 bytes.
        assert found == [
            (SHORT_ROWS, [FIRST_ROW, K + at], (first + 64 * at, SHORT_ROWS * SHORT_BYTES))
            for at in range(0, block_k, SHORT_BYTES)
        ]
    assert expected == [sum(size for *_, (_, size) in found) + 128 * block_k]
