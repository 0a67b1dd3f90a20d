"""The loss curves of docs/training.md, from the newest ``benchmarks/results/curves-*.json``.

``python -m docs.draw.curves`` writes docs/images/training-curves.svg; a test compares.
"""

import json
import math
from pathlib import Path
from typing import Any

from docs.draw.svg import COL, FAINT, INK, PALE, ROW, Drawing

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "training-curves.svg"
STYLES: dict[str, tuple[str, dict[str, object]]] = {
    "torch": (PALE, {"stroke_width": 5}),
    "torch, another seed": (COL, {"stroke_dasharray": "4 3"}),
    "ours": (ROW, {}),
}
WIDTH, HEIGHT = 300, 190
SMALLEST, LARGEST = -8, 0  # powers of ten that the differences are drawn between


def newest() -> dict[str, Any]:
    return json.loads(max((ROOT / "benchmarks" / "results").glob("curves-*.json")).read_text(encoding="utf-8"))


def curves() -> Drawing:
    """Above, the losses; below, how far they are from torch's at the same step."""
    results = newest()["types"]
    d = Drawing(760, 560, "Loss curves of torch's own layers and of ours, and how far they are apart")
    for k, (kind, found) in enumerate(results.items()):
        left = 70 + k * 360
        d.text(left + WIDTH / 2, 28, kind if kind == "float32" else f"{kind}, autocast", 16)
        draw_losses(d, left, 45, found["curves"])
        draw_differences(d, left, 285, found["curves"])
    for k, (name, (stroke, style)) in enumerate(STYLES.items()):
        x = 120 + 190 * k
        d.line(x, 538, x + 34, 538, stroke, **style)
        d.text(x + 42, 543, name, 14, INK, "start")
    return d


def draw_losses(d: Drawing, left: int, top: int, found: dict[str, list[float]]) -> None:
    low, high = 2, 6
    height = lambda y: top + HEIGHT * (high - y) / (high - low)
    _draw_axes(d, left, top, [(height(y), str(y)) for y in range(low, high + 1)], len(found["torch"]))
    for name, (stroke, style) in STYLES.items():
        d.path(_points(left, [height(y) for y in found[name]]), stroke, **style)
    if left < 100:
        d.text(22, top + HEIGHT / 2, "loss, nats per byte", 13, INK, transform=f"rotate(-90 22 {top + HEIGHT // 2})")


def draw_differences(d: Drawing, left: int, top: int, found: dict[str, list[float]]) -> None:
    height = lambda power: top + HEIGHT * (LARGEST - power) / (LARGEST - SMALLEST)
    labels = [(height(p), "1" if p == 0 else f"1e{p}") for p in range(SMALLEST, LARGEST + 1, 2)]
    _draw_axes(d, left, top, labels, len(found["torch"]))
    for name in ("torch, another seed", "ours"):
        stroke, style = STYLES[name]
        apart = [abs(a - b) for a, b in zip(found[name], found["torch"], strict=True)]
        powers = [math.log10(min(max(y, 10.0**SMALLEST), 10.0**LARGEST)) for y in apart]
        d.path(_points(left, [height(p) for p in powers]), stroke, **style)
    d.text(left + WIDTH / 2, top + HEIGHT + 40, "step", 13)
    if left < 100:
        d.text(22, top + HEIGHT / 2, "apart from torch", 13, INK, transform=f"rotate(-90 22 {top + HEIGHT // 2})")


def _points(left: int, heights: list[float]) -> list[tuple[float, float]]:
    return [(left + WIDTH * (k + 1) / len(heights), y) for k, y in enumerate(heights)]


def _draw_axes(d: Drawing, left: int, top: int, labels: list[tuple[float, str]], steps: int) -> None:
    for y, words in labels:
        d.line(left, y, left + WIDTH, y, FAINT)
        d.text(left - 8, y + 4, words, 12, INK, "end")
    for step in range(0, steps + 1, 50):
        x = left + WIDTH * step / steps
        d.text(x, top + HEIGHT + 20, str(step), 12)
    d.box(left, top, WIDTH, HEIGHT, "none", PALE)


if __name__ == "__main__":
    PICTURE.write_text(str(curves()), encoding="utf-8")
