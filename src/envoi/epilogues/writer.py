"""Writer of a lowered epilogue's source text; `lower.py` documents the functions it writes."""

from envoi.epilogues.ir import IR, Node, Operand, Shape
from envoi.epilogues.outputs import MAX_DESCS, PARTIAL, OutputSpec
from envoi.epilogues.text import call, converted, fold, number, scale_factors
from envoi.quant.formats import SCHEMES

IN_FLIGHT = 32  # partial values that are loaded before the first is used
TAKES = {"even": "even", "odd": "odd", "left": "even", "right": "odd"}  # a tile has the columns of both halves in turn
PRODUCTS = ("mul", "div", "neg", "pow", "silu", "gelu")  # operations whose last instruction may be a multiplication
# A constant beyond this, or its inverse, is divided by: its reciprocal might not be a normal number.
LEAST_DIVISOR = 2.0**-100


class Writer:
    """Writer of one epilogue's functions."""

    def __init__(
        self, ir: IR, specs: tuple[OutputSpec, ...], deferred: frozenset[int], tma: bool, pointers: frozenset[str],
        tma_operands: tuple[str, ...], scattered: bool = False, paired: bool = False, in_gluon: bool = True,
    ):  # fmt: skip
        self.ir, self.specs, self.deferred, self.tma, self.pointers = ir, specs, deferred, tma, pointers
        self.tma_operands, self.scattered, self.paired = tma_operands, scattered, paired
        reductions = [p for p in sorted(deferred) if ir.nodes[p].op in PARTIAL]
        self.partials = [p for p in reductions if ir.nodes[p].args[0] not in deferred]
        maxima = all(ir.nodes[p].op != "row_sum" for p in self.partials)
        # All threads of a role share their loads, since the order of maxima doesn't matter.
        self.maxima_together = in_gluon and bool(self.partials) and maxima
        self.tma_outputs = [i for i, spec in enumerate(specs) if spec.kind == "tile"][:MAX_DESCS] if tma else []
        self.columns_ahead = [operand for operand in ir.operands if _is_column(operand)] if in_gluon else []
        self.lines: list[str] = []

    def write(self) -> str:
        """Return the whole text."""
        self._visit()
        self._merge()
        self._save()
        self._finish()
        self._buffers()
        self._operand_buffers()
        self._of_expert()
        self._columns()
        return "\n".join(self.lines) + "\n"

    def line(self, text: str, depth: int = 1) -> None:
        """Add a line."""
        self.lines.append("    " * depth + text)

    # visit: a chunk of the accumulator

    def _visit(self) -> None:
        self.line("def visit(x1, at, operands, outputs, buffers, GROUPED: L.constexpr, cfg: L.constexpr):", 0)
        divisor = 2
        while divisor <= self.ir.divisor:
            self.line(f"x{divisor} = even(x{divisor // 2})")
            divisor *= 2
        for position, node in enumerate(self.ir.nodes):
            if position not in self.deferred and not node.final:
                self._assign(position, node)
        for index, position in enumerate(self.partials):
            self.line(f"p{index} = {self._reduction(self.ir.nodes[position])}")
        self._outputs()
        self.line(f"return ({', '.join(f'p{i}' for i in range(len(self.partials))) or '0'},)")

    def _assign(self, position: int, node: Node) -> None:
        if node.op in ("topk_values", "topk_ids"):
            self._topk(position, node)
        elif node.shape.columns.startswith("k"):
            self._on_topk(position, node)
        else:
            self.line(f"v{position} = {self._expression(node)}")

    def _expression(self, node: Node) -> str:
        if node.op == "acc":
            return "x1"
        if node.op == "constant":
            return number(node.attribute("value"))
        if node.op == "load":
            return self._load(node)
        if node.op in TAKES:
            return self._pair(node)
        if node.op in PARTIAL:
            return f"rows_like({self._reduction(node)}, x1)"
        if node.op == "softmax":
            return self._softmax(node)
        if node.op == "round_mxfp8":
            return f"round_mxfp8(v{node.args[0]})"  # of columns from N on there are whole groups
        args = [self._arg(arg, node.shape, self._is_apart(arg, node)) for arg in node.args]
        divisor = self.ir.nodes[node.args[1]] if node.op == "div" else node
        if divisor.op == "constant" and LEAST_DIVISOR < abs(divisor.attribute("value")) < 1 / LEAST_DIVISOR:
            return f"{args[0]} * {number(1 / divisor.attribute('value'))}"
        return call(node, args)

    def _is_apart(self, position: int, node: Node) -> bool:
        """Return True for a product that the compiler mustn't fuse into the sum `node`, in which it is broadcast.

        Of two products it fuses the one with fewer uses: as many as a thread has rows, or columns, which depends on the
        tiles, and so would the bits. Now it is always the other product.
        """
        products = node.op in ("add", "sub") and all(self.ir.nodes[arg].op in PRODUCTS for arg in node.args)
        shape = self.ir.nodes[position].shape
        return products and shape != node.shape and (shape.rows == "M" or shape.spans_columns)

    def _arg(self, position: int, shape: Shape, is_apart: bool) -> str:
        """Return the text of an earlier value, broadcast for an operation whose result has this shape."""
        node, name = self.ir.nodes[position], f"apart(v{position})" if is_apart else f"v{position}"
        if not (shape.rows == "M" and shape.spans_columns) or node.shape == shape:
            return name
        if node.shape.spans_columns:
            return f"{name}[None, :]"
        if node.shape.rows == "1":
            return name
        return f"rows_like({name}, x{shape.divisor})[:, None]"

    def _load(self, node: Node) -> str:
        operand = self.ir.operand(node.attribute("name"))
        pointer = f"operands[{self.ir.operands.index(operand)}]"
        if operand.kind == "Scalar":
            return f"load_one({pointer})" if operand.name in self.pointers else pointer
        if operand.kind == "Row":
            return f"load_at({pointer}, row_ids(x1, at.m), at.m_end)"
        d = operand.shape.divisor
        if operand.shape.rows == "1":
            in_turn = d == 1 and self.ir.takes_halves
            ids = "halves_in_turn(col_ids(x1, 0), at.n, at.N)" if in_turn else f"col_ids(x{d}, at.n // {d})"
            if operand not in self.columns_ahead:
                return f"load_at({pointer}, {ids}, at.N // {d})"
            index = self.columns_ahead.index(operand)
            return f"take_column({pointer}, buffers, x{d}, {ids}, at.N // {d}, {index}, cfg)"
        if operand.name in self.tma_operands:
            index = self.tma_operands.index(operand.name)
            source = f"buffers.descs[{MAX_DESCS + index}]"
            return f"take_tile(buffers.operands, {source}, x{d}, at.m, at.n // {d}, {index}, buffers.turn, cfg)"
        return f"load_tile({pointer}, x{d}, at.m, at.n // {d}, at.m_end, at.N // {d})"

    def _pair(self, node: Node) -> str:
        source = self.ir.nodes[node.args[0]]
        if source.shape.rows == "M":
            return f"{TAKES[node.op]}(v{node.args[0]})"
        return f"{TAKES[node.op]}_of_column(v{node.args[0]}, x{node.shape.divisor})"

    def _masked(self, node: Node, fill: str) -> str:
        """Return the text of the tile to reduce, with columns from N on replaced by `fill`."""
        d = self.ir.nodes[node.args[0]].shape.divisor
        value = f"v{node.args[0]}"
        if node.op == "row_absmax":
            value = f"L.abs({value})"
        return f"L.where((col_ids(x{d}, at.n // {d}) < at.N // {d})[None, :], {value}, {fill})"

    def _reduction(self, node: Node) -> str:
        if not self.ir.nodes[node.args[0]].shape.spans_columns:
            return self._over_topk(node)
        if node.op == "row_sum":
            return f"sum_columns({self._masked(node, '0.0')})"
        return f"max_columns({self._masked(node, _FILL[node.op])})"

    def _softmax(self, node: Node) -> str:
        masked = self._masked(node, _FILL["row_max"])
        name = f"s{len(self.lines)}"
        self.line(f"{name} = {masked}")
        self.line(f"{name}_top = max_columns({name})")
        self.line(f"{name}_top = L.where({name}_top == {_FILL['row_max']}, 0.0, {name}_top)")
        self.line(f"{name} = L.exp({name} - {name}_top[:, None])")
        self.line(f"{name}_all = sum_columns({name})")
        return f"{name} / L.where({name}_all == 0.0, 1.0, {name}_all)[:, None]"

    # top-k: k row vectors a value

    def _topk(self, position: int, node: Node) -> None:
        self._keys(node)
        k = node.attribute("k")
        take = f"rows_like(key_value(b{node.args[0]}_{{i}}), x1)"
        if node.op == "topk_ids":
            take = f"rows_like(key_column(b{node.args[0]}_{{i}}), x1)"
        names = [f"v{position}_{i}" for i in range(k)]
        for i, name in enumerate(names):
            self.line(f"{name} = {take.format(i=i)}")

    def _keys(self, node: Node) -> None:
        """Write the selection of keys: in each of k rounds take and remove each row's best. Shared by values, ids and
        smaller k."""
        source, k = node.args[0], node.attribute("k")
        marker = f"b{source}_{k - 1} = "
        if any(line.strip().startswith(marker) for line in self.lines):
            return
        d = self.ir.nodes[source].shape.divisor
        self.line(f"k{source} = sort_key({self._masked(node, _FILL['row_max'])}, col_ids(x{d}, at.n // {d}))")
        for i in range(k):
            self.line(f"b{source}_{i} = best_key(k{source})")
            self.line(f"k{source} = without(k{source}, b{source}_{i})")

    def _on_topk(self, position: int, node: Node) -> None:
        """Write an operation on each of the k vectors."""
        k = int(node.shape.columns[1:])
        if node.op == "softmax":
            source = node.args[0]
            name = f"v{position}"
            self.line(f"{name}_top = {fold('maximum', [f'v{source}_{i}' for i in range(k)])}")
            self.line(f"{name}_top = L.where({name}_top == {_FILL['row_max']}, 0.0, {name}_top)")
            for i in range(k):
                self.line(f"{name}_{i} = L.exp(v{source}_{i} - {name}_top)")
            self.line(f"{name}_all = {' + '.join(f'{name}_{i}' for i in range(k))}")
            self.line(f"{name}_all = L.where({name}_all == 0.0, 1.0, {name}_all)")
            for i in range(k):
                self.line(f"{name}_{i} = {name}_{i} / {name}_all")
            return
        for i in range(k):
            args = [
                f"v{arg}_{i}" if self.ir.nodes[arg].shape.columns.startswith("k") else f"v{arg}" for arg in node.args
            ]
            self.line(f"v{position}_{i} = {call(node, args)}")

    def _over_topk(self, node: Node) -> str:
        k = int(self.ir.nodes[node.args[0]].shape.columns[1:])
        names = [f"v{node.args[0]}_{i}" for i in range(k)]
        if node.op == "row_sum":
            return " + ".join(names)
        return fold("maximum", [f"L.abs({name})" for name in names] if node.op == "row_absmax" else names)

    # outputs

    def _outputs(self) -> None:
        tiles: list[int] = []
        for index, spec in enumerate(self.specs):
            if spec.position in self.deferred and self.ir.nodes[spec.position].op != "quantize":
                continue
            if spec.kind == "tile":
                self._tile_value(index, spec)
                tiles.append(index)
            elif spec.kind == "sf":
                continue
            else:
                self._store_small(index, spec)
        if self.tma_outputs:
            self._put(self.tma_outputs)
        for index in tiles:
            if index not in self.tma_outputs and not self.paired:
                self._store_tile(index)

    def _tile_value(self, index: int, spec: OutputSpec) -> None:
        node = self.ir.nodes[spec.position]
        if node.op == "quantize":
            self._quantize(index, spec, node)
            return
        source = node.args[0] if node.op == "cast" else spec.position
        self.line(f"o{index} = {converted(f'v{source}', spec.dtype)}")

    def _quantize(self, index: int, spec: OutputSpec, node: Node) -> None:
        scheme, source, d = SCHEMES[node.attribute("scheme")], f"v{node.args[0]}", node.shape.divisor
        if self.paired:
            where = f"at.m, at.n // {d}, at.m_end, at.N // {d}"
            self.line(f"quantize_pair({source}, buffers.stages[0], outputs[{index}], outputs[{index + 1}], {where})")
            return
        group = scheme.group[1]
        magnitude = f"L.where((col_ids(x{d}, at.n // {d}) < at.N // {d})[None, :], L.abs({source}), 0.0)"
        if self.scattered:  # groups divide N
            magnitude = f"L.abs({source})"
        if group:
            self.line(f"a{index} = group_amax(group_max({magnitude}, {group}))")
        else:
            self.line(f"a{index} = group_amax(max_columns({magnitude}))")
        self.line(f"sf{index}, f{index} = {scale_factors(f'a{index}', scheme)}")
        if group:
            self.line(f"q{index} = times_group({source}, f{index}, {group})")
            column, width = f"at.n // {d * group}", f"at.N // {d * group}"
            if self.scattered:
                where = f"at.m, {column}, at.m_end, at.N // {d}"
                self.line(f"scatter_factors(outputs[{index}], sf{index}, {where}, x{d}.shape[1])")
            else:
                self.line(f"store_tile(outputs[{index + 1}], sf{index}, at.m, {column}, at.m_end, {width}, cfg)")
        else:
            self.line(f"q{index} = {source} * f{index}[:, None]")
            self.line(f"store_row(outputs[{index + 1}], sf{index}, at.m, at.m_end, 1, 0)")
        to_e4m3 = "e4m3_of_group" if self.scattered else "e4m3"
        self.line(f"o{index} = " + (f"pack_pairs(e2m1(q{index}))" if spec.packed else f"{to_e4m3}(q{index})"))

    def _put(self, tiles: list[int]) -> None:
        values = ", ".join(f"o{i}" for i in tiles)
        coords = ", ".join(f"at.n // {self._width(i)}" for i in tiles)
        put = f"put_tiles(({values},), buffers.descs, buffers.stages, ({coords},), at.m, buffers.turn, cfg)"
        self.line("if GROUPED:")
        self.line("if at.m + x1.shape[0] <= at.m_end:", 2)
        self.line(put, 3)
        self.line("else:", 2)
        for index in tiles:
            self._store_tile(index, 3)
        self.line("else:")
        self.line(put, 2)

    def _width(self, index: int) -> int:
        return self.specs[index].columns * (2 if self.specs[index].packed else 1)

    def _store_tile(self, index: int, depth: int = 1) -> None:
        d = self._width(index)
        where = f"outputs[{index}], o{index}, at.m, at.n // {d}, at.m_end, at.N // {d}"
        self.line(f"{'scatter' if self.scattered else 'store'}_tile({where}, cfg)", depth)

    def _store_small(self, index: int, spec: OutputSpec) -> None:
        """Write the store of a value without N columns, which one tile of the row, or of the column, performs."""
        node = self.ir.nodes[spec.position]
        source = node.args[0] if node.op == "cast" else spec.position
        if spec.kind == "topk":
            for i in range(spec.columns):
                value = converted(f"v{source}_{i}", spec.dtype)
                self.line(f"store_row(outputs[{index}], {value}, at.m, at.m_end, {spec.columns}, {i})")
        elif spec.kind == "row":
            self.line("if at.n == 0:")
            self.line(f"store_row(outputs[{index}], {converted(f'v{source}', spec.dtype)}, at.m, at.m_end, 1, 0)", 2)
        elif spec.kind == "column":
            d = spec.columns
            self.line("if at.m == 0:")
            value, ids = converted(f"v{source}", spec.dtype), f"col_ids(x{d}, at.n // {d})"
            self.line(f"store_column(outputs[{index}], {value}, {ids}, at.N // {d})", 2)
        else:
            self.line("if (at.m == 0) & (at.n == 0):")
            self.line(f"L.store(outputs[{index}], {converted(f'v{source}', spec.dtype)})", 2)

    # reductions over the tiles of a row

    def _merge(self) -> None:
        self.line("")
        self.line("def merge(a, b):", 0)
        pairs = [self._merged(p, f"a[{i}]", f"b[{i}]") for i, p in enumerate(self.partials)]
        self.line(f"return ({', '.join(pairs) or '0'},)")

    def _merged(self, position: int, a: str, b: str) -> str:
        return f"{a} + {b}" if self.ir.nodes[position].op == "row_sum" else f"maximum({a}, {b})"

    def _save(self) -> None:
        self.line("")
        self.line("def save(parts, workspace, slot, num_slots, m, m_end, M):", 0)
        for i in range(len(self.partials)):
            if self.maxima_together:  # [M, num_slots], else [num_slots, M]
                self.line(f"store_row({self._part(i)}, parts[{i}], m, m_end, num_slots, slot)")
            else:
                self.line(f"base = workspace + ({i} * num_slots + slot).to(L.int64) * M")
                self.line(f"store_row(base, parts[{i}], m, m_end, 1, 0)")
        self.line("return")

    def _finish(self) -> None:
        self.line("")
        self.line("def finish(like, workspace, num_slots, m, m_end, M, operands, outputs):", 0)
        if not self.partials:
            self.line("return")
            return
        self.line("ids = ids_like(like, m)")
        if self.maxima_together:
            for i, position in enumerate(self.partials):
                fill = _FILL[self.ir.nodes[position].op]
                self.line(f"p{i} = max_of_slots({self._part(i)}, like, num_slots, m, m_end, {fill})")
        else:
            self._add_slots()
        self._finish_rows()

    def _part(self, index: int) -> str:
        """Return the text of the pointer to a reduction's partial values."""
        return f"workspace + ({index} * num_slots).to(L.int64) * M" if index else "workspace"

    def _add_slots(self) -> None:
        """Write the loop over the partial values of rows, in order: a thread has all of its rows'."""
        for i, position in enumerate(self.partials):
            self.line(f"p{i} = ids.to(L.float32) * 0.0 + {_FILL[self.ir.nodes[position].op]}")
        self.line(f"for slot in range(0, num_slots, {IN_FLIGHT}):")
        for j in range(IN_FLIGHT):
            for i, position in enumerate(self.partials):
                fill = _FILL[self.ir.nodes[position].op]
                at = f"workspace + ({i} * num_slots + slot + {j}).to(L.int64) * M + ids"
                self.line(f"t{i}_{j} = L.load({at}, mask=(ids < m_end) & (slot + {j} < num_slots), other={fill})", 2)
        for j in range(IN_FLIGHT):
            for i, position in enumerate(self.partials):
                self.line(f"p{i} = {self._merged(position, f'p{i}', f't{i}_{j}')}", 2)

    def _finish_rows(self) -> None:
        """Write the part of `finish` that depends on the complete reductions."""
        needed = self._needed_deferred()
        for position, node in enumerate(self.ir.nodes):
            if position not in needed or node.final:
                continue
            if position in self.partials:
                self.line(f"v{position} = p{self.partials.index(position)}")
            elif node.op == "load" and self.ir.operand(node.attribute("name")).kind == "Row":
                index = self.ir.operands.index(self.ir.operand(node.attribute("name")))
                self.line(f"v{position} = load_at(operands[{index}], ids, m_end)")
            else:
                self.line(f"v{position} = {self._expression(node)}")
        for index, spec in enumerate(self.specs):
            if spec.position in self.deferred:
                node = self.ir.nodes[spec.position]
                source = node.args[0] if node.op == "cast" else spec.position
                self.line(f"store_row(outputs[{index}], {converted(f'v{source}', spec.dtype)}, m, m_end, 1, 0)")

    def _buffers(self) -> None:
        self.line("")
        self.line("def buffers(descs, cfg: L.constexpr):", 0)
        stages = [f"stage_for(descs[{i}], cfg.num_store_buffers, cfg)" for i in range(len(self.tma_outputs))]
        if self.paired:
            stages = [f"stage_for_pairs(cfg.rows_per_consumer, cfg.block_y // {self.specs[0].columns})"]
        self.line(f"return ({', '.join(stages) or '0'},)")

    def _operand_buffers(self) -> None:
        """Write the buffers of the tile operands loaded by TMA, and the loads of their first chunks."""
        count = len(self.tma_operands)
        descs = [f"descs[{MAX_DESCS + i}]" for i in range(count)]
        self.line("")
        self.line("def operand_buffers(descs, cfg: L.constexpr):", 0)
        self.line(f"return operand_buffers_for(({', '.join(descs) or '0'},), cfg)" if count else "return (0,), 0")
        self.line("")
        self.line("def fetch_operands(descs, buffers, arrived, m, n, cfg: L.constexpr):", 0)
        for i, name in enumerate(self.tma_operands):
            d = self.ir.operand(name).shape.divisor
            self.line(f"fetch({descs[i]}, buffers[{i}], arrived.index({i}), m, n // {d}, 0, cfg)")
        self.line("return")

    def _of_expert(self) -> None:
        """Write `of_expert`: in a grouped GEMM a column operand has a row for each expert."""
        self.line("")
        self.line("def of_expert(operands, e, N):", 0)
        own = [
            f"operands[{i}] + L.cast(e, L.int64) * (N // {operand.shape.divisor})"
            if _is_column(operand)
            else f"operands[{i}]"
            for i, operand in enumerate(self.ir.operands)
        ]
        self.line(f"return ({', '.join(own) or '0'},)")

    def _columns(self) -> None:
        """Write what loads a tile's values of column operands ahead of the mainloop, and what keeps them."""
        found = [(self.ir.operands.index(o), o.shape.divisor) for o in self.columns_ahead]
        values = [f"load_column(operands[{i}], {self._column_ids(d)}, N // {d})" for i, d in found]
        self.line("")
        self.line("def load_columns(operands, n, N, cfg: L.constexpr):", 0)
        self.line(f"return ({', '.join(values) or '0'},)")
        self.line("")
        self.line("def column_buffers(cfg: L.constexpr):", 0)
        self.line(f"return ({', '.join(f'column_buffer(cfg.block_y // {d})' for _, d in found) or '0'},)")
        self.line("")
        self.line("def keep_columns(columns, buffers):", 0)
        for i in range(len(found)):
            self.line(f"keep_column(columns[{i}], buffers[{i}])")
        self.line("return")

    def _column_ids(self, divisor: int) -> str:
        if divisor == 1 and self.ir.takes_halves:
            return "halves_in_turn(spread_ids(0, cfg.block_y), n, N)"
        return f"spread_ids(n // {divisor}, cfg.block_y // {divisor})"

    def _needed_deferred(self) -> set[int]:
        needed = {spec.position for spec in self.specs if spec.position in self.deferred}
        for position in sorted(range(len(self.ir.nodes)), reverse=True):
            if position in needed and position not in self.partials:
                needed.update(self.ir.nodes[position].args)
        return needed


def _is_column(operand: Operand) -> bool:
    return operand.shape.rows == "1" and operand.shape.spans_columns


_FILL = {"row_sum": "0.0", "row_max": 'float("-inf")', "row_absmax": "0.0"}
