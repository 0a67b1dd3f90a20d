"""The engine ``auto``: runs every fold by the schedule that the cost model or a tuned plan chose."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plan import candidates, schedule, settings
from ..plan.candidates import Case
from ..plan.schedule import Choice, round_length
from ..program.expression import Expr, index, size
from ..program.lower import Fold, Lowered, conditions, digest_fold
from . import eager, panel, triton
from .common import evaluate, matmul
from .common.evaluate import Sizes
from .eager import tile_code, tile_walk
from .panel import as_program, split_into_loops, split_softmax_means

# The engine ``auto``: runs every fold by its choice of schedule, made once for a fold, its sizes and types.
#
# Gathers what a choice depends on (a :class:`~monoidreduce.plan.candidates.Case`, and the key of a tuned plan), asks
# ``plan/candidates.py``, and calls the engine that the choice names. The other engines know nothing of choices.

_CHOICES: dict[tuple, tuple[Fold, Choice, Choice]] = {}  # as reported, and as executed (see _choose)
_MOST = 4096


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold by its choice: the engine ``auto`` when nothing is tuned."""
    return run_choice(_choose(fold, leaves, sizes)[1], fold, leaves, sizes)


def choose(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Choice:
    """The choice for a fold on these leaves, cached by sizes, types, device and settings."""
    return _choose(fold, leaves, sizes)[0]


def _choose(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Choice, Choice]:
    """A choice, and the same without its tiles if they are the kernels' defaults: overriding tiles costs time."""
    kinds = tuple([v.dtype for v in leaves if isinstance(v, Tensor)])
    key: tuple = (id(fold), sizes.rows, sizes.cols, sizes.batch, sizes.device, sizes.compute, kinds)
    asked = settings.now()
    key += (asked.budget, tuple(sizes.letters.values()), asked.precision, settings.plan_generation())
    if asked.followed is not None or asked.shrink > 1:  # a followed choice, or an OOM retry
        forced = candidates.choose(make_case(fold, leaves, sizes))
        return forced, forced
    found = _CHOICES.get(key)
    if found is None:
        defaults = _list_default_tiles(fold, leaves, sizes)
        alike = _make_class_key(key, defaults, fold, leaves) if defaults else key
        found = _CHOICES.get(alike)
        if found is None:
            case = make_case(fold, leaves, sizes, ask_panels=False)
            best = candidates.choose(case, fold_key(case, sizes.device))
            if case.panels is None and best.schedule == "panel" and not _can_use_panels(fold, leaves, sizes):
                best = candidates.choose(replace(case, panels=False), fold_key(case, sizes.device))
            usual = case.kernels and best.tiles == case.defaults
            found = _keep(alike, (fold, best, replace(best, tiles=()) if usual else best))
        _keep(key, found)
    return found[1:]


def _make_class_key(key: tuple, defaults: tuple, fold: Fold, leaves: Sequence[Any]) -> tuple:
    """The key of all lengths of a class, with the same default tiles: the schedule is chosen once for them."""
    _, rows, cols, *rest = key
    return (id(fold), round_length(rows), round_length(cols), *rest, defaults, *_find_numbers(fold, leaves).values())


def _keep(key: tuple, found: tuple[Fold, Choice, Choice]) -> tuple[Fold, Choice, Choice]:
    _CHOICES[key] = found
    while len(_CHOICES) > _MOST:
        del _CHOICES[next(iter(_CHOICES))]
    return found


def run_choice(how: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold by the choice ``how``."""
    given = list(leaves)
    if how.schedule == "panel":
        (room,) = how.tile("room") or (0,)
        if _step_class(sizes.device) is triton.KernelStep and triton.is_k_loop_fold(fold, given, sizes):
            with contextlib.suppress(triton.Unsupported):  # a GEMM with the fold as its epilogue needs no panel
                return triton.run_k_loop_fold(fold, given, sizes)
        with contextlib.suppress(triton.Unsupported):  # warned about, then run by the eager engine below
            return panel.run(fold, given, sizes, _step_class(sizes.device), room)
        how = Choice("flash")
    if not _has_kernels(sizes.device):
        tile = how.tile("tile")
        return eager.run(fold, given, sizes, None if tile is None else schedule.Tiles(*tile))
    with _use_tiles(how):
        return triton.run(fold, given, sizes, fallback=eager.run)


def prepare_launches(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> triton.PreparedFold | triton.ListedFold | None:
    """The launches of :func:`run` for leaves like these, for replay; None if it does more than launch kernels."""
    if fold.domain is not None:
        return triton.prepare_listed(fold, leaves, sizes) if _has_kernels(sizes.device) else None
    how = _choose(fold, leaves, sizes)[1]
    if not _has_kernels(sizes.device):
        return None
    if how.schedule == "panel":
        return triton.prepare_k_loop_fold(fold, list(leaves), sizes)
    return prepare_choice(how, fold, leaves, sizes)


def prepare_topk(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """A function that does what :func:`run` does for leaves like these, if that is a top-k over vendor GEMMs."""
    deep = fold.domain is None and _has_kernels(sizes.device) and _choose(fold, leaves, sizes)[1].schedule == "panel"
    return triton.prepare_best_products(fold, leaves, sizes) if deep else None


def prepare_choice(how: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> triton.PreparedFold | None:
    """The launches of a choice; None if the fold has no kernel."""
    with _use_tiles(how):
        return triton.prepare(fold, list(leaves), sizes)


def _use_tiles(how: Choice) -> contextlib.AbstractContextManager[Any]:
    """Override the kernels' tiles inside the block, if the choice names any."""
    tiles = {over: triton.KernelPlan(*t) for over, t in how.tiles}
    return triton.use_plan(tiles) if tiles else contextlib.nullcontext()


def _has_kernels(device: torch.device) -> bool:
    return settings.launches_kernels_on(device)


def _step_class(device: torch.device) -> panel.StepClass:
    return triton.KernelStep if _has_kernels(device) else panel.TorchStep


# Tuned plans --------------------------------------------------------------------------------------------------


@functools.cache
def _read_gpu_name(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} processors"


@functools.cache
def _read_cpu_name() -> str:
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    names = [info[n] for n in ("model name", "CPU implementer", "CPU part") if n in info]
    return " ".join([platform.machine(), *(names or [platform.processor()])])


def device_name(device: torch.device) -> str:
    """The model of a device, and on a CPU the number of threads: measurements hold for all devices of that name."""
    interpreted = ", interpreted" if settings.interprets_kernels() else ""
    if device.type == "cuda":
        return _read_gpu_name(device)
    return (
        f"{_read_cpu_name() if device.type == 'cpu' else device.type}, {torch.get_num_threads()} threads{interpreted}"
    )


def fold_key(case: Case, device: torch.device) -> schedule.Key:
    """What a tuned plan of a fold depends on."""
    types = f"{case.dtype}, arithmetic of {case.wide} bytes, {evaluate.float32_precision()}"
    lengths = (case.batch, case.rows, case.cols)
    return schedule.make_key(case.name, "", lengths, case.letters, types, device_name(device))


def call_key(program: Lowered, given: Iterable[Any], sizes: Sizes, backward: bool) -> schedule.Key:
    """What the tuned choice of a whole call, dense or tiled, depends on."""
    kinds = sorted({str(v.dtype)[6:] for v in given if isinstance(v, Tensor)})
    gradients = "with" if backward else "without"
    types = f"{', '.join(kinds)}, {gradients} gradients, {evaluate.float32_precision()}"
    lengths = (torch.Size(sizes.batch).numel(), sizes.rows, sizes.cols)
    name = digest_fold(Fold((), program.outputs))
    letters, device = sorted(sizes.letters.items()), device_name(sizes.device)
    return schedule.make_key(name, "call ", lengths, letters, types, device)


# What a choice depends on -------------------------------------------------------------------------------------


def make_case(fold: Fold, leaves: Sequence[Any], sizes: Sizes, ask_panels: bool = True) -> Case:
    """A fold at these sizes on these leaves, as the cost model sees it. Numbers in tensors are not read.

    Unless ``ask_panels``, a fold with kernels is not asked whether panels could run it."""
    narrow = next((d for d in _list_vector_types(fold, leaves) if d in matmul.SIXTEEN), sizes.compute)
    defaults = _list_default_tiles(fold, leaves, sizes)
    base = case_without_leaves(fold, narrow, sizes, None if defaults else frozenset(_find_numbers(fold, leaves)))
    lengths = [round_length(n, _COARSE) if defaults else n for n in (sizes.rows, sizes.cols)]
    return replace(
        base,
        kernels=bool(defaults),
        defaults=defaults,
        panels=_can_use_panels(fold, leaves, sizes) if ask_panels or not defaults else None,
        fixed=base.fixed if defaults else base.fixed + eager.pair_result_bytes(fold, leaves, sizes),
        seen=_find_visible_share(fold, *lengths, tuple(_find_numbers(fold, leaves).items())),
    )


def _list_default_tiles(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tiles that kernels take for these leaves unless told otherwise; nothing where there are no kernels."""
    return tuple(triton.list_tiles(fold, list(leaves), sizes).items()) if _has_kernels(sizes.device) else ()


def _find_numbers(fold: Fold, leaves: Sequence[Any]) -> dict[Expr, float]:
    return {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}


def case_without_leaves(
    fold: Fold, dtype: torch.dtype, sizes: Sizes, numbers: frozenset[Expr] | None = frozenset()
) -> Case:
    """The case of a fold without its leaves; ``dtype``: of its vectors; ``numbers``: its leaves that are Python
    numbers, None where no tile will run in torch, whose cost is then not asked for."""
    found = Case(
        fold,
        digest_fold(fold),
        sizes.rows,
        sizes.cols,
        torch.Size(sizes.batch).numel(),
        tuple(sorted(sizes.letters.items())),
        str(dtype)[6:],
        dtype.itemsize,
        sizes.compute.itemsize,
        candidates.get_rates(sizes.device),
        gpu=sizes.device.type == "cuda",
    )
    if numbers is None:
        return found
    code = tile_walk.compile_unconditional(fold, numbers)
    return replace(
        found,
        tile=tile_code.bytes_per_pair(fold, code, sizes),
        fixed=tile_code.fixed_bytes(code),
        steps=len(code.steps),
        width=eager.numbers_per_pair(fold, sizes),
    )


_BLOCKS = 12  # per axis, of the grid on which conditions are evaluated
_COARSE = 4  # classes of lengths between two powers of two that have the same share of visible pairs, with kernels


@functools.lru_cache(maxsize=4096)
def _find_visible_share(fold: Fold, rows: int, cols: int, given: tuple[tuple[Expr, float], ...]) -> float:
    """The share of the pairs that conditions on indices and numbers do not skip; data is not read.

    Conditions are evaluated in interval arithmetic on a coarse grid; half a block is subtracted for its edges. What is
    decided for several blocks at once is not asked of each."""
    if not rows or not cols or not conditions(fold):
        return 1.0
    code = tile_walk.compile_fold(fold, frozenset(e for e, _ in given))
    fixed = {e: (float(v), float(v)) for e, v in given}
    fixed |= {size("rows"): (float(rows),) * 2, size("cols"): (float(cols),) * 2}
    row, col = index("row"), index("col")
    starts = [tile_walk.split_range(n, -(-n // _BLOCKS)) for n in (rows, cols)]

    def count(r: Sequence[slice], c: Sequence[slice]) -> int:
        """The pairs of these blocks that are seen."""
        ends = (r[0].start, r[-1].stop), (c[0].start, c[-1].stop)
        truths = code.truths({**fixed, row: (ends[0][0], ends[0][1] - 1), col: (ends[1][0], ends[1][1] - 1)})
        if code.variant_for(truths) is None:
            return 0
        if (len(r) == 1 and len(c) == 1) or all(low == high for low, high in truths):
            return (ends[0][1] - ends[0][0]) * (ends[1][1] - ends[1][0])
        if len(r) >= len(c):
            half = len(r) // 2
            return count(r[:half], c) + count(r[half:], c)
        half = len(c) // 2
        return count(r, c[:half]) + count(r, c[half:])

    seen = count(*starts)
    return max(0.0, seen / (rows * cols) - 0.5 / _BLOCKS) if seen < rows * cols else 1.0


def _list_vector_types(fold: Fold, leaves: Sequence[Any]) -> list[torch.dtype]:
    return [v.dtype for e, v in zip(fold.leaves, leaves, strict=True) if e.feature is not None]


def _can_use_panels(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    """True if a fold has matrix products, and the panel engine supports everything else in it."""
    if panel.writes_pairs(fold) or not torch.Size(sizes.batch).numel():
        return False
    maker = _step_class(sizes.device)
    program, kinds = as_program(fold), set(_list_vector_types(fold, leaves))
    found = split_into_loops(split_softmax_means(program) if maker.splits_softmax_means else program)
    if not any(w.products for w in found):
        return False
    try:
        for w in found:
            maker(w, sizes, kinds)
    except triton.Unsupported:
        return False
    return True
