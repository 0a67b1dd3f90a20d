"""``monoidreduce check FILE.py:NAME``: the laws of a monoid; the values, gradients, determinism and memory of a layer.

Each check of a layer is a row of CHECKS and returns a verdict in plain words. The truth is the dense form in float64,
built from the op or written by the user. Nothing here is a proof: sizes are ragged, inputs are random with a fixed
seed, and the verdict says what was tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from .. import errors
from ..algebra import Monoid, laws
from ..errors import MonoidLawError, MonoidReduceError, NoGradientError
from ..plan import schedule
from ..plan.budget import budget
from ..program.expression import topological
from ..runtime.dispatch import use
from . import workload
from .command import Answer, dtype_name
from .layers import SEED, find_ready_made
from .measure import MemoryProfile, Outcome, Runner, relative_error, run_once, second_gradients, to_float64
from .options import LARGE_SIZE, RAGGED_SIZES
from .report import FAILED, NOT_TRIED, OK, format_mb, geometric_mean, print_statuses, show_progress
from .workload import Workload, check_argument_count, load, report_user_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE_BUDGETS = (None, "64KB")  # tiles of the usual size, and small ones, of which more must be combined
DRAWS = 4  # of inputs, for the error in each dtype
TOLERANCE = 1e-8  # relative, in float64: more than sums in another order differ by

Size = tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """The name of a check, its answer (OK, FAILED or NOT_TRIED), and the reason."""

    name: str
    answer: str
    words: str


def check(target: str, sizes: tuple[Size, ...], large: Size, cases: int, device: torch.device, **given: Any) -> Answer:
    """Check a monoid's laws, or a layer's mathematics and memory."""
    named = ":" in target or target.endswith(".py")
    found = load(target) if named else None
    with report_user_errors(target.partition(":")[0]):  # a combine or a layer that raises
        if found is not None and found.is_monoid:
            verdicts = check_monoid(found.thing, cases)
        else:
            find = functools.partial(workload.from_target, found) if found else functools.partial(_find, target)
            verdicts = _check_layer(functools.partial(find, **given), sizes or RAGGED_SIZES, large, cases, device)
    failed = sum(v.answer == FAILED for v in verdicts)
    tried = sum(v.answer != NOT_TRIED for v in verdicts)

    def show(console: Any) -> None:
        console.print(target, style="bold", markup=False)
        print_statuses(console, [(v.name, v.answer, v.words) for v in verdicts])
        good = f"[green]nothing wrong was found[/] ({tried} checks)"
        console.print(f"[bold red]{failed} of {tried} failed[/]" if failed else good)

    data = {"target": target, "passed": not failed, "checks": [vars(v) for v in verdicts]}
    return Answer(data, show, int(failed > 0))


def _find(name: str, **given: Any) -> Workload:
    """A ready-made layer; what it draws is not compared with other draws."""
    ready_made = find_ready_made(name)
    found = workload.find(name, **given)
    return found if ready_made is None or ready_made.judge is None else replace(found, dense=None)


def _check_layer(
    find: Callable[[], Workload], sizes: tuple[Size, ...], large: Size, cases: int, device: torch.device
) -> list[Verdict]:
    try:
        layer = find()
    except MonoidReduceError as error:  # the body cannot be traced as one program for all pairs
        return [Verdict("trace", FAILED, str(error))]
    try:
        monoids = _find_monoids(layer)
    except MonoidLawError as error:  # broken so plainly that the op refuses it
        return [Verdict(f"laws of {error.details['monoid']}", FAILED, str(error))]
    tested = LayerUnderTest(layer, tuple(sizes), large, device)
    verdicts = []
    with show_progress(len(monoids) + len(CHECKS)) as begin:
        for monoid in monoids:
            name = f"laws of {monoid.__name__}"
            begin(name)
            tried = check_monoid(monoid, cases)
            broken = next((v for v in tried if v.answer == FAILED), None)
            words = f"{broken.name}: {broken.words}" if broken else f"holds: {len(tried)} laws looked at"
            verdicts.append(Verdict(name, FAILED if broken else OK, words))
        for row in CHECKS:
            begin(row.name)
            try:
                verdicts.append(run_check(row, tested))
            except errors.TableError as error:  # the size was chosen here: every other check would fail alike
                size = f"--features {error.details['table']}=SIZE gives the table that check makes another size"
                return [*verdicts, Verdict(row.name, FAILED, f"{error}\n{size}")]
    return verdicts


# Laws of a monoid -------------------------------------------------------------------------------------------------

_MEANING = {
    "associativity": "it is not associative: grouping changes the result, so it cannot be folded in tiles",
    "commutativity": "it is not commutative: order changes the result, so pairs cannot be folded in any order "
    "(an ordered monoid says commutative = False, and is for mr.fold)",
    "left_identity": "its identity is wrong: identity ⊙ a is not a",
    "right_identity": "its identity is wrong: a ⊙ identity is not a",
    "local_gradient": "its pullback is wrong: it is not the derivative of combine",
    "partition_gradient": "its pullback is wrong: gradients through parts of a fold differ from the whole's",
    "partition": "a fold in parts differs from the whole fold",
    "tile": "its fold_tile is wrong: it differs from folding one by one",
    "removal": "its remove is wrong: a ⊙ remove(a ⊙ b, a) is not a ⊙ b",
}


def check_monoid(monoid: type[Monoid], cases: int = 200) -> list[Verdict]:
    """A verdict for each law; a broken law ends the search and is the only one, with its smallest counterexample."""
    try:
        report = laws.check(monoid, cases=cases)
    except MonoidLawError as error:
        law = str(error.details["law"])
        return [Verdict(law.replace("_", " "), FAILED, f"{_MEANING.get(law, 'it is broken')}\n{error}")]
    except MonoidReduceError as error:  # for example, a combine that changes a shape
        return [Verdict("laws", FAILED, str(error))]
    held = [(law, OK, f"holds in {count} cases, float64") for law, count in report.counts.items()]
    skipped = [(law, NOT_TRIED, why) for law, why in report.skipped.items()]
    return [Verdict(law.replace("_", " "), answer, words) for law, answer, words in held + skipped]


def _find_monoids(layer: Workload) -> list[type[Monoid]]:
    """The user's monoids that an op folds with."""
    if layer.op is None:
        return []
    args = layer.inputs(3, 5, torch.float32, torch.device("cpu"))
    outputs = layer.op._prepare(args, {})[0].outputs
    return [e.attrs[2][0] for e in topological(outputs) if e.op == "reduce" and e.attrs[0] == "user"]


