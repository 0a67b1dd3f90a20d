"""The pictures of docs/idea.md: ``python -m docs.draw.pictures`` writes docs/images/idea-*.svg; a test compares."""

from collections.abc import Callable
from pathlib import Path

from docs.draw.svg import COL, FAINT, FOLD, GRADIENT, INK, PALE, ROW, Drawing

IMAGES = Path(__file__).parents[1] / "images"


def fold() -> Drawing:
    """One row of pairs, folded from left to right; the matrix is only thought of."""
    d = Drawing(760, 330, "Each row of pairs is folded into one value; the matrix is never there")
    left, top, cell, rows, cols = 150, 90, 42, 4, 8
    for i in range(rows):
        for j in range(cols):
            on = i == 1
            d.box(
                left + j * cell, top + i * cell, cell, cell, "#d3f9d8" if on else "none", PALE, stroke_dasharray="3 3"
            )
            if on:
                d.text(left + (j + 0.5) * cell, top + (i + 0.62) * cell, "f", 16, FOLD, font_style="italic")
    for i in range(rows):
        d.box(60, top + i * cell + 6, 60, cell - 12, "#c5f6fa", ROW)
        d.text(90, top + (i + 0.62) * cell, f"row {i}", 13, ROW)
    for j in range(cols):
        d.box(left + j * cell + 6, 30, cell - 12, 44, "#ffe8cc", COL)
        d.text(left + (j + 0.5) * cell, 57, f"{j}", 13, COL)
    d.text(left - 14, 57, "columns", 13, COL, "end")
    right = left + cols * cell
    for i in range(rows):
        y = top + (i + 0.5) * cell
        d.arrow(right + 6, y, right + 58, y, FOLD if i == 1 else PALE)
        d.box(right + 64, y - 15, 92, 30, "#d3f9d8" if i == 1 else FAINT, FOLD if i == 1 else PALE)
        d.text(right + 110, y + 5, f"P{'₀₁₂₃'[i]} = ⊙ f", 14, FOLD if i == 1 else PALE)
    d.text(left + cols * cell / 2, top + rows * cell + 28, "M × N values f(row i, column j): never stored", 14, PALE)
    d.text(380, 312, "kept: the rows, the columns, one running value P per row", 14, INK)
    return d


def grouping() -> Drawing:
    """One by one, as a tree, in any order: the laws of a commutative monoid say that all are the same."""
    d = Drawing(760, 250, "However the values are grouped and ordered, the fold is the same")
    names = "abcdef"
    for column, (title, order) in enumerate(
        (("one after another", "abcdef"), ("as a tree", "abcdef"), ("on two ranks, any order", "dbfaec"))
    ):
        x0 = 30 + column * 250
        d.text(x0 + 105, 30, title, 15)
        for k, name in enumerate(order):
            d.circle(x0 + 17 + 35 * k, 70, 13, "#ffe8cc", COL)
            d.text(x0 + 17 + 35 * k, 75, name, 14, COL)
        assert sorted(order) == sorted(names)
        if column == 0:
            for k in range(1, 6):
                x, y = x0 + 17 + 35 * k, 70 + 24 * k
                d.line(x0 + 17 + 35 * (k - 1), 83 if k == 1 else y - 11, x, y + 8, FOLD)
                d.line(x, 83, x, y - 2, PALE)
                d.text(x, y + 14, "⊙", 18, FOLD)
        else:
            _tree(d, x0, 3 if column == 2 else 2)
    return d


def _tree(d: Drawing, x0: float, group: int) -> None:
    """Six leaves folded in groups, and the groups' values folded."""
    centres = []
    for start in range(0, 6, group):
        middle = x0 + 17 + 35 * (start + (group - 1) / 2)
        for k in range(start, start + group):
            d.line(x0 + 17 + 35 * k, 83, middle, 112, FOLD)
        d.text(middle, 126, "⊙", 18, FOLD)
        if group == 3:
            d.box(x0 + 35 * start, 52, 35 * group, 84, "none", PALE, stroke_dasharray="3 3", rx=8)
        centres.append(middle)
    for x in centres:
        d.line(x, 132, x0 + 105, 184, FOLD)
    d.text(x0 + 105, 202, "⊙", 18, FOLD)


