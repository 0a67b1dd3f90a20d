"""Running a layer with its gradients, and the two rules by which results are judged.

In float64 a result must equal the plain form to 1e-9 of its largest number. In any precision its error, measured
against the plain form in float64, may be at most twice the error of the plain form in that same precision. A failure
names the tensor and its worst element.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce.plan import schedule
from tests.support import internals
from tests.support.layers.base import Layer


@dataclass(frozen=True)
class Result:
    """Every value and every gradient of a call, by name."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        return self.values | self.grads

    def floating(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.all().items() if t.is_floating_point()}


def named(layers: Iterable[Layer]) -> list[Any]:
    """Layers as parameters of a test, shown by name."""
    return [pytest.param(layer, id=layer.name) for layer in layers]


def is_float(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def flatten(result: Any) -> list[Tensor]:
    """The tensors of what a layer returned."""
    if isinstance(result, Tensor):
        return [result]
    if result is None or isinstance(result, bool | int | float):
        return []
    return [t for part in (result.values() if isinstance(result, dict) else result) for t in flatten(part)]


def there(function: Callable) -> Callable:
    """The function with its tensors moved to a GPU and its results moved back: gradients return the same way."""

    def call(*args: Any) -> list[Tensor]:
        moved = [a.cuda() if isinstance(a, Tensor) else a for a in args]
        return [t.cpu() for t in flatten(function(*moved))]

    return call


def cast(args: Sequence[Any], dtype: torch.dtype) -> tuple:
    return tuple(a.to(dtype) if is_float(a) else a for a in args)


def run(
    function: Callable,
    args: Sequence[Any],
    *,
    asked: Sequence[int] | None = None,
    cotangents: Sequence[Tensor] | None = None,
) -> Result:
    """Call, then pull a cotangent of fixed random numbers back to every floating argument (or those ``asked``).

    The cotangent is rounded to the arguments' type, so that every precision starts from the same numbers.
    """
    wanted = [k for k, a in enumerate(args) if is_float(a)] if asked is None else list(asked)
    given = [a.detach().requires_grad_(k in wanted) if is_float(a) else a for k, a in enumerate(args)]
    values = flatten(function(*given))
    dtype = next((a.dtype for a in args if is_float(a)), torch.float64)
    if cotangents is None:
        gen = torch.Generator().manual_seed(11)
        cotangents = [torch.randn(v.shape, generator=gen, dtype=torch.float64).to(dtype) for v in values]
    pulled = [(v, g.to(v.dtype)) for v, g in zip(values, cotangents, strict=True) if v.requires_grad]
    inputs = [given[k] for k in wanted]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if pulled and inputs:
        found = torch.autograd.grad([v for v, _ in pulled], inputs, [g for _, g in pulled], allow_unused=True)
    grads = {f"gradient {k}": torch.zeros_like(args[k]) if g is None else g for k, g in zip(wanted, found, strict=True)}
    return Result({f"value {k}": v.detach() for k, v in enumerate(values)}, grads)


def errors(got: Tensor, truth: Tensor) -> Tensor:
    """Absolute errors in float64: equal infinities and NaN beside NaN count 0, any other mismatch of them infinity."""
    got, truth = got.double(), truth.double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    return torch.where(same, 0.0, (got - truth).abs()).nan_to_num(nan=math.inf)


def largest(t: Tensor) -> float:
    """The largest finite magnitude, 0 for none."""
    t = t.double()
    t = t[t.isfinite()]
    return t.abs().max().item() if t.numel() else 0.0


def worst(got: Tensor, truth: Tensor) -> str:
    off = errors(got, truth)
    at = torch.unravel_index(off.argmax(), off.shape)
    place = tuple(int(k) for k in at)
    return f"worst at {place}: got {got[at].item()!r}, truth {truth[at].item()!r}, error {off[at].item():.3e}"


def assert_equal(got: Result, truth: Result, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Every tensor within ``rtol`` of its largest number; what is no floating number exactly.

    ``atol`` is for what is zero in exact arithmetic (a cross-entropy over one class) of inputs near 1.
    """
    for name, expected in truth.all().items():
        value = got.all()[name]
        assert value.shape == expected.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
        if not expected.is_floating_point():
            assert torch.equal(value.to(expected.dtype), expected), f"{name}: {worst(value, expected)}"
            continue
        allowed = rtol * largest(expected) + atol
        off = errors(value, expected).max().item() if expected.numel() else 0.0
        assert off <= allowed, f"{name}: allowed {allowed:.3e}; {worst(value, expected)}"


def assert_error_rule(
    trials: Sequence[tuple[Result, Result, Result]], factor: float = 2.0, ulps: float = 4.0, terms: float = 0.0
) -> None:
    """For each trial (ours, plain form, truth): our error is at most ``factor`` times the plain form's.

    Both the largest error and the root mean square. Several draws are judged together, since the largest of few
    rounding errors is a matter of luck. A few units in the last place of the largest number are free, for a plain form
    that happens to be exact; ``terms``: the size of what is added up to a gradient, where the sum is much smaller.
    """
    for name, like in trials[0][2].floating().items():
        if not like.numel():
            continue
        ours = torch.stack([errors(got.all()[name], truth.all()[name]) for got, _, truth in trials])
        theirs = torch.stack([errors(plain.all()[name], truth.all()[name]) for _, plain, truth in trials])
        size = max(largest(truth.all()[name]) for _, _, truth in trials)
        if name in trials[0][2].grads:  # one that is zero in exact arithmetic consists of the others' rounding
            size = max(size, terms, 0.1 * max(largest(g) for _, _, truth in trials for g in truth.grads.values()))
        free = ulps * torch.finfo(trials[0][0].all()[name].dtype).eps * size
        for norm, a, b in (("largest", ours.max(), theirs.max()), ("root mean square", _rms(ours), _rms(theirs))):
            if a > factor * b + free:
                got, _, truth = trials[int(ours.reshape(len(trials), -1).amax(1).argmax())]
                place = worst(got.all()[name], truth.all()[name])
                limits = f"plain torch {b:.3e}, allowed {factor * b + free:.3e}"
                raise AssertionError(f"{name}: {norm} error {a:.3e}, {limits}; {place}")


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def use_small_tiles(monkeypatch: pytest.MonkeyPatch, rows: int = 24, cols: int = 48, batch: int = 2) -> None:
    """Make every fold walk many ragged tiles, also a small one: 59 × 111 pairs by three and three, one end ragged."""

    def choose(all_batch: int, all_rows: int, all_cols: int, *_: Any, **__: Any) -> schedule.Tiles:
        least = lambda size, most: min(max(1, size), most)
        return schedule.Tiles(least(all_batch, batch), least(all_rows, rows), least(all_cols, cols))

    internals.set_tiles(monkeypatch, choose=choose, pairs=rows * cols)
