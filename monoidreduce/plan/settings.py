"""The settings in force: one frozen value in one context variable.

``mr.use``, ``mr.budget`` and ``mr.skip_below``, plans that are followed or tried, and the second attempt after memory
ran out each change some fields of it for a block. What nobody has set in a block is read from the environment, in every
call (:func:`now`). What is asked for often has a function here or in the module that owns the setting
(:func:`requested_budget`, ``schedule.follow``, ...); a call that is known asks for the whole value once
(:func:`launch_state`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError, EngineError

ENGINES = ("auto", "eager", "panel", "reference", "triton")
SHRINK = 8  # an OOM retry runs with one eighth of the memory
REFERENCE_LIMIT = 2**26  # pair elements: half a gigabyte in float64
ENGINE, BUDGET, TUNE = "MONOIDREDUCE_ENGINE", "MONOIDREDUCE_BUDGET", "MONOIDREDUCE_TUNE"


@dataclass(frozen=True)
class Settings:
    """What the user, the planner and an OOM retry ask for; None: not said."""

    engine: str | None = None
    limit: int | None = REFERENCE_LIMIT  # of the engine ``reference``, in pair elements
    precision: str | None = None  # of float32 products
    strict: bool = False  # what has no kernel is an error
    tune: bool | None = None
    budget: int | None = None  # bytes
    shrink: int = 1  # memory limits are divided by it
    skip_below: Any = None  # the enclosing ``mr.skip_below``
    followed: Mapping[str, Any] | None = None  # choices of schedules, by the names of folds
    tiles: Mapping[str, Any] | None = None  # plans of kernels, by folded axis
    check: bool = False  # numbers that index others are read and checked on GPUs too

    @functools.cached_property
    def launches(self) -> tuple | None:
        """The fields that decide which kernels run a fold, as a key. None where recorded launches must not be used: a
        plan is followed or tuned, or this is a second attempt with less memory."""
        if self.followed is not None or self.shrink > 1 or self.tune:
            return None
        return (
            self.engine,
            self.precision,
            self.strict,
            self.budget,
            () if self.tiles is None else tuple(self.tiles.items()),
        )


# How rows and columns are divided over ranks (``engines/ranks/agreement.py``); None where they are not. No part of the
# settings, since torch.compile does not trace it.
layout: contextvars.ContextVar[Any] = contextvars.ContextVar("layout", default=None)

_DEFAULT = Settings()
current: contextvars.ContextVar[Settings] = contextvars.ContextVar("settings", default=_DEFAULT)


@contextlib.contextmanager
def hold(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[Any]:
    """Give a context variable a value inside the block, which the block is given."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def change(**fields: Any) -> Iterator[None]:
    """Set some fields inside the block; afterwards they are as they were, whatever became of the others."""
    before = put(**fields)
    try:
        yield
    finally:
        put(**before)


def put(**fields: Any) -> dict[str, Any]:
    """Set some fields; what they were before."""
    found = current.get()
    before = {name: getattr(found, name) for name in fields}
    if before != fields:
        current.set(replace(found, **fields))
    return before


# Which kernels run a fold, for the whole process

_generation = 0
_every_fold_runs = False  # of the whole process: backwards have threads of their own
_lock = threading.Lock()


def launch_state() -> tuple | None:
    """What decides which kernels run a fold, besides its tensors and torch's own switches. None where recorded launches
    must not be used: a plan is followed or tried, folds are noted (:func:`run_every_fold`), or this is a second attempt
    with less memory."""
    asked = now().launches
    return None if asked is None or _every_fold_runs else (asked, _generation)


def plan_generation() -> int:
    """A number that grows whenever a tuned plan may have changed; part of the key of every cache of plans."""
    return _generation


def renew_plans() -> None:
    """Say that tuned plans may have changed."""
    global _generation
    with _lock:
        _generation += 1


@contextlib.contextmanager
def run_every_fold() -> Iterator[None]:
    """Inside the block no thread replays recorded launches: every fold is run by its engine, which takes note of it."""
    global _every_fold_runs
    _every_fold_runs = True
    try:
        yield
    finally:
        _every_fold_runs = False


