"""``monoidreduce profile``: the memory of one layer over time, forward and backward, ours and the dense form's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch

from . import report, workload
from .command import Answer, OutputFolder, dtype_name
from .measure import MemoryProfile, Runner, describe_environment, reason_dense_does_not_fit
from .report import format_mb, format_ratio, print_paths, print_table, show_progress
from .workload import Workload, report_user_errors

POINTS = 240  # of a timeline in JSON, each the highest of its span


def profile(
    target: str, rows: int, cols: int, dtype: torch.dtype, out: Path, device: torch.device, **given: Any
) -> Answer:
    """Draw a layer's memory over time, ours and the dense form's."""
    layer = workload.find(target, **given)
    report.require_matplotlib()
    folder = OutputFolder(out)
    start = time.perf_counter()
    profiles, skipped = _measure(layer, rows, cols, dtype, device)
    environment, seconds = describe_environment(device), time.perf_counter() - start
    kind = dtype_name(dtype)
    title = f"{layer.name} ({rows} × {cols}, {kind})"
    matrix = rows * cols * dtype.itemsize * (given["batch"] or 1)
    data = {
        "layer": layer.name, "rows": rows, "cols": cols, "dtype": kind, "matrix_bytes": matrix,
        "environment": vars(environment), "skipped": skipped, **{who: to_data(p) for who, p in profiles.items()},
    }  # fmt: skip
    command_line = f"monoidreduce profile {target} --rows {rows} --cols {cols} --dtype {kind}"
    origin = report.Origin(environment, seconds, command_line)
    written = folder.write(
        {
            "profile.html": render_page(title, layer, profiles, matrix, skipped, origin),
            "profile.png": report.draw_memory_png(title, profiles),
            "profile.json": json.dumps(data, indent=2),
        }
    )
    data["files"] = [str(path) for path in written]

    def show(console: Any) -> None:
        console.print(title, style="bold")
        numbers = {who: (p.extra, p.largest, p.peak.total) for who, p in profiles.items()}
        cells = [(who, *map(format_mb, sizes)) for who, sizes in numbers.items()]
        print_table(console, ("MB", "extra", "largest", "in all"), cells, right=(1, 2, 3))
        note = f"extra: the peak beyond inputs and gradients. One matrix of pairs: {format_mb(matrix)} MB."
        console.print(note, style="dim")
        if skipped:
            console.print(f"dense form not run: {skipped}", style="yellow")
        print_paths(console, written)

    return Answer(data, show)


def _measure(
    layer: Workload, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, MemoryProfile], str]:
    """The profiles "ours" and "naive" or, if the dense form is not run, the reason."""
    args = layer.inputs(rows, cols, dtype, device)
    calls, skipped = {"ours": layer.call}, "there is none beside it in the file"
    if layer.dense:
        skipped = reason_dense_does_not_fit(rows * cols, args, device)
        calls |= {} if skipped else {"naive": layer.dense}
    found = {}
    with show_progress(2 * len(calls)) as begin, report_user_errors(layer.file):
        for who, call in calls.items():
            begin(f"{who}: first run")  # which traces, plans and may fill caches
            runner = Runner(call, args, device)
            runner.run()
            begin(f"{who}: memory")
            found[who] = runner.profile_memory()
    return found, skipped


def to_data(profile: MemoryProfile) -> dict[str, Any]:
    """A profile as plain data: the peaks, and the highest moment of each of POINTS spans."""
    return {
        "extra_bytes": profile.extra,
        "peak_bytes": profile.peak.total,
        "largest_bytes": profile.largest,
        "forward_seconds": profile.forward_end,
        "seconds": profile.end,
        "timeline": [{**vars(m), "seconds": at} for at, m in report.highest_moments(profile, POINTS)],
    }


def render_page(
    title: str,
    layer: Workload,
    profiles: Mapping[str, MemoryProfile],
    matrix: int,
    skipped: str,
    origin: report.Origin,
) -> str:
    """The page. ``profiles`` has "ours", and "naive" unless ``skipped`` says why not; ``matrix`` is in bytes."""
    ours, naive = profiles["ours"], profiles.get("naive")
    share = f"{100 * ours.extra / matrix:.3g} %"
    tiles = [
        (f"{format_mb(ours.extra)} MB", "at the peak", "beyond inputs and gradients"),
        (share, "of one matrix of pairs", f"which takes {format_mb(matrix)} MB"),
    ]
    if naive is not None:
        ratio = format_ratio(naive.extra / max(1, ours.extra))
        tiles.append((ratio, "less than the dense form", "peak of extra memory"))
    code = f"<code>{escape(layer.dense_code)}</code>"
    dense = code if layer.dense_is_handwritten else "Every pair computed, and kept for autograd."
    words = {"ours": ("MonoidReduce", "Tiles of pairs, never all of them."), "naive": ("dense", dense)}
    sides = [(p, f"Memory of {layer.name}, {words[who][0]}", words[who][1]) for who, p in profiles.items()]
    parts = [
        f"<p>The dense form was not run: {escape(skipped)}.</p>" if skipped else "",
        report.make_memory_section(title, sides),
    ]
    return report.make_page(f"memory of {layer.name}", f"Memory of {title}", "", tiles, parts, origin)