# Checks of a layer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerUnderTest:
    """A layer and the sizes to test it at. Runs that several checks need are made once."""

    layer: Workload
    sizes: tuple[Size, ...]
    large: Size
    device: torch.device

    def inputs(self, rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
        return self.layer.inputs(rows, cols, dtype, self.device)

    def dense(self, *args: Any) -> Any:
        """The dense form; only called if there is one."""
        assert self.layer.dense is not None
        if self.layer.dense_is_handwritten:
            check_argument_count(self.layer.dense, args, "--dense")
        return self.layer.dense(*args)

    @property
    def largest(self) -> Size:
        return max(self.sizes, key=lambda s: (s[0] * s[1], s))

    @functools.cached_property
    def differentiable(self) -> bool:
        try:
            return bool(run_once(self.layer.call, self.inputs(*self.largest, torch.float64)).gradients)
        except NoGradientError:
            return False

    @functools.cached_property
    def outcomes(self) -> dict[Size, tuple[list[Outcome], Outcome]]:
        """Ours with each tile size and the dense form's, in float64, at every size that the layer accepts."""
        found = {}
        for size in self.sizes:
            args = self.inputs(*size, torch.float64)
            try:
                ours = self.run_in_tiles(functools.partial(run_once, self.layer.call, args, self.differentiable))
            except (errors.TopKError, errors.ShapeError):  # it asks for more columns than there are
                continue
            found[size] = ours, run_once(self.dense, args, self.differentiable)
        return found

    def run_in_tiles(self, run: Callable[[], Any]) -> list[Any]:
        """The results of ``run`` with each of TILE_BUDGETS, never by the dense schedule; without budgets too small."""
        found = []
        engine = "triton" if self.device.type == "cuda" else "eager"
        for size in TILE_BUDGETS:
            limit = nullcontext() if size is None else budget(size)
            with suppress(errors.BudgetError), use(engine=engine), limit:
                found.append(run())
        return found

    def worst_errors(self, part: str) -> dict[Size, float]:
        """For each size, the largest error of our "values" or "gradients" against the dense form's."""
        return {
            size: max(relative_error(getattr(o, part), getattr(dense, part)) for o in ours)
            for size, (ours, dense) in self.outcomes.items()
        }

    def profile_memory(self, size: tuple[int, ...]) -> MemoryProfile:
        """The memory of a second run."""
        args = self.inputs(size[0], size[1], torch.float32)
        runner = Runner(self.layer.call, args, self.device, self.differentiable)
        runner.run()
        return runner.profile_memory()


Found = tuple[str, str]  # an answer and its words
_NO_GRADIENT = (NOT_TRIED, "nothing in it has a gradient")


def _report_no_dense(t: LayerUnderTest) -> Found:
    name = t.layer.name
    if t.layer.key:
        return NOT_TRIED, "it draws at random, so there is no dense form to compare with"
    return NOT_TRIED, f"no dense form to compare with: put {name}_dense(*arguments), in plain torch, into the file"


def _check_values(t: LayerUnderTest) -> Found:
    if t.layer.dense is None:
        return _report_no_dense(t)
    for size, (ours, dense) in t.outcomes.items():
        if not all(_are_equal(o.discrete, dense.discrete) for o in ours):
            return FAILED, f"indices or truth values differ from the dense form's at {_format_size(size)}"
    return _judge(t.worst_errors("values"), "the dense form's")


def _check_gradients(t: LayerUnderTest) -> Found:
    if not t.differentiable:
        return _NO_GRADIENT
    if t.layer.dense is None:
        return _compare_with_differences(torch.autograd.gradcheck, t)
    return _judge(t.worst_errors("gradients"), "autograd's through the dense form")


def _check_second_gradients(t: LayerUnderTest) -> Found:
    if not t.differentiable:
        return _NO_GRADIENT
    try:
        if t.layer.dense is None:
            return _compare_with_differences(torch.autograd.gradgradcheck, t)
        size = min(t.largest[0], 33), min(t.largest[1], 47)
        args = t.inputs(*size, torch.float64)
        truth = second_gradients(t.dense, args)
        ours = t.run_in_tiles(lambda: second_gradients(t.layer.call, args))
        worst = {size: max(relative_error(o, truth) for o in ours)}
    except NoGradientError as error:
        return NOT_TRIED, str(error).splitlines()[0]
    return _judge(worst, "autograd's through the dense form")


def _compare_with_differences(gradcheck: Callable, t: LayerUnderTest) -> Found:
    args = t.inputs(5, 7, torch.float64)
    try:
        t.run_in_tiles(lambda: gradcheck(t.layer.call, args, fast_mode=True))
    except GradcheckError as error:
        return FAILED, "they differ from finite differences: " + " ".join(str(error).split())[:160]
    return OK, "equal to finite differences at 5 × 7, float64"


def _judge(worst: dict[Size, float], truth: str) -> Found:
    if not worst:
        return NOT_TRIED, "it refuses every size that was tried"
    size = max(worst, key=lambda s: worst[s])
    if worst[size] <= TOLERANCE:
        return OK, f"equal to {truth} within {worst[size]:.0e}, {len(worst)} size{'s'[: len(worst) > 1]}"
    return FAILED, f"differ from {truth} by {worst[size]:.1e} (relative) at {_format_size(size)}"


def _check_determinism(t: LayerUnderTest) -> Found:
    args = t.inputs(*t.largest, torch.float32)
    first, *others = (run_once(t.layer.call, args, t.differentiable).tensors for _ in range(3))
    runs = f"three runs at {_format_size(t.largest)}"
    if all(_are_equal(first, other) for other in others):
        return OK, f"{runs} are equal to the last bit"
    return FAILED, f"{runs} differ: something in it depends on time or on a hidden seed"


def _check_memory(t: LayerUnderTest) -> Found:
    """Twice the rows and columns are four times the pairs, but twice the inputs: memory must grow as the inputs do.

    If it grows as the pairs do, it is measured at twice the size again: a bounded panel that is as large as the first
    sizes stops growing there.
    """
    small, large, larger = (tuple(n * by // 2 for n in t.large) for by in (1, 2, 4))
    if small[0] * small[1] < 2 * schedule.ELEMENTS:
        words = f"{_format_size(t.large)} is too small to tell a tile from a matrix: {_format_size(LARGE_SIZE)} is not"
        return NOT_TRIED, words
    before, now, size = t.profile_memory(small), t.profile_memory(large), large
    if _grows_with_pairs(before, now, large):
        before, now, size = now, t.profile_memory(larger), larger
    matrix = 4 * size[0] * size[1]
    times = f"{now.extra / max(1, before.extra):.1f} times what half of both took"
    took = f"{format_mb(now.extra)} MB beyond inputs and gradients at {_format_size(size)}"
    if _grows_with_pairs(before, now, size):
        return FAILED, (
            f"it materialises: {took}, {times}, as the number of pairs grows. One float32 matrix of pairs is "
            f"{format_mb(matrix)} MB there, and its largest tensor was {format_mb(now.largest)} MB"
        )
    return OK, f"{took}, {100 * now.extra / matrix:.2g} % of one matrix of pairs; {times}"


def _grows_with_pairs(before: MemoryProfile, now: MemoryProfile, size: tuple[int, ...]) -> bool:
    """True if memory grew as the pairs did and holds at least a byte for each, the size of a mask."""
    return now.extra > 2.6 * before.extra and now.extra >= size[0] * size[1]


def _check_error(t: LayerUnderTest, dtype: torch.dtype) -> Found:
    """Compare geometric means over a few draws: the rounding error of a single one is a matter of luck."""
    if t.layer.dense is None:
        return _report_no_dense(t)
    found: dict[str, list[tuple[float, float]]] = {"values": [], **({"gradients": []} if t.differentiable else {})}
    for draw in range(DRAWS):
        args = t.layer.inputs(*t.largest, dtype, t.device, SEED + draw)
        truth = run_once(t.dense, to_float64(args), t.differentiable)
        both = [run_once(call, args, t.differentiable) for call in (t.layer.call, t.dense)]
        for part, pairs in found.items():
            ours, dense = (relative_error(getattr(o, part), getattr(truth, part), least=1.0) for o in both)
            pairs.append((ours, dense))
    words, good = [], True
    for part, pairs in found.items():
        ours, dense = (geometric_mean(side) for side in zip(*pairs, strict=True))
        good = good and ours <= 2 * dense + torch.finfo(dtype).eps
        words.append(f"{part} {ours:.1e}, dense {dense:.1e}")
    return (OK if good else FAILED), "; ".join(words) + ("" if good else ": more than twice the dense form's")


@dataclass(frozen=True)
class Check:
    """A row of the table of checks."""

    name: str
    run: Callable[[LayerUnderTest], Found]


CHECKS = (
    Check("values", _check_values),
    Check("gradients", _check_gradients),
    Check("second gradients", _check_second_gradients),
    Check("determinism", _check_determinism),
    Check("memory", _check_memory),
    *(Check(f"error in {dtype_name(d)}", functools.partial(_check_error, dtype=d)) for d in DTYPES),
)


def run_check(row: Check, t: LayerUnderTest) -> Verdict:
    """The verdict of one check; an error that the library raises on purpose is a verdict too, but for TableError."""
    try:
        with report_user_errors(t.layer.file):
            return Verdict(row.name, *row.run(t))
    except errors.TableError:
        raise
    except MonoidReduceError as error:
        return Verdict(row.name, FAILED, str(error))


def _are_equal(ones: tuple, others: tuple) -> bool:
    """True if all tensors are equal to the last bit; NaN equals NaN."""
    return len(ones) == len(others) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(ones, others, strict=True)
    )


def _format_size(size: tuple[int, ...]) -> str:
    return f"{size[0]} × {size[1]}"
