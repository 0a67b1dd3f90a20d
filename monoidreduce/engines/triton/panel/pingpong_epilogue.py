"""Products that write weights as groups of warps take turns at them: Gluon, on Hopper.

The kernels of ``epilogue_kernels.py``, with the same arguments and the same arithmetic of pairs, in the same words:
``tl`` is here
Gluon's language. What the compiler would schedule is written out in ``engines/triton/schedules/pingpong_template.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..codegen import kernel_text
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec
from ..schedules import pingpong_template
from ..schedules.pingpong_template import OTHERS, TILE
from . import epilogue_kernels
from .epilogue_task import Task, product, sides
from .row_kernel import RowValues


@functools.lru_cache(maxsize=1024)
def kernel(name: str, task: Task, spec: Spec, masked: bool, wide: bool = False) -> kernel_text.Kernel | None:
    """Write one of the kernels; None where it needs words that Gluon has not, or that have to be told a layout, or
    numbers per column, which take registers that there are not; or where features are too many.

    ``wide``: with tiles of more columns, and one argument more, a descriptor of blocks of those."""
    multiplied = sides(product(task))
    if epilogue_kernels._numbers(spec) or (spec.width(multiplied[0].feature) > pingpong_template.DEEPEST and not wide):
        return None
    plain = epilogue_kernels.kernel(name, task, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    tile = TILE + OTHERS if wide else TILE
    outs, lines = _WRITERS[name](v, task, tile // OTHERS)
    names, unspecialized = epilogue_kernels._signature(spec, outs, list(plain.leaves))
    signature = [*names, "others_box"] if wide else names, unspecialized
    fields = {"first": (8, v.before), "lines": (8, lines)}
    return pingpong_template.rendered(pingpong_template.WRITES[tile], plain, spec, multiplied, signature, fields)


_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_STORE = "written(out_box, room, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_known(v: ExpressionWriter, task: Task, strips: int) -> tuple[list[str], list[str]]:
    def weigh(k: int) -> str:
        if task.own is None:
            return v.full(task.weight)
        hit, nothing, others = task.weight.args  # each row's own column is left out
        v.inside.append(f"weight = {v.full(others)}")
        before, v.inside = v.inside, []
        lines = [f"weight = tl.where({v.full(hit)}, {v.number(nothing)}, weight)"]
        met = v.bind("met", pingpong_template.met(v.outer[(task.own.target, "index")]), False, "met")
        v.inside = [*before, f"if {met}:", *(f"    {line}" for line in (*v.inside, *lines))]
        return "weight"

    return ["out_box"], epilogue_kernels._halves(v, task, weigh, _STORE, _HALF, strips)


def _guessed(v: ExpressionWriter, task: Task, strips: int, store: str) -> tuple[list[str], list[str]]:
    made: list[tuple[str, str]] = []

    def logits(k: int) -> str:
        n, s, factor = epilogue_kernels._soft(v, task)
        made.append((n, factor))
        v.inside.append(f"{n}_half{k} = {s}")
        return ""

    def weigh(k: int) -> str:
        weighed = epilogue_kernels._early if store else epilogue_kernels._summed
        return weighed(v, task, n, f"{n}_half{k}{factor}", "+=" if k else "=")

    lines = epilogue_kernels._halves(v, task, logits, "", _HALF, strips)
    (n, factor), v.inside = made[0], []
    most = functools.reduce("tl.maximum({}, {})".format, (f"tl.max({n}_half{k}, 1)" for k in range(strips)))
    epilogue_kernels._measure(v, n, f"{most}{factor}")
    lines += [*v.inside, *epilogue_kernels._halves(v, task, weigh, store, _HALF, strips)]
    return epilogue_kernels._GUESSED, [*lines, f"tl.store(sums + place, {n}_total, mask=kept_in)"]


_WRITERS: dict[str, Callable[[ExpressionWriter, Task, int], tuple[list[str], list[str]]]] = {
    "write_known": _write_known,
    "write_guessed": functools.partial(_guessed, store=_STORE),
    "sum_guessed": functools.partial(_guessed, store=""),
}
