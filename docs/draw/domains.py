"""The pictures of docs/domains.md: ``python -m docs.draw.domains`` writes docs/images/domain-*.svg; a test compares."""

from collections.abc import Callable, Sequence

from docs.draw.pictures import IMAGES
from docs.draw.svg import COL, FOLD, INK, PALE, ROW, Drawing

SEEN, CUT, NONE = "#8ce99a", "#d3f9d8", "#f8f9fa"


def _grid(d: Drawing, x: float, y: float, cell: float, rows: int, cols: int, seen: Callable[[int, int], str]) -> None:
    for i in range(rows):
        for j in range(cols):
            d.box(x + j * cell, y + i * cell, cell, cell, seen(i, j), PALE, stroke_width=0.8)


def _axes(d: Drawing, x: float, y: float, width: float, height: float, rows: str, cols: str) -> None:
    d.text(x + width / 2, y - 12, cols, 14, COL)
    d.text(x - 12, y + height / 2 + 5, rows, 14, ROW, "end")


def _list(d: Drawing, x: float, y: float, name: str, items: Sequence[object], fill: str, stroke: str) -> None:
    """A tensor as a row of numbers behind its name."""
    d.text(x - 10, y + 17, name, 14, INK, "end")
    for k, item in enumerate(items):
        d.box(x + 30 * k, y, 30, 24, fill, stroke)
        d.text(x + 30 * k + 15, y + 17, str(item), 13, stroke)


def blocks() -> Drawing:
    """Four blocks of rows, each with its own list of column blocks."""
    d = Drawing(760, 300, "mr.blocks: each block of rows folds the column blocks of its list")
    lists, side, cell = ((0,), (0, 1), (1, 2, 4), (0, 3)), 4, 11
    left, top = 90, 50
    for b, found in enumerate(lists):
        for c in range(6):
            x, y = left + c * side * cell, top + b * side * cell
            d.box(x, y, side * cell, side * cell, SEEN if c in found else NONE, PALE)
            d.text(x + side * cell / 2, y + side * cell / 2 + 5, str(c) if c in found else "", 13, FOLD)
    _axes(d, left, top, 6 * side * cell, 4 * side * cell, "rows", "columns")
    d.text(560, top - 12, "index", 14, COL)
    d.text(690, top - 12, "count", 14, INK)
    for b, found in enumerate(lists):
        y = top + b * side * cell + 10
        for k in range(3):
            d.box(500 + 40 * k, y, 40, 24, "#ffe8cc" if k < len(found) else "none", COL if k < len(found) else PALE)
            d.text(520 + 40 * k, y + 17, str(found[k]) if k < len(found) else "·", 13, COL if k < len(found) else PALE)
        d.box(672, y, 36, 24, "none", PALE)
        d.text(690, y + 17, str(len(found)), 13, INK)
        d.arrow(490, y + 12, left + 6 * side * cell + 12, y + 12, COL)
    d.text(380, 272, "what no list names is neither loaded nor computed", 14, INK)
    return d


def pages() -> Drawing:
    """Two sequences whose columns lie in pages of a common store."""
    d = Drawing(760, 300, "mr.pages: a sequence's columns lie in the pages that its table names")
    tables, lengths, page = ((4, 1), (2, 5, 0)), (7, 10), 4
    fills, strokes = ("#c5f6fa", "#ffe8cc"), (ROW, COL)
    for s, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        y = 46 + 70 * s
        d.text(118, y + 21, f"sequence {s}", 14, strokes[s], "end")
        for k, number in enumerate(table):
            for t in range(page):
                on = k * page + t < length
                x = 130 + (k * page + t) * 26 + 10 * k
                d.box(x, y, 26, 30, fills[s] if on else "none", strokes[s] if on else PALE)
                d.text(x + 13, y + 20, str(k * page + t) if on else "", 12, strokes[s])
            d.text(130 + k * (page * 26 + 10) + 52, y + 48, f"page {number}", 13, INK)
        d.text(540, y + 21, f"table {list(table)}, length {length}", 14, INK, "start")
    d.text(118, 233, "store", 14, INK, "end")
    for number in range(6):
        for t in range(page):
            x = 130 + (number * page + t) * 22 + 8 * number
            found = [(s, table.index(number) * page + t) for s, table in enumerate(tables) if number in table]
            on = bool(found) and found[0][1] < lengths[found[0][0]]
            d.box(x, 214, 22, 28, fills[found[0][0]] if on else "none", strokes[found[0][0]] if on else PALE)
            d.text(x + 11, 233, str(found[0][1]) if on else "", 11, strokes[found[0][0]] if on else PALE)
        d.text(130 + number * (page * 22 + 8) + 44, 262, str(number), 13, INK)
    d.text(380, 288, "column tensors are the store: [pages, page, heads, features]", 14, INK)
    return d


