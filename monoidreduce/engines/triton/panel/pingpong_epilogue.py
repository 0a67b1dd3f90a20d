"""GEMMs that write weights, by two ping-pong consumers.

The kernels of ``epilogue_kernels.py``, with the same arguments and the same arithmetic of pairs, in the template of
``schedules/pingpong/gemm_template.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..codegen import kernel_text
from ..codegen.expressions import Values
from ..codegen.kernel_spec import Spec
from ..schedules.pingpong import gemm_template
from ..schedules.pingpong.gemm_template import EXTRA, WRITES
from . import epilogue_kernels
from .epilogue_task import Task, product, sides
from .row_kernel import RowValues


@functools.lru_cache(maxsize=1024)
def write_kernel(name: str, task: Task, spec: Spec, masked: bool, wide: bool = False) -> kernel_text.Kernel | None:
    """Write one of the kernels; None where it needs calls that Gluon does not have, or numbers per column, for which
    there are no registers, or where there are too many features.

    ``wide``: in wide tiles, with one argument more, a descriptor of the blocks of extra columns."""
    multiplied = sides(product(task))
    if epilogue_kernels._numbers(spec) or (spec.width(multiplied[0].feature) > gemm_template.DEEPEST and not wide):
        return None
    plain = epilogue_kernels.kernel(name, task, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    outs, lines = _WRITERS[name](v, task, WRITES[wide].folded // EXTRA)
    signature = epilogue_kernels._signature(spec, outs, list(plain.leaves))
    generated = {"before": v.before, "epilogue": lines}
    return gemm_template.write_weights(wide, plain, spec, multiplied, signature, generated)


_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_STORE = "store_tile(out_box, staging, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_known(v: Values, task: Task, strips: int) -> tuple[list[str], list[str]]:
    def weigh(k: int) -> str:
        if task.own is None:
            return v.full(task.weight)
        hit, nothing, others = task.weight.args  # each row's own column is left out
        v.inside.append(f"weight = {v.full(others)}")
        before, v.inside = v.inside, []
        lines = [f"weight = tl.where({v.full(hit)}, {v.number(nothing)}, weight)"]
        met = v.bind("met", gemm_template.holds_label(v.outer[(task.own.target, "index")]), False, "met")
        v.inside = [*before, f"if {met}:", *(f"    {line}" for line in (*v.inside, *lines))]
        return "weight"

    return ["out_box"], epilogue_kernels._halves(v, task, weigh, _STORE, _HALF, strips)


def _guessed(v: Values, task: Task, strips: int, store: str) -> tuple[list[str], list[str]]:
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


_WRITERS: dict[str, Callable[[Values, Task, int], tuple[list[str], list[str]]]] = {
    "write_known": _write_known,
    "write_guessed": functools.partial(_guessed, store=_STORE),
    "sum_guessed": functools.partial(_guessed, store=""),
}
