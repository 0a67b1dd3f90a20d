"""``monoidreduce bench``: layers beside every peer that is installed, over sizes; tables, pictures and a page."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from . import contest, files, options, pictures, report_bench, subject, terminal
from .command import Answer, Command, CommandError
from .contest import Row
from .environment import surroundings
from .layers import NAMED
from .peers import PEERS, Peer
from .subject import Subject

DEFAULT = ("attention", "cross-entropy", "mlp", "kernel-sum")
SWEEP = (4, 2, 1)  # a ready-made layer's own size, divided by these
SIZES = ((512, 512), (1024, 1024), (2048, 2048))  # of a layer in a file


def run(
    layers: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...],
    peers: tuple[str, ...],
    dtype: torch.dtype,
    seconds: float,
    out: Path,
    device: torch.device,
    **given: Any,
) -> Answer:
    """Measure layers beside every peer that is installed.

    LAYER is FILE.py:NAME or a ready-made layer: {layers}; or "all" of these.

    Naive torch, torch.compile, SDPA, FlexAttention, F.linear_cross_entropy, Liger, Cut Cross-Entropy and KeOps are
    measured where they have a function for the layer, at every size: the best time of several, forward and both ways,
    the peak of the extra memory, and the error against float64 at the smallest size. Writes bench.html, bench.md,
    bench.png and bench.json.
    """
    chosen = _chosen(tuple(NAMED) if layers == ("all",) else layers or DEFAULT, given)
    pictures.require()
    folder = files.folder(out)
    start = time.perf_counter()
    contests = [(layer, *_contenders(layer, _peers(peers), device)) for layer in chosen]
    rows = _measured(contests, sizes, dtype, device, seconds)
    missing = {who: why for _, _, left in contests for who, why in left.items()}
    environment, took = surroundings(device), time.perf_counter() - start
    kind = str(dtype)[6:]
    how = f"{kind} on the {'GPU' if device.type == 'cuda' else 'CPU'}, the best of several runs taken in turns."
    command = " ".join(["monoidreduce bench", *layers, *(f"--size {r}x{c}" for r, c in sizes), f"--dtype {kind}"])
    told = (rows, missing, environment, how, command)
    data = {
        "environment": vars(environment), "command": command, "dtype": kind, "device": str(device),
        "rows": [vars(r) for r in rows], "not_measured": missing, "seconds": took,
    }  # fmt: skip
    written = [
        files.write(folder / "bench.html", report_bench.render(*told, took)),
        files.write(folder / "bench.md", report_bench.markdown(*told)),
        files.write(folder / "bench.json", json.dumps(data, indent=2)),
        files.write(folder / "bench.png", pictures.curves(how, report_bench.panels(rows))),
    ]
    data["files"] = [str(path) for path in written]
    return Answer(data, lambda console: _show(console, rows, missing, written))


def _chosen(specs: Sequence[str], given: dict[str, Any]) -> list[Subject]:
    """The layers; of two with one name, each goes by what was typed."""
    found = [subject.resolved(spec, **given) for spec in dict.fromkeys(specs)]
    names = [layer.name for layer in found]
    return [
        replace(layer, name=spec) if names.count(layer.name) > 1 else layer
        for spec, layer in zip(dict.fromkeys(specs), found, strict=True)
    ]


def _peers(keys: tuple[str, ...]) -> Sequence[Peer]:
    known = {peer.key: peer for peer in PEERS}
    unknown = [key for key in keys if key not in (*known, "none")]
    if unknown:
        raise CommandError(f"--peer {unknown[0]}: there is no such peer. Use none or one of {', '.join(known)}")
    return [known[key] for key in keys if key in known] if keys else PEERS


def _contenders(layer: Subject, peers: Sequence[Peer], device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Who is measured, by name, and who is not and why."""
    fitting = [peer for peer in peers if peer.fits(layer)]
    missing = {peer.name: why for peer in fitting if (why := peer.reason(layer, device))}
    found = {"ours": layer.call}
    for peer in fitting:
        if peer.name not in missing:
            try:
                found[peer.name] = peer.make(layer)
            except Exception as error:  # an installation that does not import
                missing[peer.name] = f"{type(error).__name__}: {error}"[:160]
    return found, missing


def _measured(
    contests: Sequence[tuple[Subject, dict[str, Any], dict[str, str]]],
    sizes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> list[Row]:
    jobs = [
        (layer, calls, size, k == 0)
        for layer, calls, _ in contests
        for k, size in enumerate(sorted(sizes or _sweep(layer)))
    ]
    rows: list[Row] = []
    with terminal.progress(sum(2 + 2 * len(calls) for _, calls, _, _ in jobs)) as begin, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what compilers say of themselves
        for layer, calls, size, smallest in jobs:
            tell = lambda stage, at=f"{layer.name} {size[0]} × {size[1]}": begin(f"{at}, {stage}")
            rows += contest.measure(layer, calls, size, dtype, device, seconds, smallest, tell)
    return rows


def _sweep(layer: Subject) -> Sequence[tuple[int, int]]:
    if layer.key not in NAMED:
        return SIZES
    full = NAMED[layer.key].full
    return [(full.rows // part, full.cols // part) for part in SWEEP]


def _show(console: Any, rows: Sequence[Row], missing: Mapping[str, str], written: Sequence[Path]) -> None:
    headings = ("size", "contender", "forward ms", "both ms", "extra MB", "error")
    for layer, own in report_bench.by_layer(rows).items():
        console.print(layer, style="bold", markup=False)
        table = [report_bench.cells(r)[: len(headings)] for r in own]
        terminal.table(console, headings, table, right=(2, 3, 4, 5))
        for row in own:
            if row.note:
                console.print(f"{row.who} at {row.rows} × {row.cols}: {row.note}", style="yellow", markup=False)
        console.print()
    for who, why in missing.items():
        console.print(f"{who} not measured: {why}", style="dim", markup=False)
    for path in written:
        console.print(str(path), soft_wrap=True, markup=False)


run.__doc__ = str(run.__doc__).replace("{layers}", ", ".join(NAMED))

COMMAND = Command(
    "bench",
    run,
    (
        click.Argument(["layers"], nargs=-1, metavar="[LAYER]..."),
        click.Option(["--size", "sizes"], type=options.SizeType(), multiple=True, help="ROWSxCOLS; may be given again"),
        click.Option(
            ["--peer", "peers"], multiple=True, metavar="PEER",
            help=f"measure beside this one only; may be given again: none, {', '.join(p.key for p in PEERS)}",
        ),
        options.dtype("float32"),
        click.Option(
            ["--seconds"], type=click.FloatRange(min=0), default=1.0, show_default=True,
            help="time to spend on the runs of each contender at each size",
        ),
        options.out(),
        *options.SUBJECT,
    ),
)  # fmt: skip
