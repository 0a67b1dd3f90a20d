"""``monoidreduce bench``: layers and every installed peer, over sizes; tables, pictures and a page."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from . import measure, report, workload
from .command import Answer, CommandError, OutputFolder, dtype_name
from .layers import LAYERS
from .measure import Outcome, Runner
from .report import format_number, format_ratio, geometric_mean, print_paths, print_table, show_progress
from .workload import Workload, describe_error

# The libraries that ``bench`` compares a layer with, one row of PEERS each.
#
# A peer gives a function of the layer's own arguments: q [M, D], k and v [N, D] for attention; x [M, D], w [N, D] and a
# label per row for the cross-entropy; x, y and b for the kernel sum. Every other layer is compared with its dense form,
# as written and compiled. A peer that is not installed is reported, with the command that installs it.

Call = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """Another implementation: ``make(layer)`` returns the function to measure."""

    key: str  # its name on the command line
    name: str
    layers: Sequence[str] | None  # keys of the layers it implements; None for any layer with a dense form
    make: Callable[[Workload], Call]
    package: str = ""  # the module that must be importable
    install: str = ""  # what pip calls it, if that differs
    gpu: bool = False  # True if it runs on GPUs only
    missing: Callable[[Workload, torch.device], str] = lambda layer, device: ""

    def fits(self, layer: Workload) -> bool:
        return layer.dense is not None if self.layers is None else layer.key in self.layers

    def reason(self, layer: Workload, device: torch.device) -> str:
        """Why it cannot be measured here; "" if it can."""
        if self.gpu and device.type != "cuda":
            return "runs on GPUs only"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.install or self.package}"
        return self.missing(layer, device)


def find_cpp_compiler() -> str | None:
    """The path of a C++ compiler, which torch.compile needs on a CPU."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "cl"))), None)


def _reason_not_compiled(layer: Workload, device: torch.device) -> str:
    if not layer.dense_is_handwritten:
        return f"needs a dense form written by hand: put {layer.name}_dense into the file"
    return "needs a C++ compiler" if device.type == "cpu" and find_cpp_compiler() is None else ""


def _add_head_axes(call: Call) -> Call:
    """A function of [batch, heads, length, features] as a function of matrices."""
    return lambda q, k, v: call(q[None, None], k[None, None], v[None, None], scale=1.0)[0, 0]


def _make_liger(layer: Workload) -> Call:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    return lambda x, w, target: module.LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]


def _make_torch_loss(layer: Workload) -> Call:
    options = torch.nn.LinearCrossEntropyOptions()  # chunked; without options it builds the logits
    return lambda x, w, target: F.linear_cross_entropy(x, w, target, options=options)


