"""Products that write weights as groups of warps take turns at them: Gluon, on Hopper.

The kernels of ``write.py``, with the same arguments and the same arithmetic of pairs, in the same words: ``tl`` is here
Gluon's language. What the compiler would schedule is written out in ``text/paired_text.py``.
"""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import replace

from ..spec import Spec
from ..text import deep, emit, paired_text
from ..text.values import Values
from . import write
from .sweep import RowValues
from .write import Task


@functools.lru_cache(maxsize=1024)
def kernel(name: str, task: Task, spec: Spec, masked: bool) -> emit.Kernel | None:
    """Write one of the kernels; None where it needs words that Gluon has not, or that have to be told a layout, or
    numbers per column, which take registers that there are not."""
    if write._numbers(spec):
        return None
    plain = write.kernel(name, task, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    outs, lines = _WRITERS[name](v, task)
    names, unspecialized = write._signature(spec, outs, list(plain.leaves))
    x0, x1 = write._sides(write._product(task))
    fields = {
        "name": name,
        "names": textwrap.fill(", ".join(names), 110, initial_indent="    ", subsequent_indent="    "),
        "unspecialized": repr(unspecialized),
        "x0": str(x0.attrs[0]),
        "x1": str(x1.attrs[0]),
        "narrow": f"tl.{spec.narrow}",
        "depth": str(deep.DEPTH),
        "blocks": str(-(-spec.width(x0.feature) // deep.DEPTH)),
        "first": textwrap.indent("\n".join(v.before), " " * 8),
        "lines": textwrap.indent("\n".join(lines), " " * 8),
    }
    body = paired_text.WRITES.format(**fields)
    helpers = [text.replace("@triton.jit", "@gluon.jit") for text in emit._copied(body)]
    if _LAID.search("\n".join([*v.before, *(line for line in lines if line not in _HALF), *helpers])):
        return None
    text = "\n".join([emit._header(spec, list(plain.leaves), paired_text.IMPORTS), *helpers, body])
    return replace(plain, text=text, staged=True)


_LAID = re.compile(r"tl\.(zeros|full|arange|philox|PropagateNan|dot|trans)\b")
_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_STORE = "written(out_box, room, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_known(v: Values, task: Task) -> tuple[list[str], list[str]]:
    return ["out_box"], write._halves(v, task, lambda k: v.full(task.weight), _STORE, _HALF)


def _write_guessed(v: Values, task: Task) -> tuple[list[str], list[str]]:
    made: list[tuple[str, str]] = []

    def logits(k: int) -> str:
        n, s, factor = write._soft(v, task)
        made.append((n, factor))
        v.inside.append(f"{n}_half{k} = {s}")
        return ""

    def weigh(k: int) -> str:
        return write._early(v, task, n, f"{n}_half{k}{factor}", "+=" if k else "=")

    lines = write._halves(v, task, logits, "", _HALF)
    (n, factor), v.inside = made[0], []
    write._measure(v, n, f"tl.maximum(tl.max({n}_half0, 1), tl.max({n}_half1, 1)){factor}")
    lines += [*v.inside, *write._halves(v, task, weigh, _STORE, _HALF)]
    return write._GUESSED, [*lines, f"tl.store(sums + place, {n}_total, mask=kept_in)"]


_WRITERS = {"write_known": _write_known, "write_guessed": _write_guessed}