# What the environment says

_encode = getattr(os.environ, "encodekey", str)
_engine, _budget, _tune = map(_encode, (ENGINE, BUDGET, TUNE))


class EnvironmentVariable:
    """One environment variable, read without the microsecond that ``os.environ.get`` takes when it is unset.

    >>> EnvironmentVariable("MONOIDREDUCE_NO_SUCH").read() is None
    True
    """

    def __init__(self, name: str):
        self.name, self._key = name, _encode(name)

    def read(self) -> str | None:
        """The variable's current value; None if it is not set."""
        known: Any = getattr(os.environ, "_data", os.environ)  # the mapping's own dict, by encoded names
        return os.environ.get(self.name) if self._key in known else None


_interpreter = EnvironmentVariable("TRITON_INTERPRET")


def interprets_kernels() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU."""
    return _interpreter.read() == "1"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported to answer."""
    return importlib.util.find_spec("triton") is not None


def kernels_run_on(device: Any) -> bool:
    """Whether generated kernels run on a ``torch.device``: on a GPU, or in Triton's interpreter."""
    return (device.type == "cuda" or interprets_kernels()) and has_triton()


def launches_kernels_on(device: Any) -> bool:
    """Whether kernels run there, and not in an interpreter."""
    return device.type == "cuda" and kernels_run_on(device)


def now() -> Settings:
    """The settings in force: the innermost block's, else the environment's, else the defaults.

    ``engine`` is always set."""
    found, known = current.get(), getattr(os.environ, "_data", os.environ)
    if _engine in known or _budget in known or _tune in known:
        return _with_environment(found, *map(os.environ.get, (ENGINE, BUDGET, TUNE)))
    return found if found.engine is not None else _complete(found)


_completed = (_DEFAULT, Settings("auto"))  # the last one that was completed


def _complete(found: Settings) -> Settings:
    """The same with the default engine."""
    global _completed
    given, made = _completed
    if given is not found:
        made = replace(found, engine="auto")
        _completed = (found, made)
    return made


def _with_environment(found: Settings, engine: str | None, budget: str | None, tune: str | None) -> Settings:
    """The same with what the environment says of fields that are not set."""
    return replace(
        found,
        engine=found.engine or (check_engine(engine, ENGINE) if engine else "auto"),
        budget=_parse_text(budget) if found.budget is None and budget else found.budget,
        tune=_parse_tune(tune or "") if found.tune is None else found.tune,
    )


def check_engine(name: str, source: str) -> str:
    """The name of an engine; raises EngineError where there is none of that name."""
    if name not in ENGINES:
        schedules = "; flash, panel and dense are also schedules, which op.explain shows and the planner chooses"
        raise EngineError(
            detail=f"{source} names the engine {name!r}, which does not exist",
            fix=f"Use one of {', '.join(ENGINES)}" + schedules * (name in ("flash", "dense")),
        )
    return name


def _parse_tune(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise EngineError(detail=f"{TUNE} is {value!r}", fix="Set it to 1 or to 0, or leave it out")
    return value == "1"


def requested_budget() -> int | None:
    """The budget in force: the innermost block's, else the process's default, else None."""
    return now().budget


def shrink_memory() -> contextlib.AbstractContextManager[None]:
    """Plans made inside the block use 1 / ``SHRINK`` of the memory: for an OOM retry."""
    return change(shrink=SHRINK)


def shrink_factor() -> int:
    """``SHRINK`` in an OOM retry, else 1: memory limits are divided by it."""
    return current.get().shrink


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(limit: int | str) -> int:
    """Bytes from an int or a text such as ``"256MB"`` or ``"1.5 GiB"``; raises ArgumentError for anything else."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit) if isinstance(limit, str) else None
    if found is None or found[2].upper() not in UNITS or not float(found[1]):
        raise ArgumentError(
            detail=f"a budget was given as {limit!r}",
            fix='Give bytes, as a whole number above 0 or as a text such as "64MB" or "1.5GiB"',
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


@functools.lru_cache(maxsize=8)
def _parse_text(text: str) -> int:
    return parse_bytes(int(text) if text.isdigit() else text)
