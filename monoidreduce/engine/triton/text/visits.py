"""Which tiles a walk by turns meets, and in which order: whole ones first, then those that a condition cuts."""

from __future__ import annotations

from ..spec import Spec
from . import emit


def visits(spec: Spec) -> tuple[dict[str, str], list[str]]:
    """The tile of a ``turn``, where it is whole (``at_whole``), is not (``at_other``), or may be either (``at_any``);
    and the lines before, which say how many are whole and how many there are."""
    if not spec.bounds:
        ranges = ["wholes = folded_size // FOLDED", "visits = tl.cdiv(folded_size, FOLDED)"]
        return dict.fromkeys(("at_whole", "at_other", "at_any"), "turn"), ranges
    whole = "whole_first + turn + tl.where(turn < whole, 0, between)"
    other = "first + rest + tl.where(rest < before, 0, whole) + tl.where(rest < before + between, 0, again)"
    other = other.replace("rest", "(turn - wholes)")
    place = {"at_whole": whole, "at_other": other, "at_any": f"tl.where(turn < wholes, {whole}, {other})"}
    ranges = [*emit._range(spec), "wholes = whole + again"]
    return place, [*ranges, "visits = tl.maximum(wholes + before + between + last - again_last, 1)"]
