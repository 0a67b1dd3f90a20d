"""How numbers read, in the terminal and on the page alike."""

from __future__ import annotations

import math
from collections.abc import Sequence


def short(number: float) -> str:
    """About three digits.

    >>> [short(x) for x in (1234.5, 123.4, 12.34, 1.234, 0.1234)]
    ['1234', '123', '12.3', '1.23', '0.12']
    """
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def factor(ratio: float) -> str:
    """A ratio as one says it.

    >>> [factor(x) for x in (0.5, 1.25, 14.26, 140.4)]
    ['0.50×', '1.25×', '14.3×', '140×']
    """
    return f"{short(ratio)}×"


def geometric(ratios: Sequence[float]) -> float:
    """The geometric mean, as fits ratios.

    >>> geometric([1.0, 4.0])
    2.0
    """
    return math.exp(sum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 up to ``top``, evenly apart.

    >>> ticks(203), ticks(0.9, 3)
    ([0, 50, 100, 150, 200], [0.0, 0.5])
    """
    rough = max(top, 1e-12) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    whole = int(step) if step >= 1 else step
    return [round(k * whole, 12) for k in range(int(top / step + 1e-9) + 1)]