def _make_keops(layer: Workload) -> Call:
    lazy = importlib.import_module("pykeops.torch").LazyTensor

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (lazy(q[:, None]) * lazy(k[None])).sum(-1)
        return scores.sumsoftmaxweight(lazy(v[None]), axis=1)

    def kernel_sum(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return (-((lazy(x[:, None]) - lazy(y[None])) ** 2).sum(-1) / 2).exp() @ b

    return {"attention": attention, "kernel-sum": kernel_sum}[layer.key]


PEERS = (
    Peer("naive", "naive torch", None, lambda layer: layer.dense or layer.call),
    Peer(
        "compile", "torch.compile", None, lambda layer: torch.compile(layer.dense, dynamic=False),
        missing=_reason_not_compiled,
    ),
    Peer("sdpa", "SDPA", ("attention",), lambda layer: _add_head_axes(F.scaled_dot_product_attention)),
    Peer(
        "flex", "FlexAttention", ("attention",),
        lambda layer: _add_head_axes(torch.compile(flex_attention, dynamic=False)), missing=_reason_not_compiled,
    ),
    Peer(
        "torch-ce", "F.linear_cross_entropy", ("cross-entropy",), _make_torch_loss,
        missing=lambda layer, device: "" if hasattr(F, "linear_cross_entropy") else "this torch does not have it yet",
    ),
    Peer("liger", "Liger", ("cross-entropy",), _make_liger, "liger_kernel", "liger-kernel", gpu=True),
    Peer(
        "cce", "Cut Cross-Entropy", ("cross-entropy",),
        lambda layer: importlib.import_module("cut_cross_entropy").linear_cross_entropy,
        "cut_cross_entropy", "cut-cross-entropy", gpu=True,
    ),
    Peer("keops", "KeOps", ("attention", "kernel-sum"), _make_keops, "pykeops"),
)  # fmt: skip


DEFAULT_LAYERS = ("attention", "cross-entropy", "mlp", "kernel-sum")
DIVISORS = (4, 2, 1)  # a ready-made layer is measured at its full size divided by these,
SIZES = ((512, 512), (1024, 1024), (2048, 2048))  # a layer in a file at these
LEAST_RUNS, MOST_RUNS = 2, 20  # timed runs of each contender


@dataclass(frozen=True)
class Measurement:
    """One contender on one layer at one size. None: not measured; ``note`` says why, or what to know."""

    layer: str
    rows: int
    cols: int
    who: str
    forward_ms: float | None = None
    total_ms: float | None = None
    extra_bytes: int | None = None
    error: float | None = None
    note: str = ""

    @property
    def ms(self) -> float | None:
        """The time to compare: forward and backward if that was measured, else the forward."""
        return self.forward_ms if self.total_ms is None else self.total_ms


def bench(
    layers: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...],
    peers: tuple[str, ...],
    dtype: torch.dtype,
    seconds: float,
    out: Path,
    device: torch.device,
    **given: Any,
) -> Answer:
    """Measure layers beside every peer that is installed."""
    chosen = _find_layers(tuple(LAYERS) if layers == ("all",) else layers or DEFAULT_LAYERS, given)
    report.require_matplotlib()
    folder = OutputFolder(out)
    start = time.perf_counter()
    contests = [(layer, *_find_contenders(layer, _find_peers(peers), device)) for layer in chosen]
    rows = _measure_all(contests, sizes, dtype, device, seconds)
    missing = {who: why for _, _, absent in contests for who, why in absent.items()}
    environment, took = measure.describe_environment(device), time.perf_counter() - start
    kind = dtype_name(dtype)
    how = f"{kind} on the {'GPU' if device.type == 'cuda' else 'CPU'}, the best of several runs taken in turns."
    command_line = " ".join(["monoidreduce bench", *layers, *(f"--size {r}x{c}" for r, c in sizes), f"--dtype {kind}"])
    data = {
        "environment": vars(environment), "command": command_line, "dtype": kind, "device": str(device),
        "rows": [vars(r) for r in rows], "not_measured": missing, "seconds": took,
    }  # fmt: skip
    origin = report.Origin(environment, took, command_line)
    panels = {
        f"{layer}: {what}": (unit, curves)
        for layer, own in _group_by_layer(rows).items()
        for what, unit, curves in _list_charts(own)
    }
    written = folder.write(
        {
            "bench.html": render_page(rows, missing, how, origin),
            "bench.md": render_markdown(rows, missing, how, origin),
            "bench.json": json.dumps(data, indent=2),
            "bench.png": report.draw_curves_png(how, panels),
        }
    )
    data["files"] = [str(path) for path in written]
    return Answer(data, lambda console: print_results(console, rows, missing, written))


def _find_layers(specs: Sequence[str], given: dict[str, Any]) -> list[Workload]:
    """The layers. Two layers with one name are named by what was typed."""
    specs = list(dict.fromkeys(specs))
    layers = [workload.find(spec, **given) for spec in specs]
    names = [layer.name for layer in layers]
    return [
        replace(layer, name=spec) if names.count(layer.name) > 1 else layer
        for spec, layer in zip(specs, layers, strict=True)
    ]


def _find_peers(keys: tuple[str, ...]) -> Sequence[Peer]:
    known = {peer.key: peer for peer in PEERS}
    unknown = [key for key in keys if key not in (*known, "none")]
    if unknown:
        raise CommandError(f"--peer {unknown[0]}: there is no such peer. Use none or one of {', '.join(known)}")
    return [known[key] for key in keys if key in known] if keys else PEERS


def _find_contenders(
    layer: Workload, peers: Sequence[Peer], device: torch.device
) -> tuple[dict[str, Call], dict[str, str]]:
    """The functions to measure by name, and the peers that cannot be measured with the reason."""
    fitting = [peer for peer in peers if peer.fits(layer)]
    missing = {peer.name: why for peer in fitting if (why := peer.reason(layer, device))}
    calls = {"ours": layer.call}
    for peer in fitting:
        if peer.name not in missing:
            try:
                calls[peer.name] = peer.make(layer)
            except Exception as error:  # an installation that does not import
                missing[peer.name] = f"{type(error).__name__}: {error}"[:160]
    return calls, missing


# Measuring --------------------------------------------------------------------------------------------------------


