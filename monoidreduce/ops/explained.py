"""``ops.NAME.explain``: what the ops of a ready-made layer would run.

A layer is Python around ops: checks, views, defaults. It is called once while ops answer with zeros, so that no pair is
computed, and every call of an op is explained (``explain.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..explain import Explanation, measure
from ..op import Calls, explained_calls
from ..plan.budget import format_ceil


class _Watched(TorchDispatchMode):
    """Changes nothing. Under a dispatch mode no call is a cached plan: ops are called by the long way, and listed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; torch's guard against it would import Dynamo."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def explain_layer(
    layer: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], backward: bool, timed: bool, name: str
) -> Explanation:
    """What each op of a call would run, and why. ``timed``: the layer is run a few times, and measured."""
    found: dict[str, tuple[Explanation, int]] = {}
    calls = _list_calls(layer, args, kwargs)
    for op, own, named in calls:
        text = op.explain(*own, backward=backward, **named)
        found[str(text)] = text, found.get(str(text), (text, 0))[1] + 1
    lines = [f"{name} calls {len(calls)} op{'s'[: len(calls) != 1]}"]
    lines += [f"{text}\n  ({n} calls like this one)" if n > 1 else str(text) for text, n in found.values()]
    measured = measure(layer, args, kwargs, backward) if timed else None
    if measured is not None:
        lines.append(
            f"measured: {measured.seconds * 1e3:.3g} ms, {format_ceil(measured.peak)} at once, the whole layer"
        )
    made = Explanation("\n".join(lines))
    made.data = {
        "layer": name,
        "calls": [{**text.as_dict(), "times": n} for text, n in found.values()],
        "measured": None if measured is None else vars(measured),
    }
    return made


def _list_calls(layer: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Calls:
    """The calls of ops that a layer makes."""
    calls: Calls = []
    token = explained_calls.set(calls)
    try:
        with _Watched():
            layer(*args, **kwargs)
    finally:
        explained_calls.reset(token)
    return calls
