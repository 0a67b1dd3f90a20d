"""GEMMs whose epilogue writes weights, as ping-pong kernels: two warp groups alternate, in Gluon, on Hopper.

The kernels of ``epilogue_kernels.py`` with the same arguments and the same arithmetic of pairs; ``tl`` is Gluon's
language here. The template is ``engines/triton/schedules/pingpong/gemm_template.py``.
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
from .epilogue_kernels import Epilogue, find_operands, find_product
from .row_kernel import RowValues, list_arguments


@functools.lru_cache(maxsize=1024)
def write_kernel(
    name: str, epilogue: Epilogue, spec: Spec, masked: bool, wide: bool = False
) -> kernel_text.Kernel | None:
    """Write one of the kernels; None where it reads scalars per column, for which there are no registers, where
    features are too many, or where Gluon lacks an operation or would need its layout.

    ``wide``: with tiles of more columns, and one more argument: the descriptor of their blocks."""
    multiplied = find_operands(find_product(epilogue))
    if epilogue_kernels.has_column_scalars(spec) or (
        spec.width(multiplied[0].feature) > gemm_template.DEEPEST and not wide
    ):
        return None
    plain = epilogue_kernels.write_kernel(name, epilogue, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    outs, lines = _WRITERS[name](v, epilogue, WRITES[wide].folded // EXTRA)
    signature = list_arguments(spec, outs, list(plain.leaves))
    generated = {"before": v.before, "epilogue": lines}
    return gemm_template.write_weights(wide, plain, spec, multiplied, signature, generated)


_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_STORE = "store_tile(out_box, staging, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_weights(v: Values, epilogue: Epilogue, strips: int) -> tuple[list[str], list[str]]:
    def weigh(k: int) -> str:
        if epilogue.label is None:
            return v.full(epilogue.weight)
        hit, nothing, others = epilogue.weight.args  # each row's own column is left out
        v.inside.append(f"weight = {v.full(others)}")
        before, v.inside = v.inside, []
        lines = [f"weight = tl.where({v.full(hit)}, {v.number(nothing)}, weight)"]
        met = v.bind("met", gemm_template.holds_label(v.outer[(epilogue.label.label, "index")]), False, "met")
        v.inside = [*before, f"if {met}:", *(f"    {line}" for line in (*v.inside, *lines))]
        return "weight"

    return ["out_box"], epilogue_kernels.write_strips(v, epilogue, weigh, _STORE, _HALF, strips)


def _write_guessed(v: Values, epilogue: Epilogue, strips: int, store: str) -> tuple[list[str], list[str]]:
    made: list[tuple[str, str]] = []

    def logits(k: int) -> str:
        n, s, factor = epilogue_kernels.bind_softmax(v, epilogue)
        made.append((n, factor))
        v.inside.append(f"{n}_half{k} = {s}")
        return ""

    def weigh(k: int) -> str:
        weighed = epilogue_kernels.weigh_exponentials if store else epilogue_kernels.add_exponentials
        return weighed(v, epilogue, n, f"{n}_half{k}{factor}", "+=" if k else "=")

    lines = epilogue_kernels.write_strips(v, epilogue, logits, "", _HALF, strips)
    (n, factor), v.inside = made[0], []
    most = functools.reduce("tl.maximum({}, {})".format, (f"tl.max({n}_half{k}, 1)" for k in range(strips)))
    epilogue_kernels.bind_reference(v, n, f"{most}{factor}")
    lines += [*v.inside, *epilogue_kernels.write_strips(v, epilogue, weigh, store, _HALF, strips)]
    return epilogue_kernels.GUESSED_OUTPUTS, [*lines, f"tl.store(sums + place, {n}_total, mask=kept_in)"]


_WRITERS: dict[str, Callable[[Values, Epilogue, int], tuple[list[str], list[str]]]] = {
    "write_weights": _write_weights,
    "write_guessed": functools.partial(_write_guessed, store=_STORE),
    "sum_guessed": functools.partial(_write_guessed, store=""),
}
