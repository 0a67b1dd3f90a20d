"""``monoidreduce cache``: the plans and kernels that are kept on disk. The work is ``mr.cache``'s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..plan import cache
from . import terminal
from .command import Answer, Command, CommandError


def run(action: str, file: Path | None) -> Answer:
    """Show, clear or share the plans kept on disk.

    show lists them (the default), path prints the folder, clear removes plans and kernels, export FILE writes all plans
    to one file, import FILE takes such a file, checked as anything foreign.
    """
    takes_file = action in ("export", "import")
    if takes_file != (file is not None):
        raise CommandError(f"cache {action} {'needs the name of a FILE' if takes_file else 'takes no FILE'}")
    return ACTIONS[action](file)


def _show(_: Path | None) -> Answer:
    plans = cache.plans()
    listed = [{"key": vars(p.key), "plan": dict(p.plan), "measured": dict(p.measured)} for p in plans]
    rows = [(p.key.program[:12], p.key.shape, p.key.types, p.key.device, _said(p.plan)) for p in plans]

    def show(console: Any) -> None:
        if rows:
            terminal.table(console, ("program", "shape", "types", "device", "plan"), rows)
        console.print(f"{len(rows)} plans in {cache.path()}", soft_wrap=True, markup=False)

    return Answer({"path": str(cache.path()), "plans": listed}, show)


def _said(plan: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in plan.items())


def _counted(word: str, act: Callable[[Path | None], int]) -> Callable[[Path | None], Answer]:
    """An action that answers with a number."""

    def answer(file: Path | None) -> Answer:
        count = act(file)
        return Answer({word: count, "path": str(file or cache.path())}, lambda c: c.print(f"{count} {word}"))

    return answer


def _path(_: Path | None) -> Answer:
    found = str(cache.path())
    return Answer({"path": found}, lambda console: console.print(found, soft_wrap=True, markup=False))


ACTIONS: dict[str, Callable[[Path | None], Answer]] = {
    "show": _show,
    "path": _path,
    "clear": _counted("removed", lambda file: cache.clear()),
    "export": _counted("exported", lambda file: cache.export(str(file))),
    "import": _counted("imported", lambda file: cache.import_(str(file))),
}

COMMAND = Command(
    "cache",
    run,
    (
        click.Argument(["action"], type=click.Choice(list(ACTIONS)), required=False, default="show"),
        click.Argument(["file"], type=click.Path(path_type=Path), required=False),
    ),
)
