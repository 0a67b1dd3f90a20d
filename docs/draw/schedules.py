"""The pictures of schedules: ``python -m docs.draw.schedules`` writes docs/images/schedule-*.svg.

Time runs to the right. A box is work; an arrow says that one piece of work waits for another.
"""

from collections.abc import Callable

from docs.draw.pictures import IMAGES
from docs.draw.svg import COL, FOLD, GRADIENT, INK, PALE, ROW, Drawing

LEFT, STEP = 150, 96  # where time begins, and the width of one step


def _lane(d: Drawing, y: float, name: str, words: str) -> None:
    d.text(20, y + 17, name, 14, INK, "start")
    d.text(20, y + 33, words, 11, PALE, "start")
    d.line(LEFT, y + 44, 740, y + 44, PALE)


def _work(d: Drawing, start: float, width: float, y: float, words: str, fill: str, ink: str) -> None:
    x = LEFT + start * STEP
    d.box(x + 2, y + 4, width * STEP - 4, 34, fill, ink, rx=5)
    d.text(x + width * STEP / 2, y + 26, words, 12, ink)


def warp_specialisation() -> Drawing:
    """One warp copies, two warp groups compute; a ring buffer lies between them."""
    d = Drawing(760, 300, "Warp specialisation: a producer warp copies blocks of keys and values, consumers compute")
    d.text(
        20, 26, "warp-specialised: who copies never computes, so copies run beneath the arithmetic", 14, ROW, "start"
    )
    lanes = (("producer", "one warp, TMA"), ("consumer 0", "64 rows"), ("consumer 1", "64 rows"))
    for k, (name, words) in enumerate(lanes):
        _lane(d, 44 + 58 * k, name, words)
    for k in range(6):
        _work(d, k, 1, 44, f"copy K, V {k}", "#ffe8cc", COL)
    for group in (0, 1):
        for k in range(5):
            y = 102 + 58 * group
            _work(d, k + 1.1, 0.98, y, f"fold tile {k}", "#d3f9d8", FOLD)
    for k in range(5):
        x = LEFT + (k + 1) * STEP
        d.arrow(x - 6, 82, x + 14, 104, COL)
    d.text(20, 244, "ring buffer in shared memory:", 12, INK, "start")
    for k in range(4):
        fill, words = (("#ffe8cc", "full"), ("#ffe8cc", "full"), ("white", "empty"), ("white", "empty"))[k]
        d.box(220 + 74 * k, 228, 66, 26, fill, COL, rx=4)
        d.text(253 + 74 * k, 246, words, 12, COL)
    d.text(530, 240, "full barrier: consumers may read", 11, PALE, "start")
    d.text(530, 256, "empty barrier: the producer may copy", 11, PALE, "start")
    d.text(
        20, 284, "The rows\u2019 queries stay in shared memory; the accumulators stay in registers.", 12, INK, "start"
    )
    return d


def ping_pong() -> Drawing:
    """Two consumer groups alternate: one uses the matrix units while the other does the pair arithmetic."""
    d = Drawing(760, 240, "Ping-pong: two consumer warp groups alternate matrix products and pair arithmetic")
    d.text(20, 26, "ping-pong: the matrix units are never idle while exponentials are computed", 14, ROW, "start")
    for k, name in enumerate(("consumer 0", "consumer 1")):
        _lane(d, 44 + 58 * k, name, "its own tile")
    for k in range(3):
        _work(d, 2 * k, 1, 44, f"products {2 * k}", "#c5f6fa", ROW)
        _work(d, 2 * k + 1, 1, 44, "arithmetic", "#d3f9d8", FOLD)
        _work(d, 2 * k + 1, 1, 102, f"products {2 * k + 1}", "#c5f6fa", ROW)
        if k < 2:
            _work(d, 2 * k + 2, 1, 102, "arithmetic", "#d3f9d8", FOLD)
    for k in range(5):
        x, up = LEFT + (k + 1) * STEP, k % 2
        d.arrow(x, 96 if up else 86, x, 92 if up else 104, GRADIENT)
    _lane(d, 160, "matrix units", "")
    for k in range(6):
        _work(d, k, 1, 160, f"group {k % 2}", "#c5f6fa", ROW)
    d.text(
        20,
        228,
        "A barrier hands the matrix units from one group to the other at the end of each product.",
        12,
        INK,
        "start",
    )
    return d


def split_keys() -> Drawing:
    """Few rows, many keys: each program instance folds a split, and the partial results are combined by the monoid."""
    d = Drawing(760, 300, "Split keys: each program instance folds a stretch of the keys; the monoid combines them")
    d.text(20, 26, "split keys: few rows, many columns (decoding, sampling, nearest neighbours)", 14, ROW, "start")
    d.box(20, 60, 56, 34, "#c5f6fa", ROW, rx=5)
    d.text(48, 82, "q", 14, ROW)
    d.text(48, 112, "few rows", 11, PALE)
    for k in range(5):
        x = 130 + 122 * k
        d.box(x, 60, 112, 34, "#ffe8cc", COL, rx=5)
        d.text(x + 56, 82, f"keys, split {k}", 12, COL)
        d.arrow(x + 56, 96, x + 56, 124, COL)
        d.box(x + 6, 126, 100, 34, "#d3f9d8", FOLD, rx=5)
        d.text(x + 56, 148, f"instance {k}", 12, FOLD)
        d.arrow(x + 56, 162, 435 + (k - 2) * 30, 206, FOLD)
        d.text(x + 92, 176, "m, l, o", 10, PALE)
    d.box(335, 208, 200, 36, "#f3d9fa", GRADIENT, rx=5)
    d.text(435, 231, "combine by \u2299, in a fixed order", 12, GRADIENT)
    d.arrow(435, 246, 435, 266, GRADIENT)
    d.text(435, 284, "the result, the same bits in every run", 12, INK)
    d.text(20, 231, "m: maximum, l: sum of weights,", 11, PALE, "start")
    d.text(20, 246, "o: weighted sum of values", 11, PALE, "start")
    return d


PICTURES: dict[str, Callable[[], Drawing]] = {
    "warp-specialisation": warp_specialisation,
    "ping-pong": ping_pong,
    "split-keys": split_keys,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"schedule-{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
