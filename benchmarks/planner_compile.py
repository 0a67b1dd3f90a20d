"""All kernels that ``planner.py`` will try, compiled beforehand by many processes: Triton's cache on disk holds them.

A process takes one program, runs its defaults at every shape and lists its candidates, every kernel once; then all
processes compile a few of them at a time. What fails here is met again, and shown, where it is timed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import time
from concurrent.futures.process import BrokenProcessPool

import torch

from monoidreduce import tuning
from monoidreduce.engines import auto
from monoidreduce.plan import candidates
from monoidreduce.plan.candidates import Case
from monoidreduce.plan.schedule import Choice

from .planner_case import PASSES, folds, following, varied, ways
from .planner_works import WORKS, Size, Work

Wanted = list[tuple[Size, str, Choice]]  # a shape, a fold by name, and what to run it by
_EACH = 3  # candidates that a process compiles at a time


@functools.cache
def _recorded(work: int, size: Size, device: str) -> dict[str, tuple[tuning.Session, tuning.FoldRun]]:
    with following(PASSES):
        return {s.case.name: (s, call) for s, call in folds(WORKS[work], WORKS[work].args(size, device))}


def listed(device: str, work: int, sizes: list[Size]) -> Wanted:
    """The candidates of a program at all its shapes, every kernel once."""
    found: dict[tuple, tuple[Size, str, Choice]] = {}
    for size in sizes:
        for name, (session, _) in _recorded(work, size, device).items():
            for way in ways(session.case):
                for choice in varied(session.case, way):
                    found.setdefault(_kernel(session.case, way, choice), (size, name, choice))
    return list(found.values())


def _kernel(case: Case, way: str | None, choice: Choice) -> tuple:
    """What is compiled for a candidate: numbers of parts, and rooms, are told when it runs."""
    tile = choice.tile(way) if way else None
    if way is None or tile is None:
        return case.name, choice.schedule
    return case.name, way, tile[:4], candidates.count_splits(case, way, tile) > 1, tile[5:]


def compiled(device: str, work: int, wanted: Wanted) -> None:
    """Run some candidates of a program once."""
    for size, name, choice in wanted:
        _, call = _recorded(work, size, device)[name]  # with gradients
        with contextlib.suppress(Exception), torch.no_grad():
            auto.run_choice(choice, *call)
    if device == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()


def compile_all(given: list[tuple[Work, Size]], device: str, workers: int, seconds: float) -> int:
    """All candidates of all cases; how many were begun within these seconds."""
    began = time.monotonic()
    sizes: dict[int, list[Size]] = {}
    for work, size in given:
        sizes.setdefault(WORKS.index(work), []).append(size)
    left = lambda: max(1.0, seconds - (time.monotonic() - began))
    count, waiting = 0, []
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        lists = {pool.submit(listed, device, work, wanted): work for work, wanted in sizes.items()}
        with contextlib.suppress(BrokenProcessPool, TimeoutError):
            for done in concurrent.futures.as_completed(lists, timeout=left()):
                found = [] if done.exception() else done.result()
                count += len(found)
                for at in range(0, len(found), _EACH):
                    waiting.append(pool.submit(compiled, device, lists[done], found[at : at + _EACH]))
            concurrent.futures.wait(waiting, timeout=left())
        pool.shutdown(wait=False, cancel_futures=True)
    return count - _EACH * sum(w.cancelled() for w in waiting)
