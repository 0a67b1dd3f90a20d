"""``run``: one fold over files, on the actors of a Ray cluster; goes on after any of them, or itself, was killed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..._version import __version__
from ...engines.stream import row_checksums
from ...errors import ArgumentError, MonoidReduceError, StreamError, shown
from ...plan import settings
from ...plan.schedule import Choice
from ...saved_runs import note_interrupt
from . import folds
from .schedule import Node, Schedule, Task, make_grid, save_array, write_whole
from .tables import Column, FilePart, are_files, make_table, ray
from .worker import Job, Worker, name_outputs

PATIENCE = 300.0  # seconds to wait for the first worker
TRIES = 3  # workers that one unit may lose
EVERY = 60.0  # seconds between two lines of progress, where there is no terminal
STORE = 100 * 2**20  # bytes of the object store of a cluster that run starts: little goes through it


@dataclass(frozen=True)
class Progress:
    """How far a job is: pairs done of all, seconds since it was called, workers at work and workers lost.

    >>> from monoidreduce.integrations.ray import Progress
    >>> half = Progress(pairs_done=5 * 10**9, pairs=10**10, seconds=50.0, workers=4, lost=0)
    >>> half.seconds_left, str(half)
    (50.0, '50.0% of 1e+10 pairs, 1e+08 pairs/s, 50 s left, 4 workers')
    """

    pairs_done: int
    pairs: int
    seconds: float
    workers: int
    lost: int
    pairs_before: int = 0  # done in an earlier call

    @property
    def rate(self) -> float:
        """Pairs a second, in this call."""
        return (self.pairs_done - self.pairs_before) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        return (self.pairs - self.pairs_done) / self.rate if self.rate else float("inf")

    def __str__(self) -> str:
        share = 100 * self.pairs_done / self.pairs if self.pairs else 100.0
        left = "" if self.seconds_left == float("inf") else f", {self.seconds_left:.0f} s left"
        lost = f", {self.lost} lost" if self.lost else ""
        return f"{share:.1f}% of {self.pairs:.3g} pairs, {self.rate:.3g} pairs/s{left}, {self.workers} workers{lost}"


@dataclass(frozen=True)
class Result:
    """What :func:`run` returns: the files of each output, one for each block of rows, in order.

    ``seconds``, ``lost`` (workers) and ``cpu_seconds`` (of all workers together, without their start) are of this call.

    >>> import pathlib, tempfile, numpy, torch
    >>> from monoidreduce.integrations.ray import Result
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> numpy.save(folder / "result-000000.npy", numpy.arange(3.0))
    >>> Result(folder, {"result": [folder / "result-000000.npy"]}, 3, 0.0, 0, torch.empty(0)).load()
    tensor([0., 1., 2.], dtype=torch.float64)
    """

    folder: Path
    files: Mapping[str, list[Path]]
    rows: int
    seconds: float
    lost: int
    form: Any  # an empty result, of the op's own form
    cpu_seconds: float = 0.0

    def load(self) -> Any:
        """All of it in memory, as tensors in the form that the op returns."""
        found = {n: torch.cat([torch.from_numpy(numpy.load(f)) for f in files]) for n, files in self.files.items()}
        if isinstance(self.form, Tensor):
            return found["result"]
        make: Any = type(self.form)
        if isinstance(self.form, Mapping):
            return make(found)
        return make(*found.values()) if hasattr(self.form, "_fields") else make(found.values())


def run(
    fold: Any,
    *,
    rows: Any,
    cols: Any,
    out: str | Path,
    workers: int | None = None,
    cpus: int = 1,
    gpus: float = 0,
    row_block: int | None = None,
    col_chunk: int | None = None,
    quiet: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Result:
    """Fold every row over all columns, on Ray; the result is files in the folder ``out``.

    ``fold`` is an op, or a layer that is one fold per row (``ops.knn``, ``ops.kmeans_assign``, ``ops.kernel_sum``,
    ``ops.kernel_logsumexp``); ``options`` are its other arguments. ``rows`` and ``cols`` are a path, a pattern
    (``"x/*.npy"``, in the order of the names), a list of paths, a Ray dataset or an array, the first axis being the
    rows (or columns); where the op has several parameters on a side, a mapping from their names to these, or Parquet,
    safetensors or datasets with columns of these names.

    ``workers`` actors (unless told, as many as the cluster has room for) of ``cpus`` cores and ``gpus`` GPUs each hold
    ``row_block`` rows, and read ``col_chunk`` columns at a time. Each unit of work ends with a state on disk, under
    ``out/states``; states merge in an order that the sizes alone decide. So the result has the same bits on any number
    of workers, and a worker that dies, or all of them, costs only the units under way: the same call goes on.

    Uses the Ray cluster that ``ray.init`` or ``RAY_ADDRESS`` names, else starts one on this machine and stops it again.
    All machines must see the files and ``out`` under the same paths. A bar (or a line a minute) shows how far it is,
    unless ``quiet``; ``on_progress`` is called with a :class:`Progress` after every unit.

    Returns a :class:`Result`. Raises ArgumentError, ShapeError, DTypeError and TopKError before any work, and
    StreamError for files that are damaged or change, a folder of another job, and workers that die again and again.

        found = mr_ray.run(ops.knn, rows="x/*.npy", cols="y/*.npy", k=10, out="neighbours/", workers=4)
        found.load().indices  # int64[M, 10]

    >>> from monoidreduce import ops
    >>> from monoidreduce.integrations import ray as mr_ray
    >>> mr_ray.run(ops.knn, rows="no/such/*.npy", cols="no/such/*.npy", k=10, out="neighbours/")
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ArgumentError: rows: no file fits no/such/*.npy. Give a pattern of files that are there
    """
    _check_counts(workers, cpus, gpus)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if not (are_files(rows) and are_files(cols)):
            stack.enter_context(_cluster(workers, cpus))
        job, probe, stages = _make_job(fold, rows, cols, out, cpus, gpus, row_block, col_chunk, options)
        names = list(name_outputs(probe))
        stack.enter_context(_lock(Path(out)))
        job = _begin(job)
        schedule = _find_what_is_done(job, names, stages)
        lost, used = 0, 0.0
        if not schedule.finished:
            stack.enter_context(_cluster(workers, cpus))
            actors = _Actors(job, schedule, _count_workers(workers, cpus, gpus), cpus, gpus)
            try:
                lost, used = actors.work(_Reporter(quiet, on_progress), began)
            except KeyboardInterrupt as error:
                done = f"{schedule.pairs_done:.3g} of {schedule.pairs:.3g} pairs"
                note_interrupt(error, f"states are kept in {job.states}, with {done} folded")
                raise
            finally:
                actors.stop()
        if not job.grid.rows:
            _write_nothing(job, probe)
        shutil.rmtree(job.states, ignore_errors=True)
    count = max(1, job.grid.blocks)
    files = {n: [job.output_path(n, b) for b in range(count)] for n in names}
    return Result(Path(out), files, job.grid.rows, time.monotonic() - began, lost, probe, used)


# Checks, before any work


def _check_counts(workers: Any, cpus: Any, gpus: Any) -> None:
    for name, value in (("workers", workers), ("cpus", cpus)):
        if not (name == "workers" and value is None) and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ArgumentError(detail=f"{name} was given {value!r}", fix="Give a whole number from 1")
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or gpus < 0:
        raise ArgumentError(detail=f"gpus was given {gpus!r}", fix="Give the GPUs of one worker, from 0")


def _make_job(
    fold: Any, rows: Any, cols: Any, out: Any, cpus: int, gpus: float, block: Any, chunk: Any, options: dict[str, Any]
) -> tuple[Job, Any, int]:
    """The job, its result for no rows at all, and its passes. Everything is checked: an empty block is folded here."""
    if not isinstance(out, (str, Path)):
        raise ArgumentError(detail=f"out was given {shown(out)}", fix="Give the path of a folder for the results")
    names = folds.find_names(fold)
    if not names.rows or not names.cols:
        raise ArgumentError(detail=f"{fold!r} has no {'columns' if names.rows else 'rows'}", fix="Give an op of both")
    given = set(options)
    sides = {
        side: make_table(side, value, [n for n in own if n not in given], names.optional)
        for side, value, own in (("rows", rows, names.rows), ("cols", cols, names.cols))
    }
    _check_apart(sides, Path(out))
    options = {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in options.items()}
    length = {side: len(next(iter(table.values()))) for side, table in sides.items()}
    grid = make_grid(length["rows"], length["cols"], block, chunk)
    cloudpickle = ray.cloudpickle
    found = settings.now()
    carried = {n: getattr(found, n) for n in ("engine", "precision", "strict", "budget", "skip_below")}
    portable = folds.Portable.of(fold)
    job = Job("", cloudpickle.dumps(portable), sides["rows"], sides["cols"], options, grid, str(out), carried, cpus)
    cpu = torch.device("cpu")
    probe = job.make_block({n: c.empty(0) for n, c in job.rows.items()}, 0, cpu)
    results: dict[int, list[Tensor]] = {}
    for stage in range(probe.stages):
        results[stage] = probe.close(stage, probe.fold(stage, results, [(0, probe.columns)]))
    outputs = probe.outputs(results)
    if not gpus and grid.rows and grid.cols:
        rows_here = {n: c.empty(min(grid.block, grid.rows)) for n, c in job.rows.items()}
        model = job.make_block(rows_here, 0, cpu)
        chosen = model.choose({n: c.empty(min(grid.chunk, grid.cols)) for n, c in job.cols.items()})
        job = replace(job, choices=chosen)
    return replace(job, identity=probe.name), outputs, probe.stages


def _check_apart(sides: Mapping[str, Mapping[str, Column]], out: Path) -> None:
    """Raise ArgumentError where a file that is read lies in the folder of the results, or is it. (A link in the folder
    is replaced as a link: what it leads to stays.)"""
    folder = out.resolve()
    for side, table in sides.items():
        paths = [p.path for c in table.values() for p in c.parts if isinstance(p, FilePart)]
        inside = next((p for p in paths if folder in (Path(p).resolve(), *Path(p).resolve().parents)), None)
        if inside is not None:
            raise ArgumentError(
                detail=f"{inside} of the {side} lies in out={str(out)!r}, where results are written",
                fix="Give out= a folder of its own",
            )


# The folder of a job


def _describe(job: Job) -> dict[str, Any]:
    """All that decides the result, as plain data."""
    sums = row_checksums(job.options)
    options = {n: sums.get(n, str(v)) if isinstance(v, Tensor) else repr(v) for n, v in job.options.items()}
    tables = {
        side: {n: [p.identity for p in c.parts] for n, c in table.items()}
        for side, table in (("rows", job.rows), ("cols", job.cols))
    }
    return {
        "version": __version__,
        "program": job.identity,
        "options": {n: v if isinstance(v, int) else str(v) for n, v in options.items()},
        **tables,
        "grid": asdict(job.grid),
        "settings": {n: None if v is None else str(v) for n, v in job.settings.items()},
        "threads": job.threads,
    }


def _begin(job: Job) -> Job:
    """The job with the schedules that its folder names, or a new folder; raises StreamError for another job's."""
    folder, told = Path(job.folder), _describe(job)
    path = folder / "job.json"
    choices = job.choices
    if path.exists():
        try:
            before = json.loads(path.read_text())
            chosen = before.pop("schedules")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StreamError(
                detail=f"{path} cannot be read: {error}", fix="Delete the folder, or give another one, to begin anew"
            ) from None
        if before != told:
            raise StreamError(
                detail=f"{folder} holds another job: {_difference(before, told)}",
                fix="Give another folder, or delete this one to begin anew",
            )
        choices = None if chosen is None else [Choice.from_dict(c) for c in chosen]
    elif any(n.name != ".lock" for n in folder.iterdir()):
        raise StreamError(
            detail=f"{folder} holds files, but no job of run", fix="Give a folder that is empty or not there yet"
        )
    schedules = None if choices is None else [c.as_dict() for c in choices]
    text = json.dumps({**told, "schedules": schedules}, indent=1)
    if not path.exists():
        write_whole(path, lambda file: file.write(text.encode()))
    Path(job.states).mkdir(exist_ok=True)
    return replace(job, choices=choices, identity=hashlib.sha256(text.encode()).hexdigest()[:16])


_GRID_OPTIONS = {"block": "row_block", "chunk": "col_chunk"}


def _difference(before: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """The first thing in which two jobs differ."""
    for side in ("rows", "cols"):
        for name in sorted({*before.get(side, {}), *told[side]}):
            one, other = before.get(side, {}).get(name), told[side].get(name)
            if one == other:
                continue
            for a, b in zip(one or [], other or [], strict=False):
                if a != b:
                    same = a[0] == b[0] and a[0] != "object"
                    return f"{b[0]} has changed since" if same else f"other {side} for {name}"
            return f"other {side} for {name}"
    for key in ("options", "grid", "settings"):
        old, new = before.get(key) or {}, told[key]
        for name in dict.fromkeys((*old, *new)):
            one, other = (v.get(name, "not given") for v in (old, new))
            if one != other:
                if key == "options" and isinstance(one, int) and isinstance(other, int):  # checksums of tensors
                    return f"{name} has other values"
                return f"{_GRID_OPTIONS.get(name, name)} was {one}, and is {other}"
    for key in ("threads", "version"):
        if before.get(key) != told[key]:
            return f"its {key} was {before.get(key)}, and is {told[key]}"
    if before.get("program") != told["program"]:
        return "its op, or the type or features of its arguments, is another"
    return "it is described otherwise"


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The folder, made if it is not there, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115 (held until the job ends)
    except OSError as error:
        raise StreamError(
            detail=f"{folder} cannot be written: {error.strerror}", fix="Give a folder that can be written to"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamError(
                detail=f"another process is running a job in {folder}", fix="Wait for it, or give another folder"
            ) from None
        yield


def _find_what_is_done(job: Job, names: list[str], stages: int) -> Schedule:
    """What earlier calls have left."""
    grid, folder = job.grid, Path(job.folder)
    there = {p.name for p in folder.iterdir()}
    written = [b for b in range(grid.blocks) if all(job.output_path(n, b).name in there for n in names)]
    states: list[Node] = []
    closed: dict[int, int] = {}
    for path in job.states.iterdir():
        if path.name.endswith(".part"):
            path.unlink(missing_ok=True)
        elif path.name.startswith("results-"):
            stage, block = (int(part.strip("pasrow")) for part in path.stem.split("-")[1:])
            closed[block] = max(closed.get(block, 0), stage + 1)
        else:
            stage, block, level, index = (int(part.strip("pasrowlev")) for part in path.stem.split("-"))
            states.append(Node(stage, block, level, index))
    return Schedule(grid, stages, written, closed, states)


def _write_nothing(job: Job, probe: Any) -> None:
    for name, value in name_outputs(probe).items():
        save_array(job.output_path(name, 0), value)


# Workers


def start_here(cores: int, folder: str) -> None:
    """Start Ray on this machine: no dashboard, a small object store, its files in ``folder``.

    Ray gives its own processes 30 s; on a machine that is very busy a second attempt often succeeds.
    """
    for attempt in (1, 2, 3):
        try:
            ray.init(
                address="local",
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=STORE,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=folder,
            )
            return
        except Exception as error:  # Ray raises a bare Exception here
            ray.shutdown()
            if attempt == 3 or "timed out during startup" not in str(error):
                raise StreamError(
                    detail=f"Ray cannot be started on this machine: {_first_line(error)}",
                    fix="Try `ray start --head` by hand, or name a cluster that runs in RAY_ADDRESS",
                ) from error


@contextlib.contextmanager
def _cluster(workers: int | None, cpus: int) -> Iterator[None]:
    """Ray: as it was initialised, or as RAY_ADDRESS says, else on this machine for as long as the job takes."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = None
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, configure_logging=False)
    else:
        folder = tempfile.mkdtemp(prefix="mr-ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        start_here(cpus * (workers or max(1, (os.cpu_count() or 1) // cpus)), folder)
    try:
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _count_workers(workers: int | None, cpus: int, gpus: float) -> int:
    """As many as asked for; otherwise as many as the cluster has room for."""
    there = ray.cluster_resources()
    room = [there.get("CPU", 0) / cpus, *([there.get("GPU", 0) / gpus] if gpus else [])]
    if min(room) < 1:
        raise ArgumentError(
            detail=f"no worker of {cpus} cores and {gpus} GPUs fits in the cluster, which has "
            f"{there.get('CPU', 0):.0f} cores and {there.get('GPU', 0):.0f} GPUs",
            fix="Ask for less with cpus=... and gpus=..., or start a larger cluster",
        )
    return workers or int(min(room))


class _Actors:
    """The workers of a job, and what each of them does."""

    def __init__(self, job: Job, schedule: Schedule, count: int, cpus: int, gpus: float):
        self.job, self.schedule, self.count = job, schedule, count
        self.make = ray.remote(Worker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self.shared = ray.put(job)
        self.all: dict[Any, int | None] = {}  # each actor, and the block that it holds
        self.idle: list[Any] = []
        self.starting: dict[Any, Any] = {}  # a reference to wait for: the actor
        self.doing: dict[Any, tuple[Any, Task]] = {}
        self.failures: dict[Task, int] = {}
        self.lost, self.used = 0, 0.0

    def start(self) -> None:
        units = len(self.schedule.running) + self.schedule.grid.blocks * self.schedule.grid.stretches
        while len(self.all) < min(self.count, units):
            actor = self.make.remote(self.shared)
            self.all[actor] = None
            self.starting[actor.ready.remote()] = actor

    def stop(self) -> None:
        for actor in self.all:
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def work(self, report: _Reporter, began: float) -> tuple[int, float]:
        """Run until nothing is left; returns how many workers were lost, and seconds of CPU time."""
        before = self.schedule.pairs_done
        with report:
            while not self.schedule.finished:
                self.start()
                self.assign()
                ended, _ = ray.wait([*self.doing, *self.starting], num_returns=1, timeout=5.0)
                for reference in ended:
                    self.receive(reference)
                if not self.doing and not self.idle and time.monotonic() - began > PATIENCE and self.starting:
                    raise StreamError(
                        detail=f"no worker has started in {PATIENCE:.0f} s",
                        fix="See `ray status`: is the cluster full?",
                    )
                working = len(self.all) - len(self.starting)
                seconds = time.monotonic() - began
                done, pairs = self.schedule.pairs_done, self.schedule.pairs
                report(Progress(done, pairs, seconds, working, self.lost, before), bool(ended))
        return self.lost, self.used

    def assign(self) -> None:
        still_idle = []
        for actor in self.idle:
            others = {b for a, b in self.all.items() if a is not actor and b is not None}
            task = self.schedule.next(self.all[actor], others)
            if task is None:
                still_idle.append(actor)
                continue
            if task.kind != "merge":
                self.all[actor] = task.node.block
            self.doing[getattr(actor, task.kind).remote(task.node)] = actor, task
        self.idle = still_idle

    def receive(self, reference: Any) -> None:
        """A unit has ended, a worker has started, or one of them has died."""
        task: Task | None = None
        if reference in self.starting:
            actor = self.starting.pop(reference)
        else:
            actor, task = self.doing.pop(reference)
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, MonoidReduceError) else error) from None
        except ray.exceptions.RayError as error:
            self.replace(actor, task, error)
            return
        self.idle.append(actor)
        if task is None:
            return
        if answer[0] == "done":
            self.used += answer[1]
            self.schedule.complete(task)
            return
        path = Path(answer[1])
        path.unlink(missing_ok=True)
        nodes = self.schedule.grid.children(task.node) if task.kind == "merge" else (task.node,)
        damaged = [n for n in nodes if self.job.state_path(n) == path]
        if damaged:
            self.schedule.find_damaged(task, damaged[0])
        else:
            self.schedule.begin_again(task)

    def replace(self, actor: Any, task: Task | None, error: Exception) -> None:
        """A worker has died: forget it; what it did is to be done again. ``start`` makes another one."""
        self.lost += 1
        del self.all[actor]
        with contextlib.suppress(Exception):
            ray.kill(actor)
        if task is None:
            if self.lost > TRIES * self.count + 10:
                raise StreamError(detail=f"workers die as they start: {_first_line(error)}", fix=_DYING) from error
            return
        self.schedule.lose(task)
        self.failures[task] = self.failures.get(task, 0) + 1
        if self.failures[task] > TRIES:
            first, last = self.schedule.grid.rows_of(task.node.block)
            raise StreamError(
                detail=f"a unit ({task.kind}) of rows {first} to {last} has lost {TRIES + 1} workers: "
                f"{_first_line(error)}",
                fix=_DYING,
            ) from error


_DYING = "If memory is short, give a smaller row_block or col_chunk, or more cpus to each worker; the call can go on"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Reporter:
    """Shows progress: a bar at a terminal with rich, else a line now and then; and tells whoever asked."""

    def __init__(self, quiet: bool, tell: Callable[[Progress], None] | None):
        self.quiet, self.tell, self.said = quiet, tell, time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> _Reporter:
        if not self.quiet and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn
                from rich.progress import Progress as Bar

                columns = (BarColumn(), TextColumn("{task.description}"))
                self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
                self.bar.start()
                self.task = self.bar.add_task("starting workers", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, progress: Progress, news: bool) -> None:
        if news and self.tell is not None:
            self.tell(progress)
        if self.bar is not None:
            self.bar.update(self.task, total=progress.pairs, completed=progress.pairs_done, description=str(progress))
        elif not self.quiet and time.monotonic() - self.said > EVERY:
            self.said = time.monotonic()
            print(f"monoidreduce: {progress}", file=sys.stderr, flush=True)
