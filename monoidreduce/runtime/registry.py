"""Which engine runs: the registry, and the user's override.

``mr.use(engine="eager")`` or the variable ``MONOIDREDUCE_ENGINE`` override the choice. An engine's contract is one
function: run this fold, on these tensors, of these sizes; return the value of each reduction. ``reference`` is the
exception: the dense oracle runs the whole traced program, so that it shares as little as possible with what it
checks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engines import eager, panel, triton
from ..engines.common import matmul, oom_retry, skip_small_tiles
from ..engines.ranks import distributed_fold
from ..errors import EngineError
from ..plan import budget as limits
from ..plan.environment import EnvironmentVariable
from ..tuning import tuner

_triton = functools.partial(triton.run, fallback=eager.run)


def _kernels(fold: Any, leaves: list[Any], sizes: Any) -> list[torch.Tensor]:
    """One kernel a direction where features fit in registers, or only numbers are asked; panels where they do not."""
    if panel.is_wide(fold, sizes) and triton.runs_on(sizes.device):
        for run in (triton.run_k_loop_fold, functools.partial(panel.run, step_class=triton.KernelStep)):
            try:
                return run(fold, leaves, sizes)
            except triton.Unsupported:  # of both: told, and run by the eager engine, below
                pass
    return _triton(fold, leaves, sizes)


def _panels(fold: Any, leaves: list[Any], sizes: Any) -> list[torch.Tensor]:
    """The panel schedule for every fold; in torch where there is no kernel."""
    if not torch.Size(sizes.batch).numel() or panel.writes_pairs(fold):
        return eager.run(fold, leaves, sizes)
    try:
        return panel.run(fold, leaves, sizes, stepper("panel", sizes.device))
    except triton.Unsupported as reason:
        triton.warn_fallback(fold, reason, "panels in torch run")
        return panel.run(fold, leaves, sizes)


def stepper(engine: str, device: torch.device) -> panel.StepClass:
    """How an engine does things to a panel."""
    return triton.KernelStep if engine != "eager" and triton.runs_on(device) else panel.TorchStep


ENGINES: dict[str, Callable] = {"eager": eager.run, "panel": _panels, "triton": _kernels, "auto": tuner.run}
FOLDERS = {name: oom_retry.add_oom_retry(run) for name, run in ENGINES.items()}
NAMES = ("auto", "eager", "panel", "reference", "triton")
_process = EnvironmentVariable("MONOIDREDUCE_ENGINE")
REFERENCE_LIMIT = 2**26  # pair elements: half a gigabyte in float64


@dataclass(frozen=True)
class Settings:
    """What the user asked for; what kernels look at themselves stands in ``hardware.asked``."""

    engine: str | None = None
    limit: int | None = REFERENCE_LIMIT


_settings: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("settings", default=None)


def settings() -> Settings:
    """The settings in force: the innermost ``use``, else the environment, else the defaults."""
    return replace(_settings.get() or Settings(), engine=engine())


def engine() -> str:
    """The engine in force."""
    found = _settings.get()
    if found is not None and found.engine is not None:
        return found.engine
    asked = _process.read()
    return _checked(asked, _process.name) if asked else "auto"


def sharded_folder() -> Callable:
    """What runs folds over many ranks: the engine in force, on each of them."""
    engine = str(settings().engine)
    if engine == "reference":
        raise EngineError(detail="the reference engine knows one process only", fix='Use mr.use(engine="eager")')
    return functools.partial(distributed_fold.run, engine=FOLDERS[engine])


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise EngineError(
            detail=f"{source} names the engine {name!r}, which does not exist", fix=f"Use one of {', '.join(NAMES)}"
        )
    return name


@contextlib.contextmanager
def automatic() -> Iterator[None]:
    """The engine ``auto`` inside the block, all other settings as they are."""
    token = _settings.set(replace(_settings.get() or Settings(), engine="auto"))
    try:
        yield
    finally:
        _settings.reset(token)


@contextlib.contextmanager
def use(
    engine: str | None = None,
    *,
    limit: int | None = REFERENCE_LIMIT,
    precision: str | None = None,
    strict: bool | None = None,
    tune: bool | None = None,
    budget: int | str | None = None,
    skip_below: float | None = None,
) -> Iterator[None]:
    """Choose inside the block how ops run; what is not said stays as it is outside of it.

    ``engine``: ``auto``, ``eager``, ``reference`` or ``triton``. ``limit`` bounds the pair elements of ``reference``
    (None: no bound). ``precision``: how kernels multiply float32 numbers: ``ieee`` (as exact as float32 is),
    ``tf32`` or ``tf32x3`` (almost float32, on the matrix units); where nobody says, torch's own switch is followed,
    ``torch.set_float32_matmul_precision``. ``strict``: what has no kernel is an error instead of a warning.
    ``tune``: every call tries one more plan for its folds, until the fastest is known (engine ``auto``). ``budget``: as
    :class:`mr.budget <monoidreduce.plan.budget.budget>`. ``skip_below``: as
    :class:`mr.skip_below <monoidreduce.engines.common.skip_small_tiles.skip_below>`.

    >>> import monoidreduce as mr
    >>> with mr.use(engine="eager"):
    ...     pass
    """
    if precision is not None and precision not in matmul.PRECISIONS:
        raise EngineError(
            detail=f"mr.use was given the precision {precision!r}", fix=f"Use one of {', '.join(matmul.PRECISIONS)}"
        )
    skipped = skip_small_tiles.requested() if skip_below is None else skip_small_tiles.skip_below(skip_below)
    outer = _settings.get() or Settings()
    name = outer.engine if engine is None else _checked(engine, "mr.use")
    token = _settings.set(Settings(name, outer.limit if limit == REFERENCE_LIMIT else limit))
    said = zip((precision, strict, tune), matmul.asked.get(), strict=True)
    before = matmul.asked.set(tuple(old if new is None else new for new, old in said))  # type: ignore[arg-type]
    try:
        with limits.restore(None if budget is None else limits.parse(budget)), skip_small_tiles.restore(skipped):
            yield
    finally:
        matmul.asked.reset(before)
        _settings.reset(token)
