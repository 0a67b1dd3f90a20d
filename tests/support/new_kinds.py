"""Kinds of reduction that the library does not have, and what their tests share.

A kind of yours is a file like ``logmeanexp.py`` and a row in ``CASES``: it then runs on every engine, by kernels, in
streams and over ranks. The file says ``KIND``; ``OPS``, bodies of (x: Row["d"], y: Col["d"], b: Col), of which
``by_rows`` has results per row alone; ``AXES`` of their results; and ``plain(op, x, y, b)``, the same in plain torch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from monoidreduce.reductions import KINDS, Reduction
from tests.support import logmeanexp, mean_square

CASES: dict[str, ModuleType] = {case.KIND.name: case for case in (logmeanexp, mean_square)}
NAMES = [(name, op) for name, case in CASES.items() for op in case.OPS]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Their rows in the table of kinds."""
    before = dict(KINDS)
    KINDS.update({name: case.KIND for name, case in CASES.items()})
    try:
        yield
    finally:
        KINDS.clear()
        KINDS.update(before)


def problem(rows: int = 37, cols: int = 83, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = (rows, 5), (cols, 5), (cols,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(function: Any, args: Sequence[Tensor]) -> list[Tensor]:
    """The values of a function, and gradients for a cotangent that weighs all of them differently."""
    given = [a.detach().clone().requires_grad_() for a in args]
    values = list(function(*given))
    cotangents = [cotangent(len(v)).to(v.dtype) for v in values]
    return [*(v.detach() for v in values), *torch.autograd.grad(values, given, cotangents)]


def cotangent(length: int) -> Tensor:
    return torch.cos(torch.arange(length, dtype=torch.float64))


def count_fields(name: str) -> int:
    """How many fields the reductions of a kind have."""
    passes = CASES[name].by_rows.program(*problem()).passes
    return next(len(r.args) for p in passes for r in p.fold.reductions if r.attrs[0] == name)


def has_absent(kind: Reduction) -> bool:
    """True for a kind that calls over lists of columns may use."""
    return type(kind).absent is not Reduction.absent


def truth(name: str, op: str, args: Sequence[Tensor]) -> list[Tensor]:
    """Values and gradients by plain torch in float64."""
    return with_gradients(lambda *given: CASES[name].plain(op, *given), [a.double() for a in args])


def check(name: str, op: str, args: Sequence[Tensor], tolerance: float = 1e-9) -> None:
    """An op of a kind, by the engine in force, against plain torch."""
    found = with_gradients(CASES[name].OPS[op], args)
    for got, right in zip(found, truth(name, op, args), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)
