"""The commands about plans: ``explain`` shows the plan of a call, ``tune`` finds the best, ``cache`` manages them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import autotune
from ..ops.checks import explain_layer
from ..plan import cache as plan_cache
from . import report, workload
from .command import Answer, CommandError, dtype_name
from .workload import report_user_errors


def explain(
    target: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    forward: bool,
    measure: bool,
    device: torch.device,
    **given: Any,
) -> Answer:
    """Say what would run at a size, and why."""
    layer = workload.find(target, **given)
    allocate = measure or device.type != "cpu"
    args = layer.inputs(rows, cols, dtype, device if allocate else torch.device("meta"))
    with report_user_errors(layer.file):
        if layer.op is not None:
            text = layer.op.explain(*args, backward=not forward, measure=measure)
        else:
            text = explain_layer(layer.call, args, {}, not forward, measure, layer.name)
    if not text.as_dict().get("calls", True):
        raise CommandError(f"{target} calls no op, so there is no plan to explain. Write it with @mr.op")
    data = {"target": target, "dtype": dtype_name(dtype), **text.as_dict(), "text": str(text)}
    return Answer(data, lambda console: console.print(text, markup=False, soft_wrap=True))


def tune(
    target: str, rows: int, cols: int, dtype: torch.dtype, forward: bool, device: torch.device, **given: Any
) -> Answer:
    """Find the fastest plans for a size, and remember them."""
    layer = workload.find(target, **given)
    args = layer.inputs(rows, cols, dtype, device)
    with report_user_errors(layer.file):
        found = autotune.tune(layer.call, *args, backward=not forward)
    data = {"target": target, "rows": rows, "cols": cols, "dtype": dtype_name(dtype), **found.as_dict()}
    return Answer(data, lambda console: console.print(str(found), markup=False, soft_wrap=True))


def _show_plans(_: Path | None) -> Answer:
    plans = plan_cache.plans()
    listed = [{"key": vars(p.key), "plan": dict(p.plan), "measured": dict(p.measured)} for p in plans]
    words = [", ".join(f"{name} {value}" for name, value in p.plan.items()) for p in plans]
    rows = [(p.key.program[:12], p.key.shape, p.key.types, p.key.device, w) for p, w in zip(plans, words, strict=True)]

    def show(console: Any) -> None:
        if rows:
            report.print_table(console, ("program", "shape", "types", "device", "plan"), rows)
        console.print(f"{len(rows)} plans in {plan_cache.path()}", soft_wrap=True, markup=False)

    return Answer({"path": str(plan_cache.path()), "plans": listed}, show)


def _show_path(_: Path | None) -> Answer:
    path = plan_cache.path()
    return Answer({"path": str(path)}, lambda console: report.print_paths(console, [path]))


def _report_count(word: str, act: Callable[[Path | None], int]) -> Callable[[Path | None], Answer]:
    """An action that answers with the number of plans or files that it handled."""

    def answer(file: Path | None) -> Answer:
        count = act(file)
        data = {word: count, "path": str(file or plan_cache.path())}
        return Answer(data, lambda console: console.print(f"{count} {word}"))

    return answer


_ACTIONS: dict[str, Callable[[Path | None], Answer]] = {
    "show": _show_plans,
    "path": _show_path,
    "clear": _report_count("removed", lambda file: plan_cache.clear()),
    "export": _report_count("exported", lambda file: plan_cache.export(str(file))),
    "import": _report_count("imported", lambda file: plan_cache.import_(str(file))),
}


def cache(action: str, file: Path | None) -> Answer:
    """Show, clear or share the plans kept on disk."""
    takes_file = action in ("export", "import")
    if takes_file != (file is not None):
        raise CommandError(f"cache {action} {'needs the name of a FILE' if takes_file else 'takes no FILE'}")
    return _ACTIONS[action](file)
