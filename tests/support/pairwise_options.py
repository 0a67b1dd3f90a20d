"""Few samples that try every pair of options together.

Most faults of options in combination show with two of them at once; all pairs of a dozen options fit in a few dozen
samples, where all combinations would be millions.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Choice = tuple[str, int]  # a factor and the place of its value


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True, tries: int = 60
) -> list[dict[str, Any]]:
    """Samples (one value for each factor) in which every pair of values that is ``allowed`` together occurs.

    Greedy: each sample starts from a pair not yet seen, and of some random completions the one that shows most new
    pairs is taken. A pair of which no completion is found is taken to be forbidden. The same samples on every run.
    """
    rng = random.Random(len(factors))
    missing = {pair: None for pair in _pairs((n, k) for n, values in factors.items() for k in range(len(values)))}
    samples = []
    while missing:
        start = next(iter(missing))
        drawn = [_complete(factors, start, rng) for _ in range(tries)]
        fitting = [s for s in drawn if allowed({n: factors[n][k] for n, k in s.items()})]
        best = max(fitting, key=lambda s: sum(p in missing for p in _pairs(s.items())), default=None)
        for pair in [start] if best is None else _pairs(best.items()):
            missing.pop(pair, None)
        if best is not None:
            samples.append({n: factors[n][k] for n, k in best.items()})
    return samples


def _complete(factors: Mapping[str, Sequence[Any]], start: Iterable[Choice], rng: random.Random) -> dict[str, int]:
    fixed = dict(start)
    return {n: fixed.get(n, rng.randrange(len(values))) for n, values in factors.items()}


def _pairs(choices: Iterable[Choice]) -> list[tuple[Choice, Choice]]:
    """Every two choices of different factors, in the order of the factors."""
    return [(a, b) for a, b in itertools.combinations(choices, 2) if a[0] != b[0]]
