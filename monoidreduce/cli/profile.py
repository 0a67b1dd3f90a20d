"""``monoidreduce profile``: the memory of one layer over time, forward and backward, ours and the dense form's."""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from typing import Any

import torch

from . import figures, files, options, pictures, report_profile, subject, terminal, trial
from .command import Answer, Command
from .environment import surroundings
from .memory import Profile
from .numbers import short
from .subject import Subject
from .target import users_code

POINTS = 240  # of a timeline in JSON, each the highest of its span


def run(target: str, rows: int, cols: int, dtype: torch.dtype, out: Path, device: torch.device, **given: Any) -> Answer:
    """Draw a layer's memory over time, ours and the dense form's.

    Every allocation and release of torch's allocator during one forward and backward. The layer is FILE.py:NAME or
    a ready-made one (see bench --help). Writes profile.html, profile.png and profile.json.
    """
    layer = subject.resolved(target, **given)
    pictures.require()
    folder = files.folder(out)
    start = time.perf_counter()
    profiles, skipped = _measured(layer, rows, cols, dtype, device)
    environment, seconds = surroundings(device), time.perf_counter() - start
    what = f"{layer.name} ({rows} × {cols}, {str(dtype)[6:]})"
    matrix = rows * cols * dtype.itemsize * (given["batch"] or 1)
    data = {
        "layer": layer.name, "rows": rows, "cols": cols, "dtype": str(dtype)[6:], "matrix_bytes": matrix,
        "environment": vars(environment), "skipped": skipped, **{who: as_data(p) for who, p in profiles.items()},
    }  # fmt: skip
    command = f"monoidreduce profile {target} --rows {rows} --cols {cols} --dtype {str(dtype)[6:]}"
    dense = f"<code>{escape(layer.written)}</code>" if layer.by_hand else "Every pair computed, and kept for autograd."
    page = report_profile.render(what, dense, profiles, matrix, environment, seconds, command, skipped)
    written = [
        files.write(folder / "profile.html", page),
        files.write(folder / "profile.png", pictures.timelines(what, profiles)),
        files.write(folder / "profile.json", json.dumps(data, indent=2)),
    ]
    data["files"] = [str(path) for path in written]
    return Answer(data, lambda console: _show(console, what, profiles, matrix, skipped, written))


def _measured(
    layer: Subject, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Profile], str]:
    """The profiles of ours and of the dense form, or why there is none of the latter."""
    args = layer.inputs(rows, cols, dtype, device)
    skipped = trial.too_large(rows * cols, args, device) if layer.dense else "there is none beside it in the file"
    calls = {"ours": layer.call}
    if layer.dense and not skipped:
        calls["naive"] = layer.dense
    found = {}
    with terminal.progress(2 * len(calls)) as begin, users_code(layer.file):
        for who, call in calls.items():
            begin(f"{who}: first run")  # which traces, plans, and may allocate for good
            runner = trial.Trial(call, args, device)
            runner.once()
            begin(f"{who}: memory")
            found[who] = runner.profiled()
    return found, skipped


def as_data(profile: Profile) -> dict[str, Any]:
    """A profile as plain data: the peaks, and the highest moment of each of POINTS spans."""
    points = [
        {"seconds": at, "gradients": m.gradients, "kept": m.kept, "temporary": m.temporary}
        for at, m in figures.spans(profile, POINTS)
    ]
    return {
        "extra_bytes": profile.extra,
        "peak_bytes": profile.peak.total,
        "largest_bytes": profile.largest,
        "forward_seconds": profile.forward_end,
        "seconds": profile.end,
        "timeline": points,
    }


def _show(
    console: Any, what: str, profiles: dict[str, Profile], matrix: int, skipped: str, written: list[Path]
) -> None:
    console.print(what, style="bold")
    mb = lambda count: short(count / 1e6)
    rows = [(who, mb(p.extra), mb(p.largest), mb(p.peak.total)) for who, p in profiles.items()]
    terminal.table(console, ("MB", "extra", "largest", "in all"), rows, right=(1, 2, 3))
    console.print(f"extra: the peak beyond inputs and gradients. One matrix of pairs: {mb(matrix)} MB.", style="dim")
    if skipped:
        console.print(f"dense form not run: {skipped}", style="yellow")
    for path in written:
        console.print(str(path), soft_wrap=True, markup=False)


COMMAND = Command(
    "profile",
    run,
    (options.TARGET, options.ROWS, options.COLS, options.dtype("float32"), options.out(), *options.SUBJECT),
)