def jagged() -> Drawing:
    """Three packed sequences, of which each folds its own columns."""
    d = Drawing(760, 320, "mr.jagged: a sequence's rows fold its own stretch of the columns")
    rows, cols, cell = (0, 4, 6, 12), (0, 5, 8, 14), 17
    left, top = 100, 46

    def seen(i: int, j: int) -> str:
        mine = [s for s in range(3) if rows[s] <= i < rows[s + 1] and cols[s] <= j < cols[s + 1]]
        return NONE if not mine else SEEN if j - cols[mine[0]] <= i - rows[mine[0]] else CUT

    _grid(d, left, top, cell, rows[-1], cols[-1], seen)
    _axes(d, left, top, cols[-1] * cell, rows[-1] * cell, "rows", "columns")
    for s in range(3):
        d.box(
            left + cols[s] * cell, top + rows[s] * cell, (cols[s + 1] - cols[s]) * cell, (rows[s + 1] - rows[s]) * cell,
            "none", FOLD, stroke_width=2.5,
        )  # fmt: skip
    _list(d, 550, 80, "row_offsets", rows, "#c5f6fa", ROW)
    _list(d, 550, 122, "col_offsets", cols, "#ffe8cc", COL)
    for k, (fill, words) in enumerate(((SEEN, "also under a causal condition"), (CUT, "pairs of the sequence"))):
        d.box(470, 186 + 28 * k, 16, 16, fill, PALE)
        d.text(496, 199 + 28 * k, words, 14, INK, "start")
    d.text(380, 298, "no padding: indices count from the start of the own sequence", 14, INK)
    return d


def edges() -> Drawing:
    """Each row with its own list of columns: the rows of a sparse matrix, the neighbours of a node."""
    d = Drawing(760, 300, "mr.edges: each row folds the columns of its own list")
    rowptr, index, cell = (0, 2, 2, 5, 6, 9), (1, 6, 0, 3, 4, 6, 2, 3, 7), 32
    left, top = 90, 50
    mine = [index[rowptr[i] : rowptr[i + 1]] for i in range(5)]
    _grid(d, left, top, cell, 5, 8, lambda i, j: SEEN if j in mine[i] else NONE)
    _axes(d, left, top, 8 * cell, 5 * cell, "rows", "columns")
    _list(d, 480, 56, "rowptr", rowptr, "#c5f6fa", ROW)
    _list(d, 480, 132, "index", index, "#ffe8cc", COL)
    for i in range(5):
        middle = 480 + 15 * (rowptr[i] + rowptr[i + 1])
        if mine[i]:
            d.line(480 + 30 * i + 15, 80, middle, 118, ROW)
            d.line(480 + 30 * rowptr[i] + 3, 124, 480 + 30 * rowptr[i + 1] - 3, 124, ROW)
    d.text(480, 200, "row 1 has no list: its fold is empty", 14, INK, "start")
    d.text(380, 270, "gradients of the columns fold the same edges the other way", 14, INK)
    return d


PICTURES: dict[str, Callable[[], Drawing]] = {"blocks": blocks, "pages": pages, "jagged": jagged, "edges": edges}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"domain-{name}.svg").write_text(str(draw()), encoding="utf-8")
