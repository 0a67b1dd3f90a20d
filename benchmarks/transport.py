"""Debiased Sinkhorn divergences with their gradient, ours beside GeomLoss: time, and how far each is from the optimum.

``python -m benchmarks.transport`` prints a table and writes it to ``benchmarks/results/``. One thread, processor time.
Ours is the function of docs/points.md. GeomLoss's ``tensorized`` form holds the matrices of costs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import geomloss
import torch
from torch import Tensor

from monoidreduce import ops

from .cpu import environment, write_results
from .points import cpu_ms

BLUR, TOLERANCES, SCALINGS = 0.1, (1e-2, 1e-3, 1e-5), (0.5, 0.9, 0.99)


def divergence(x: Tensor, y: Tensor, tolerance: float, iterations: int = 1000) -> Tensor:
    """S(x, y) for the cost |x - y|² / 2, as docs/points.md has it."""
    x, y = x / math.sqrt(2), y / math.sqrt(2)

    def transport(a: Tensor, b: Tensor) -> Tensor:
        scaling = 1.0 if a is b else 0.5
        return ops.sinkhorn(a, b, eps=BLUR**2, iterations=iterations, tolerance=tolerance, scaling=scaling).value

    return transport(x, y) - (transport(x, x) + transport(y, y)) / 2


def contenders(y: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for tolerance in TOLERANCES:
        yield f"ours, tolerance {tolerance:.0e}", lambda x, t=tolerance: divergence(x, y, t)  # type: ignore[misc]
    for scaling in SCALINGS:
        loss = geomloss.SamplesLoss("sinkhorn", p=2, blur=BLUR, scaling=scaling, backend="tensorized")
        yield f"GeomLoss, scaling {scaling}", lambda x, loss=loss: loss(x, y)  # type: ignore[misc]


def measure(points: int) -> list[dict[str, Any]]:
    """Every contender: milliseconds of value and gradient, and the value's relative distance from the optimum."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(points, 3, generator=draw), torch.rand(points, 3, generator=draw) / 2 + 0.5
    best = float(divergence(x.double(), y.double(), 1e-10, 5000))
    found = []
    for name, loss in contenders(y):

        def both(loss: Callable[[Tensor], Tensor] = loss) -> float:
            leaf = x.clone().requires_grad_()
            value = loss(leaf)
            value.backward()
            return float(value.detach())

        both()
        ms, value = cpu_ms(both, 3)
        found.append({"points": points, "who": name, "ms": ms, "error": abs(value - best) / best})
        print(found[-1], file=sys.stderr, flush=True)
    return found


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {key}: {value}" for key, value in results["environment"].items()]
    lines += [
        "",
        f"Value and gradient of the divergence of two clouds in 3 dimensions, float32, blur {BLUR}. Distance: of the "
        "value from the optimum, relative, by a run in float64.",
        "",
        "| points | | CPU ms | distance |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['points']} | {r['who']} | {r['ms']:,.0f} | {r['error']:.0e} |" for r in results["rows"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, nargs="*", default=[1000, 4000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    said = environment() | {"command": " ".join(["python -m benchmarks.transport", *sys.argv[1:]])}
    results = {"environment": said, "rows": [row for count in options.points for row in measure(count)]}
    text = markdown(results)
    print(text)
    write_results("transport", results, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
