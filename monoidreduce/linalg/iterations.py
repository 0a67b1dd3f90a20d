"""The loop of conjugate gradients: several right-hand sides at once, each with its own steps.

Nothing here is differentiated: ``conjugate_gradients.py`` puts a gradient above it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConvergenceError
from .matrices import Product, not_positive

LEAST_SECONDS = 0.5  # between two lines of progress
RESTARTS = 8  # how often the true residual may disagree with the recurrence before that is an error

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Options:
    """How far, how long, and with what help a system is solved; the same for its gradient's systems."""

    tol: float
    maxiter: int
    preconditioner: Callable[[Tensor], Tensor] | None = None
    progress: Progress | None = None


@dataclass
class Steps:
    """The step lengths of each column [k], iteration by iteration: what the Lanczos matrix is made of."""

    alpha: list[Tensor]
    beta: list[Tensor]


def print_progress(tol: float, maxiter: int) -> Progress:
    """What prints one line to stderr and keeps it up to date: iterations, the largest residual, seconds."""
    begin, last = time.monotonic(), [0.0]

    def show(iteration: int, residual: float) -> None:
        now = time.monotonic()
        done = residual <= tol or iteration >= maxiter
        if done or now - last[0] >= LEAST_SECONDS:
            last[0] = now
            line = f"\rcg: {iteration} of at most {maxiter} iterations, residual {residual:.1e} of {tol:.0e}"
            sys.stderr.write(f"{line}, {now - begin:.1f} s" + ("\n" if done else ""))
            sys.stderr.flush()

    return show


def solve(
    product: Product,
    b: Tensor,
    options: Options,
    start: Tensor | None = None,
    floor: Tensor | float = 0.0,
    steps: Steps | None = None,
) -> Tensor:
    """x [N, k] with |b - K x| ≤ tol |b| in every column; raises ConvergenceError where that is not reached.

    ``floor``: an absolute bound [k] besides, below which residuals do not matter. ``steps`` collects step lengths (then
    there is no preconditioner, and columns stay where they are)."""
    sizes = b.norm(dim=0)
    bound = torch.maximum(options.tol * sizes, torch.as_tensor(floor, dtype=b.dtype, device=b.device))
    x = torch.zeros_like(b) if start is None else start.clone()
    residual = b.clone() if start is None else b - product(x)
    iteration, before = 0, math.inf
    for _ in range(RESTARTS):
        left = (residual.norm(dim=0) > bound).nonzero().squeeze(-1)
        if not len(left):
            return x
        whole = len(left) == b.shape[1]
        part, r, limit = (x, residual, bound) if whole else (x[:, left], residual[:, left], bound[left])
        own = sizes if whole else sizes[left]
        part, iteration = _iterate(product, part, r, (limit / 2, own), options, iteration, steps)  # a half for drift
        if whole:
            x = part
        else:
            x[:, left] = part
        residual = b - product(x)  # the recurrence drifts from the true residual; only the true one counts
        reached = _largest(residual.norm(dim=0), bound)
        if reached <= 1 or iteration >= options.maxiter:
            break
        if reached > before / 2:  # rounding decides: another restart would not help
            break
        before, steps = reached, None
    norms = residual.norm(dim=0)
    if _largest(norms, bound) <= 1:
        return x
    worst = int((norms / bound.clamp(min=1e-300)).argmax())
    relative = float(norms[worst] / sizes[worst]) if float(sizes[worst]) else math.inf
    raise ConvergenceError(
        iterations=iteration,
        residual=f"{relative:.1e}",
        tol=f"{options.tol:.1e}",
        column=f" of column {worst}" if b.shape[1] > 1 else "",
        fix=_advice(iteration >= options.maxiter, b.dtype, options.preconditioner is not None),
    )


def _largest(norms: Tensor, bound: Tensor) -> float:
    """The largest residual in units of its bound; NaN is infinite."""
    found = torch.where(norms == 0, 0.0, norms / bound)
    return float(found.nan_to_num(nan=math.inf).max()) if found.numel() else 0.0


def _advice(too_few: bool, dtype: torch.dtype, preconditioned: bool) -> str:
    more = "" if preconditioned else "a preconditioner (linalg.nystroem), "
    if too_few:
        return f"Try {more}a larger ridge, a larger tol, or a larger maxiter"
    precision = "float64, " if dtype is torch.float32 else ""
    return f"Rounding keeps it there. Try {precision}{more}a larger ridge, or a larger tol"


def _iterate(
    product: Product,
    x: Tensor,
    r: Tensor,
    scale: tuple[Tensor, Tensor],
    options: Options,
    iteration: int,
    steps: Steps | None,
) -> tuple[Tensor, int]:
    """Iterate until the recurrence's residuals are below ``scale``'s bounds (the first; the second are sizes of b).

    A column that is done stays as it is; once half are, the others go on alone."""
    bound, sizes = scale
    helped = options.preconditioner or (lambda v: v)
    found, place = x.clone(), torch.arange(x.shape[1], device=x.device)
    x, r = x.clone(), r.clone()
    z = helped(r)
    p, rz = z.clone(), (r * z).sum(0)
    active = r.norm(dim=0) > bound
    while iteration < options.maxiter:
        many = int(active.sum())
        if not many:
            break
        if steps is None and 2 * many <= x.shape[1]:
            found[:, place] = x
            keep = active.nonzero().squeeze(-1)
            x, r, p, place, rz = x[:, keep], r[:, keep], p[:, keep], place[keep], rz[keep]
            bound, sizes, active = bound[keep], sizes[keep], active[keep]
        image = product(p)
        curvature = (p * image).sum(0)
        if bool((active & ~(curvature > 0)).any()):
            _fail_curvature(p, image, curvature, active)
        alpha = torch.where(active, rz / curvature, 0.0)
        x, r = x + alpha * p, r - alpha * image
        z = helped(r)
        new = (r * z).sum(0)
        beta = torch.where(active & (rz != 0), new / rz, 0.0)
        p, rz = z + beta * p, torch.where(active, new, rz)
        if steps is not None:
            steps.alpha.append(alpha)
            steps.beta.append(beta)
        norms = r.norm(dim=0)
        active = active & (norms > bound)
        iteration += 1
        if options.progress is not None:
            options.progress(iteration, float((norms / sizes.clamp(min=1e-300)).max()))
    found[:, place] = x
    return found, iteration


def _fail_curvature(p: Tensor, image: Tensor, curvature: Tensor, active: Tensor) -> None:
    at = int((active & ~(curvature > 0)).to(torch.uint8).argmax())
    if not bool(image[:, at].isfinite().all()):
        raise ConvergenceError(
            iterations="some", residual="not finite", tol="a number", column="", fix="Look for NaN and infinity in b"
        )
    raise not_positive(float(curvature[at] / (p[:, at].norm() * image[:, at].norm()).clamp(min=1e-300)))