def _measure_all(
    contests: Sequence[tuple[Workload, dict[str, Call], dict[str, str]]],
    sizes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> list[Measurement]:
    jobs = [
        (layer, calls, size, k == 0)
        for layer, calls, _ in contests
        for k, size in enumerate(sorted(sizes or _default_sizes(layer)))
    ]
    rows: list[Measurement] = []
    steps = sum(2 + 2 * len(calls) for _, calls, _, _ in jobs)
    with show_progress(steps) as begin, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what compilers print about themselves
        for layer, calls, size, is_smallest in jobs:
            tell = lambda stage, at=f"{layer.name} {size[0]} × {size[1]}": begin(f"{at}, {stage}")
            rows += measure_contenders(layer, calls, size, dtype, device, seconds, is_smallest, tell)
    return rows


def _default_sizes(layer: Workload) -> Sequence[tuple[int, int]]:
    if layer.key not in LAYERS:
        return SIZES
    full = LAYERS[layer.key].full
    return [(full.rows // divisor, full.cols // divisor) for divisor in DIVISORS]


def measure_contenders(
    layer: Workload,
    contenders: Mapping[str, Call],
    size: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    with_error: bool,
    tell: Callable[[str], None],
) -> list[Measurement]:
    """Measure every contender at one size; ``with_error`` compares them with the dense form in float64.

    They are timed in turns, after a first run that is not counted. A contender that fails, or has no backward, is
    reported in its note and does not stop the others.
    """
    args = layer.inputs(*size, dtype, device)
    dense_problem = measure.reason_dense_does_not_fit(size[0] * size[1], args, device)
    truth = None
    if with_error and layer.dense is not None and not dense_problem:
        tell("the truth in float64")
        truth = measure.run_once(layer.dense, measure.to_float64(args))
    rows: dict[str, Measurement] = {}
    runners: dict[str, Runner] = {}
    for who, call in contenders.items():
        tell(f"{who}: first run")
        rows[who] = Measurement(layer.name, *size, who)
        if dense_problem and who in ("naive torch", "torch.compile"):
            rows[who] = replace(rows[who], note=dense_problem)
            continue
        rows[who], runner = _run_first(rows[who], call, args, device, truth)
        if runner is not None:
            runners[who] = runner
    tell("time")
    measure.time_in_turns(list(runners.values()), seconds * len(runners), LEAST_RUNS, MOST_RUNS)
    for who, runner in runners.items():
        tell(f"{who}: memory")
        rows[who] = replace(
            rows[who],
            forward_ms=runner.forward_seconds * 1e3,
            total_ms=runner.seconds * 1e3 if runner.backward else None,
            extra_bytes=runner.peak_extra_bytes(),
        )
    return list(rows.values())


def _run_first(
    row: Measurement, call: Call, args: tuple[Any, ...], device: torch.device, truth: Outcome | None
) -> tuple[Measurement, Runner | None]:
    """Run once with the backward or, if that fails, without. Returns no runner if both fail."""
    problem = ""
    for backward in (True, False):
        runner = Runner(call, args, device, backward)
        try:
            outcome = runner.run()
        except Exception as error:  # a peer may fail in any way
            problem = problem or describe_error(error)[:160]
            continue
        runner.backward = bool(outcome.gradients)
        # Two samplers draw differently, so results that are indices are not compared.
        found = None if truth is None or outcome.discrete else outcome.error(truth)
        return replace(row, error=found, note=f"forward only: {problem}" if problem else ""), runner
    return replace(row, note=f"failed: {problem}"), None


# Results: as text, in the terminal, as Markdown and as a page -----------------------------------------------------

HEADINGS = ("size", "contender", "forward, ms", "forward and backward, ms", "extra, MB", "error", "note")


def _format(row: Measurement) -> tuple[str, ...]:
    """A row as text, in the order of HEADINGS."""
    number = lambda value, unit=1.0: "" if value is None else format_number(value / unit)
    return (
        f"{row.rows} × {row.cols}",
        row.who,
        number(row.forward_ms),
        number(row.total_ms),
        number(row.extra_bytes, 1e6),
        "" if row.error is None else f"{row.error:.1e}",
        row.note,
    )


def _group_by_layer(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        found.setdefault(row.layer, []).append(row)
    return found


def _list_charts(rows: Sequence[Measurement]) -> list[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    """The charts of one layer over its number of pairs: (what is shown, its unit, a curve for each contender)."""
    values: dict[tuple[str, str], Callable[[Measurement], float | None]] = {
        ("time", "ms"): lambda r: r.ms,
        ("memory", "MB"): lambda r: None if r.extra_bytes is None else max(r.extra_bytes, 1) / 1e6,
    }
    charts = []
    for (what, unit), value in values.items():
        found: dict[str, list[tuple[float, float]]] = {"ours": []}  # the first curve
        for row in rows:
            if (y := value(row)) is not None:
                found.setdefault(row.who, []).append((float(row.rows * row.cols), y))
        if curves := {who: points for who, points in found.items() if points}:
            charts.append((what, unit, curves))
    return charts


def print_results(
    console: Any, rows: Sequence[Measurement], missing: Mapping[str, str], written: Sequence[Path]
) -> None:
    headings = ("size", "contender", "forward ms", "both ms", "extra MB", "error")
    for layer, own in _group_by_layer(rows).items():
        console.print(layer, style="bold", markup=False)
        print_table(console, headings, [_format(r)[: len(headings)] for r in own], right=(2, 3, 4, 5))
        for row in own:
            if row.note:
                console.print(f"{row.who} at {row.rows} × {row.cols}: {row.note}", style="yellow", markup=False)
        console.print()
    for who, why in missing.items():
        console.print(f"{who} not measured: {why}", style="dim", markup=False)
    print_paths(console, written)


def render_markdown(rows: Sequence[Measurement], missing: Mapping[str, str], how: str, origin: report.Origin) -> str:
    """The tables in Markdown."""
    environment = origin.environment
    machine = environment.gpu or f"{environment.cpu}, {environment.threads}"
    where = f"{environment.date}; {machine}; torch {environment.torch}, monoidreduce {environment.version}"
    parts = [f"# Benchmark\n\n{where}\n\n{how}\n\n`{origin.command_line}`"]
    for layer, own in _group_by_layer(rows).items():
        table = [HEADINGS, tuple("---" for _ in HEADINGS), *map(_format, own)]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in table]
        parts.append(f"## {layer}\n\n" + "\n".join(lines))
    if missing:
        parts.append("Not measured: " + "; ".join(f"{who} ({why})" for who, why in missing.items()) + ".")
    return "\n\n".join(parts) + "\n"


def render_page(rows: Sequence[Measurement], missing: Mapping[str, str], how: str, origin: report.Origin) -> str:
    """The page, a function of the rows alone."""
    tiles = []
    for who, speed, memory in compare_with_ours(rows):
        less = f"{format_ratio(memory)} less" if memory >= 1 else f"{format_ratio(1 / memory)} more"
        tiles.append((format_ratio(speed), f"the speed of {escape(who)}", f"{less} memory"))
    parts = [_make_section(layer, own) for layer, own in _group_by_layer(rows).items()]
    if missing:
        listed = "\n".join(f"<li>{escape(who)}: {escape(why)}</li>" for who, why in missing.items())
        parts.append(report.make_section("Not measured", f"<ul>\n{listed}\n</ul>"))
    lead = f'<p class="lead">{escape(how)}</p>'
    return report.make_page("the benchmark", "MonoidReduce and its peers", lead, tiles, parts, origin)


def compare_with_ours(rows: Sequence[Measurement]) -> list[tuple[str, float, float]]:
    """For each peer, the geometric means of its time and memory divided by ours, where both were measured.

    Where only one of the two has a backward, their forwards are compared.
    """
    ours = {(r.layer, r.rows, r.cols): r for r in rows if r.who == "ours" and r.ms}
    found = []
    for who in dict.fromkeys(r.who for r in rows if r.who != "ours"):
        pairs = [(r, ours[key]) for r in rows if r.who == who and r.ms and (key := (r.layer, r.rows, r.cols)) in ours]
        alike = [(r, o) for r, o in pairs if (r.total_ms is None) == (o.total_ms is None)]
        compared = [(r, o, "ms") for r, o in alike] or [(r, o, "forward_ms") for r, o in pairs]
        if compared:
            times = geometric_mean([getattr(r, field) / getattr(o, field) for r, o, field in compared])
            sizes = [max(r.extra_bytes or 0, 1) / max(o.extra_bytes or 0, 1) for r, o, _ in compared]
            found.append((who, times, geometric_mean(sizes)))
    return found


def _make_section(layer: str, rows: Sequence[Measurement]) -> str:
    """One layer: its charts, their legend and its table."""
    charts = _list_charts(rows)
    figures = [
        (
            report.draw_curves(curves, unit, escape(f"{what} of {layer} over the number of pairs")),
            f"<b>{escape(layer)}: {what}</b>, {unit}; both axes logarithmic.",
        )
        for what, unit, curves in charts
    ]
    names = dict.fromkeys(who for _, _, curves in charts for who in curves)
    entries = [report.make_legend_entry(f"k{k % report.CURVE_STYLES}", escape(who)) for k, who in enumerate(names)]
    headings = HEADINGS if any(r.note for r in rows) else HEADINGS[:-1]
    return report.make_section(
        layer,
        f'<p class="key">{" ".join(entries)}</p>',
        report.make_figures(figures),
        report.make_table(headings, [_make_row(r, headings) for r in rows], "numbers"),
    )


def _make_row(row: Measurement, headings: Sequence[str]) -> str:
    size, *rest = (escape(c) for c in _format(row)[: len(headings)])
    cells = "".join(f'<td data-label="{h}">{c}</td>' for h, c in zip(headings[1:], rest, strict=True))
    kind = ' class="us"' if row.who == "ours" else ""
    return f'<tr{kind}><th scope="row">{size}</th>{cells}</tr>'
