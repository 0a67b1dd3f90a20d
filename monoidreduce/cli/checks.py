"""What ``monoidreduce check`` asks of a layer: one row of CHECKS each, answered with a verdict in plain words.

The truth is the dense form (``naive.py``, or the user's own), in float64. Nothing here is a proof: sizes are ragged,
inputs random with a fixed seed, and what was tried stands in the verdict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from .. import errors
from ..algebra import Monoid, laws
from ..errors import MonoidLawError, NoGradientError
from ..plan import tiles
from ..plan.budget import budget
from ..program.expression import topological
from ..runtime.registry import use
from . import trial
from .layers import SEED
from .memory import Profile
from .numbers import geometric, short
from .subject import Subject
from .target import check_takes, users_code
from .trial import Outcome

GOOD, BAD, NOT_TRIED = "ok", "FAILED", "not tried"
RAGGED = ((1, 1), (1, 59), (59, 1), (111, 257), (7, 0), (0, 7))
TYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = (None, "64KB")  # the folds in tiles as large as they are, and in small ones, which must be put together again
LARGE = (2048, 8192)  # where memory is measured, and at half of both
DRAWS = 4  # of inputs, for the error in each type
EXACT = 1e-8  # relative, in float64: sums in another order differ by less


@dataclass(frozen=True)
class Verdict:
    """A question, its answer (GOOD, BAD or NOT_TRIED), and why."""

    name: str
    answer: str
    words: str


@dataclass(frozen=True)
class Trials:
    """A layer at its sizes; what several questions look at is run once."""

    subject: Subject
    sizes: tuple[tuple[int, int], ...]
    large: tuple[int, int]
    device: torch.device

    def inputs(self, rows: int, cols: int, dtype: torch.dtype) -> tuple:
        return self.subject.inputs(rows, cols, dtype, self.device)

    @functools.cached_property
    def both(self) -> dict[tuple[int, int], tuple[list[Outcome], Outcome]]:
        """Ours (every way) and the dense form in float64, at every size that the layer itself does not refuse."""
        found = {}
        for size in self.sizes:
            args = self.inputs(*size, torch.float64)
            try:
                ours = self.every_way(functools.partial(trial.run, self.subject.call, args, self.differentiable))
            except (errors.TopKError, errors.ShapeError):  # it asks for more columns than there are
                continue
            found[size] = ours, trial.run(self.dense, args, self.differentiable)
        return found

    def every_way(self, run: Callable[[], Any]) -> list[Any]:
        """What ``run`` gives by folds, never by the dense schedule; without those whose tiles are too small for it."""
        found = []
        for way in WAYS:
            room = nullcontext() if way is None else budget(way)
            with suppress(errors.BudgetError), use(engine="triton" if self.device.type == "cuda" else "eager"), room:
                found.append(run())
        return found

    def worst(self, part: Callable[[Outcome], tuple]) -> dict[tuple[int, int], float]:
        """For each size, how far the farthest of our ways is from the dense form."""
        return {size: max(trial.apart(part(o), part(dense)) for o in ours) for size, (ours, dense) in self.both.items()}

    @functools.cached_property
    def differentiable(self) -> bool:
        try:
            return bool(trial.run(self.subject.call, self.inputs(*self.middle, torch.float64)).gradients)
        except NoGradientError:
            return False

    @property
    def middle(self) -> tuple[int, int]:
        return max(self.sizes, key=lambda s: (s[0] * s[1], s))

    def dense(self, *args: Any) -> Any:
        assert self.subject.dense is not None  # asked by whoever calls
        if self.subject.by_hand:
            check_takes(self.subject.dense, args, "--dense")
        return self.subject.dense(*args)


# The questions ----------------------------------------------------------------------------------------------------

Found = tuple[str, str]  # an answer and its words
_NO_GRADIENT = (NOT_TRIED, "nothing in it has a gradient")


def _no_dense(t: Trials) -> Found:
    name = t.subject.name
    return NOT_TRIED, f"no dense form to compare with: put {name}_dense(*arguments), in plain torch, into the file"


def _values(t: Trials) -> Found:
    if t.subject.dense is None:
        return _no_dense(t)
    wrong = [s for s, (ours, d) in t.both.items() if not all(_same(o.choices, d.choices) for o in ours)]
    if wrong:
        return BAD, f"indices or truth values differ from the dense form's at {_size(wrong[0])}"
    return _compared(t.worst(lambda o: o.values), "the dense form's")


def _gradients(t: Trials) -> Found:
    if not t.differentiable:
        return _NO_GRADIENT
    if t.subject.dense is None:
        return _by_differences(torch.autograd.gradcheck, t)
    return _compared(t.worst(lambda o: o.gradients), "autograd's through the dense form")


def _second(t: Trials) -> Found:
    if not t.differentiable:
        return _NO_GRADIENT
    try:
        if t.subject.dense is None:
            return _by_differences(torch.autograd.gradgradcheck, t)
        size = min(t.middle[0], 33), min(t.middle[1], 47)
        args = t.inputs(*size, torch.float64)
        truth = trial.second(t.dense, args)
        ours = t.every_way(lambda: trial.second(t.subject.call, args))
        found = {size: max(trial.apart(o, truth) for o in ours)}
    except NoGradientError as error:
        return NOT_TRIED, str(error).splitlines()[0]
    return _compared(found, "autograd's through the dense form")


def _by_differences(check: Callable, t: Trials) -> Found:
    args = t.inputs(5, 7, torch.float64)
    try:
        t.every_way(lambda: check(t.subject.call, args, fast_mode=True))
    except GradcheckError as error:
        return BAD, "they differ from finite differences: " + " ".join(str(error).split())[:160]
    return GOOD, "equal to finite differences at 5 × 7, float64"


def _deterministic(t: Trials) -> Found:
    args = t.inputs(*t.middle, torch.float32)
    first, *others = (trial.run(t.subject.call, args, t.differentiable).everything for _ in range(3))
    if all(_same(first, other) for other in others):
        return GOOD, f"three runs at {_size(t.middle)} are equal to the last bit"
    return BAD, f"three runs at {_size(t.middle)} differ: something in it depends on time or on a hidden seed"


def _memory(t: Trials) -> Found:
    """Twice the rows and columns are four times the pairs, but only twice the inputs: memory must grow as these do.

    What seems to grow with the pairs is measured at twice the size again: a panel that is bounded, but as large as the
    first sizes are, stops growing there.
    """
    small, large, larger = (tuple(n * by // 2 for n in t.large) for by in (1, 2, 4))
    if small[0] * small[1] < 2 * tiles.ELEMENTS:
        return NOT_TRIED, f"{_size(t.large)} is too small to tell a tile from a matrix: {_size(LARGE)} is not"
    found = {size: _profiled(t, size) for size in (small, large)}
    last = large
    if _grows(found[small], found[large], large):
        found[larger] = _profiled(t, larger)
        small, last = large, larger
    before, now, matrix = found[small], found[last], 4 * last[0] * last[1]
    times = f"{now.extra / max(1, before.extra):.1f} times what half of both took"
    took = f"{_mb(now.extra)} beyond inputs and gradients at {_size(last)}"
    if _grows(before, now, last):
        return BAD, (
            f"it materialises: {took}, {times}, as the number of pairs grows. One float32 matrix of pairs is "
            f"{_mb(matrix)} there, and its largest tensor was {_mb(now.largest)}"
        )
    return GOOD, f"{took}, {100 * now.extra / matrix:.2g} % of one matrix of pairs; {times}"


def _profiled(t: Trials, size: tuple[int, ...]) -> Profile:
    """The memory of a run that is not the first."""
    runner = trial.Trial(t.subject.call, t.inputs(size[0], size[1], torch.float32), t.device, t.differentiable)
    runner.once()
    return runner.profiled()


def _grows(before: Profile, now: Profile, size: tuple[int, ...]) -> bool:
    """Whether memory grew as the pairs did; a byte for each, a mask, is the least that a matrix takes."""
    return now.extra > 2.6 * before.extra and now.extra >= size[0] * size[1]


def _error(t: Trials, dtype: torch.dtype) -> Found:
    """The geometric mean over a few draws: the rounding error of one is a matter of luck."""
    if t.subject.dense is None:
        return _no_dense(t)
    parts: dict[str, Callable[[Outcome], tuple]] = {"values": lambda o: o.values, "gradients": lambda o: o.gradients}
    found: dict[str, list[tuple[float, float]]] = {"values": [], **({"gradients": []} if t.differentiable else {})}
    for draw in range(DRAWS):
        args = t.subject.inputs(*t.middle, dtype, t.device, SEED + draw)
        truth = trial.run(t.dense, trial.double(args), t.differentiable)
        ours, dense = (trial.run(call, args, t.differentiable) for call in (t.subject.call, t.dense))
        for name, pairs in found.items():
            part = parts[name]
            mine, theirs = (trial.apart(part(o), part(truth), least=1.0) for o in (ours, dense))
            pairs.append((mine, theirs))
    words, good = [], True
    for name, pairs in found.items():
        mine, theirs = (geometric(side) for side in zip(*pairs, strict=True))
        good = good and mine <= 2 * theirs + torch.finfo(dtype).eps
        words.append(f"{name} {mine:.1e}, dense {theirs:.1e}")
    return (GOOD if good else BAD), "; ".join(words) + ("" if good else ": more than twice the dense form's")


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    ask: Callable[[Trials], Found]


CHECKS = (
    Check("values", _values),
    Check("gradients", _gradients),
    Check("second gradients", _second),
    Check("determinism", _deterministic),
    Check("memory", _memory),
    *(Check(f"error in {str(d)[6:]}", functools.partial(_error, dtype=d)) for d in TYPES),
)


def ask(check: Check, t: Trials) -> Verdict:
    """One question; an error that the library raises on purpose is an answer too."""
    try:
        with users_code(t.subject.file):
            return Verdict(check.name, *check.ask(t))
    except errors.MonoidReduceError as error:
        return Verdict(check.name, BAD, str(error))


# The laws ---------------------------------------------------------------------------------------------------------

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


def of_monoid(monoid: type[Monoid], cases: int = 200) -> list[Verdict]:
    """The laws of a monoid, each with a verdict; a broken one ends the search with the smallest counterexample."""
    try:
        report = laws.check(monoid, cases=cases)
    except MonoidLawError as error:
        law = str(error.details["law"])
        return [Verdict(law.replace("_", " "), BAD, f"{_MEANING.get(law, 'it is broken')}\n{error}")]
    except errors.MonoidReduceError as error:  # combine changes a shape, say
        return [Verdict("laws", BAD, str(error))]
    found = [
        Verdict(n.replace("_", " "), GOOD, f"holds in {count} cases, float64") for n, count in report.counts.items()
    ]
    return found + [Verdict(n.replace("_", " "), NOT_TRIED, why) for n, why in report.skipped.items()]


def monoids_of(subject: Subject) -> list[type[Monoid]]:
    """The user's monoids that an op folds with."""
    if subject.op is None:
        return []
    args = subject.inputs(3, 5, torch.float32, torch.device("cpu"))
    outputs = subject.op._prepare(args, {})[0].outputs
    return [e.attrs[2][0] for e in topological(outputs) if e.op == "reduce" and e.attrs[0] == "user"]


# Words ------------------------------------------------------------------------------------------------------------


def _compared(worst: dict[tuple[int, int], float], with_what: str) -> Found:
    if not worst:
        return NOT_TRIED, "it refuses every size that was tried"
    size = max(worst, key=lambda s: worst[s])
    if worst[size] <= EXACT:
        return GOOD, f"equal to {with_what} within {worst[size]:.0e}, {len(worst)} size{'s'[: len(worst) > 1]}"
    return BAD, f"differ from {with_what} by {worst[size]:.1e} (relative) at {_size(size)}"


def _same(ones: tuple, others: tuple) -> bool:
    return len(ones) == len(others) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(ones, others, strict=True)
    )


def _size(size: tuple[int, ...]) -> str:
    return f"{size[0]} × {size[1]}"


def _mb(count: float) -> str:
    return f"{short(count / 1e6)} MB"