def tiles() -> Drawing:
    """The tiles of a causal window of 11, for tiles of 4: full, partial, and skipped."""
    d = Drawing(760, 340, "Tiles that a condition hides are not visited")
    tile, cells, window, side = 4, 24, 11, 11
    left, top = 120, 46
    counts = dict.fromkeys(("whole", "cut", "skipped"), 0)
    for bi in range(0, cells, tile):
        for bj in range(0, cells, tile):
            seen = [0 <= i - j < window for i in range(bi, bi + tile) for j in range(bj, bj + tile)]
            kind = "whole" if all(seen) else "cut" if any(seen) else "skipped"
            counts[kind] += 1
            x, y, size = left + bj * side, top + bi * side, tile * side
            d.box(x, y, size, size, {"whole": "#8ce99a", "cut": "#d3f9d8", "skipped": "#f8f9fa"}[kind], PALE)
            if kind == "cut":
                for k, on in enumerate(seen):
                    if on:
                        d.box(x + k % tile * side + 2, y + k // tile * side + 2, side - 4, side - 4, "#8ce99a", "none")
    d.text(left + cells * side / 2, 32, "columns", 14, COL)
    d.text(left - 14, top + cells * side / 2, "rows", 14, ROW, "end")
    owned = top + 2 * tile * side
    d.box(left - 5, owned - 3, cells * side + 10, tile * side + 6, "none", ROW, stroke_width=3, rx=4)
    d.arrow(left + cells * side + 70, owned + 22, left + cells * side + 10, owned + 22, ROW)
    d.text(left + cells * side + 78, owned + 27, "one worker owns these rows", 14, ROW, "start")
    d.text(left + cells * side + 78, owned + 47, "and loops over the columns", 14, ROW, "start")
    words = {
        "whole": "computed without a condition",
        "cut": "computed with the condition",
        "skipped": "skipped",
    }
    for k, (kind, fill) in enumerate((("whole", "#8ce99a"), ("cut", "#d3f9d8"), ("skipped", "#f8f9fa"))):
        y = 228 + 28 * k
        d.box(left + cells * side + 40, y, 16, 16, fill, PALE)
        d.text(left + cells * side + 66, y + 13, f"{counts[kind]} {words[kind]}", 14, INK, "start")
    return d


def backward() -> Drawing:
    """The gradient of a fold: the same pairs again, folded once to the rows and once to the columns."""
    d = Drawing(760, 380, "The backward of a fold is two folds")
    left, top, cell, rows, cols = 210, 100, 44, 4, 6
    for i in range(rows):
        for j in range(cols):
            on = i == 1 or j == 4
            d.box(
                left + j * cell, top + i * cell, cell, cell, "#f3d9fa" if on else "none", PALE, stroke_dasharray="3 3"
            )
            if on:
                d.text(left + (j + 0.5) * cell, top + (i + 0.62) * cell, "h", 16, GRADIENT, font_style="italic")
    for i in range(rows):
        d.box(40, top + i * cell + 6, 150, cell - 12, "#c5f6fa", ROW)
        d.text(115, top + (i + 0.62) * cell, "A, P and its cotangent", 12, ROW)
    for j in range(cols):
        d.box(left + j * cell + 6, 50, cell - 12, 40, "#ffe8cc", COL)
        d.text(left + (j + 0.5) * cell, 75, "B", 13, COL)
    right, bottom = left + cols * cell, top + rows * cell
    y, x = top + 1.5 * cell, left + 4.5 * cell
    d.arrow(right + 6, y, right + 54, y, ROW)
    d.text(right + 62, y - 3, "Σ over columns:", 14, ROW, "start")
    d.text(right + 62, y + 16, "gradient of row 1", 14, ROW, "start")
    d.arrow(x, bottom + 6, x, bottom + 40, COL)
    d.text(x, bottom + 60, "Σ over rows: gradient of column 4", 14, COL)
    d.text(
        left + cols * cell / 2,
        30,
        "h = D(P, f(A, B)) · cotangent, back through f: computed again where it is needed",
        14,
        GRADIENT,
    )
    d.text(380, 366, "Only P, one value per row, was kept from the forward.", 14, INK)
    return d


def path() -> Drawing:
    """What a call goes through; the gradient program takes the same path."""
    d = Drawing(760, 250, "The path of a call")
    stops = (
        ("body", "your few lines"),
        ("program", "traced once"),
        ("passes", "as few as possible"),
        ("plan", "tiles, panels, budget"),
        ("engine", "runs folds forward"),
    )
    for k, (name, words) in enumerate(stops):
        x = 20 + 148 * k
        d.box(x, 60, 120, 62, "#e3fafc", ROW, rx=8)
        d.text(x + 60, 86, name, 16, ROW)
        d.text(x + 60, 108, words, 10, INK)
        if k:
            d.arrow(x - 28, 91, x - 2, 91)
    d.text(676, 30, "results P", 14, FOLD)
    d.arrow(672, 58, 672, 38, FOLD)
    d.box(168, 170, 416, 46, "#f8f0fc", GRADIENT, rx=8)
    d.text(376, 199, "gradient: cotangents go back through the pair expression; a program again", 11, GRADIENT)
    d.line(672, 124, 672, 193, GRADIENT)
    d.arrow(672, 193, 586, 193, GRADIENT)
    d.arrow(228, 168, 228, 126, GRADIENT)
    return d


def ring() -> Drawing:
    """Four ranks, each with rows of its own; the shards of the columns travel."""
    d = Drawing(760, 250, "A ring: each rank folds its rows with one shard of the columns after another")
    for rank in range(4):
        x = 40 + 180 * rank
        d.box(x, 40, 140, 150, "none", INK, rx=8)
        d.text(x + 70, 30, f"rank {rank}", 14)
        d.box(x + 14, 56, 112, 30, "#c5f6fa", ROW)
        d.text(x + 70, 76, f"rows {rank}: stay", 13, ROW)
        d.box(x + 14, 100, 112, 30, "#ffe8cc", COL)
        d.text(x + 70, 120, f"columns {(rank + 3) % 4}: travel", 12, COL)
        d.box(x + 14, 144, 112, 30, "#d3f9d8", FOLD)
        d.text(x + 70, 164, "P ⊙ new pairs", 13, FOLD)
        if rank < 3:
            d.arrow(x + 142, 115, x + 176, 115, COL)
    d.line(40 + 180 * 3 + 70, 190, 40 + 180 * 3 + 70, 214, COL)
    d.line(40 + 180 * 3 + 70, 214, 110, 214, COL)
    d.arrow(110, 214, 110, 192, COL)
    d.text(380, 236, "after four steps every row has seen every column; no rank ever held them all", 14)
    return d


PICTURES: dict[str, Callable[[], Drawing]] = {
    "fold": fold,
    "grouping": grouping,
    "tiles": tiles,
    "backward": backward,
    "path": path,
    "ring": ring,
}


def main(folder: Path = IMAGES) -> None:
    for name, draw in PICTURES.items():
        (folder / f"idea-{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
