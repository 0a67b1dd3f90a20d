"""The pictures of docs/architecture.md: ``python -m docs.draw.architecture`` writes docs/images/architecture-*.svg."""

from collections.abc import Callable

from docs.draw.pictures import IMAGES
from docs.draw.svg import COL, FAINT, FOLD, GRADIENT, INK, PALE, ROW, Drawing

# From the bottom to the top: a package imports only packages below it. Each line of boxes is one level.
LEVELS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("errors.py", "one class per mistake"), ("algebra/", "monoids and their laws"), ("domains/", "which pairs exist")),
    (("program/", "trace, gradient, compile; the table of primitives"),),
    (("reductions/", "one file per kind of reduction"),),
    (("plan/", "cost, budget, schedule, plan records"),),
    (("engines/", "run folds forward"),),
    (("tuning.py", "trials and the tuner: which plan is fastest here"),),
    (("runtime/", "one call: key, cache, bind, autograd, replay"),),
    (("op.py", "the decorator"), ("stream.py", "chunks of columns"), ("blockwise.py", "the papers' factories")),
    (("ops/", "layers in the pair language"), ("nn/", "modules"), ("linalg/", "solvers")),
    (("integrations/", "transformers, trainers, Ray"), ("cli/", "command line")),
)
ENGINES = ("common", "reference", "dense", "eager", "panel", "triton", "listed", "ranks", "stream", "auto")
TRITON = ("codegen", "launch", "schedules", "kernels", "panel")


def packages() -> Drawing:
    """The packages in levels; imports point down."""
    d = Drawing(760, 764, "The packages: imports point down")
    y = 24.0
    for level in reversed(LEVELS):
        if level[0][0] == "engines/":
            y = _engines(d, y)
        else:
            width = (640 - 16 * (len(level) - 1)) / len(level)
            for k, (name, words) in enumerate(level):
                _package(d, 40 + k * (width + 16), y, width, name, words)
            y += 62
        if level is not LEVELS[0]:
            d.arrow(360, y - 14, 360, y - 2, PALE)
    d.arrow(720, 40, 720, y - 24, INK)
    d.text(732, 380, "imports", 13, INK, transform="rotate(90 732 380)")
    return d


def _package(d: Drawing, x: float, y: float, width: float, name: str, words: str, fill: str = "#e3fafc") -> None:
    d.box(x, y, width, 46, fill, ROW, rx=8)
    d.text(x + width / 2, y + 20, name, 15, ROW)
    d.text(x + width / 2, y + 37, words, 11, INK)


def _engines(d: Drawing, y: float) -> float:
    """The box of engines/ with what is in it; returns where the next level begins."""
    d.box(40, y, 640, 158, "#fff4e6", COL, rx=8)
    d.text(360, y + 20, "engines/", 15, COL)
    d.text(360, y + 36, "run this program, on these tensors, by this plan; return the value of each reduction", 11, INK)
    names = [n for n in ENGINES if n != "common"]
    width = (616 - 8 * (len(names) - 1)) / len(names)
    for k, name in enumerate(names):
        x = 52 + k * (width + 8)
        d.box(x, y + 48, width, 26, "white", COL, rx=6)
        d.text(x + width / 2, y + 66, name, 11, COL)
        if name == "triton":
            middle = x + width / 2
    d.line(middle, y + 74, middle, y + 84, COL)
    inner = 68
    for k, name in enumerate(TRITON):
        x = middle - len(TRITON) / 2 * (inner + 4) + k * (inner + 4)
        d.box(x, y + 84, inner, 22, "white", COL, rx=6)
        d.text(x + inner / 2, y + 99, name, 11, COL)
    d.box(52, y + 118, 616, 28, "white", COL, rx=6)
    d.text(360, y + 137, "common: evaluate, matmul, label gather, combine (torch only; used by every engine)", 12, COL)
    return y + 174


def call() -> Drawing:
    """The life of a call: the first one, a later one, and the backward, which is the same line again."""
    d = Drawing(760, 430, "The life of a call, forward and backward")
    first = (
        ("ops", "the op or layer"),
        ("runtime", "key"),
        ("runtime", "bind"),
        ("program", "trace"),
        ("program", "compile"),
        ("plan", "choose"),
        ("engine", "build"),
        ("runtime", "replay"),
    )
    d.text(20, 28, "first call of a kind", 14, ROW, "start")
    _line(d, first, 42, "#e3fafc", ROW)
    later = (("ops", "the op or layer"), ("runtime", "key, cache"), ("runtime", "replay"), ("device", "launches"))
    d.text(20, 150, "every later call", 14, FOLD, "start")
    _line(d, later, 164, "#d3f9d8", FOLD)
    d.text(420, 186, "the key finds the executable in the call cache:", 12, FOLD, "start")
    d.text(420, 204, "no checks, no tracing, no planning", 12, FOLD, "start")
    backward = (
        ("autograd", "P, cotangents"),
        ("program", "gradient (once)"),
        ("plan", "choose (once)"),
        ("engine", "build (once)"),
        ("runtime", "replay"),
        ("device", "launches"),
    )
    d.text(20, 272, "backward: the same line again", 14, GRADIENT, "start")
    _line(d, backward, 286, "#f3d9fa", GRADIENT)
    d.text(380, 376, "the gradient program is a program: rows get P and their cotangents as more inputs,", 13)
    d.text(380, 396, "so an engine only ever runs folds forward, and second derivatives need nothing new", 13)
    d.line(20, 126, 740, 126, FAINT)
    d.line(20, 248, 740, 248, FAINT)
    return d


def _line(d: Drawing, stops: tuple[tuple[str, str], ...], y: float, fill: str, ink: str) -> None:
    width = 80.0 if len(stops) > 6 else 88.0
    for k, (name, words) in enumerate(stops):
        x = 20 + k * (width + 12)
        d.box(x, y, width, 50, fill, ink, rx=6)
        d.text(x + width / 2, y + 21, name, 13, ink)
        d.text(x + width / 2, y + 39, words, 10, INK)
        if k:
            d.arrow(x - 12, y + 25, x - 1, y + 25)


PICTURES: dict[str, Callable[[], Drawing]] = {"packages": packages, "call": call}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"architecture-{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
