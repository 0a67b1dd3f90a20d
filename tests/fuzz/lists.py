"""Random programs over lists of columns (``cols=``), against the same body with a condition in each of its reductions.

The second form knows nothing of lists: it is run by the reference engine, which the rest of the fuzzer compares with
plain torch. A program's number gives its lists too: edges, blocks or packed sequences, some of them empty.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.domains import Domain, Edges, Jagged
from tests.support.masked_twin import twin

from .compare import Failure
from .generate import generate
from .programs import Program, flat
from .tree import topological

_FAR = 2.0**61  # whole numbers beyond: the least and the greatest, which stand for a row without columns


def assert_lists(seeds: range, engine: str = "eager") -> None:
    """The programs with these numbers give what the twins give; else an AssertionError that shows the first."""
    found = [(seed, check(seed, engine)) for seed in seeds]
    failed = [(seed, failure) for seed, failure in found if failure is not None]
    if failed:
        seed, failure = failed[0]
        numbers = ", ".join(f"{s} ({f.kind})" for s, f in failed)
        text = f"{len(failed)} programs failed: {numbers}\n\n{failure.kind}\n{failure.detail}"
        raise AssertionError(f"{text}\n\n{draw_domain(seed, *_lengths(generate(seed)))}\n{generate(seed).source()}")


def is_listed(program: Program) -> bool:
    """Whether the twin can tell: it counts in floating point, and knows no places of several best."""
    styles = {p.style for p in program.params}
    nodes = topological(program.outputs)
    truths = [n for n in nodes if n.op in ("mr.max", "mr.min") and n.args[0].cls == "bool"]  # of nothing: a truth value
    several = any(n.op.startswith("mr.topk") for n in nodes)
    return all(_lengths(program)) and not (styles & {"beyond 2**24", "beyond 2**53", "huge"} or several or truths)


def draw_domain(seed: int, rows: int, cols: int) -> Domain:
    chance = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=chance))
    if seed % 3 == 0:
        sequences = number(1, 3)
        ends = lambda length: torch.randint(0, length + 1, (sequences,), generator=chance).sort().values
        return mr.jagged(*(torch.cat([torch.zeros(1, dtype=torch.int64), ends(n)]) for n in (rows, cols)))
    if seed % 3 == 1:
        high, wide = number(1, 4), number(1, 4)
        keep = torch.rand(-(-rows // high), -(-cols // wide), generator=chance) > 0.4
        return mr.blocks.from_mask(keep, rows=high, cols=wide)
    keep = torch.rand(rows, cols, generator=chance) > 0.5
    keep[number(0, rows - 1)] = False
    owner, index = keep.nonzero().unbind(1)
    order = torch.rand(len(owner), generator=chance).argsort()
    order = order[owner[order].argsort(stable=True)]  # not sorted within a list
    return mr.edges(torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)]), index[order])


def check(seed: int, engine: str) -> Failure | None:
    """What is wrong with a program over its lists, in float64; None if nothing is, or if the twin cannot tell."""
    program = generate(seed)
    batch = () if 0 in program.sizes.batch else program.sizes.batch
    program = replace(program, dtype="float64", sizes=replace(program.sizes, batch=batch))
    if not is_listed(program):
        return None
    rows, cols = _lengths(program)
    domain = draw_domain(seed, rows, cols)
    row, col = torch.arange(rows), torch.arange(cols)
    if isinstance(domain, Jagged):
        row, col = domain.row_positions(rows).long(), domain.col_positions(cols).long()
    op = program.op()

    def dense(*args: Any) -> Any:
        exists = domain.mask(rows, cols) > 0
        with mr.use(engine="reference"):
            return twin(op)(*args, exists=exists, row=row, col=col, count=cols)

    def listed(*args: Any) -> Any:
        given = list(args)
        if isinstance(domain, Edges):  # numbers of pairs as numbers of edges
            owner = torch.repeat_interleave(domain.rowptr.diff())
            for k, p in enumerate(program.params):
                if p.axis == "pair":
                    given[k] = given[k].expand(*given[k].shape[:-2], rows, cols)[..., owner, domain.index.long()]
        with mr.use(engine=engine):
            return op(*given, cols=domain)

    try:
        truth = _differentiated(program, dense)
    except mr.UnreducedError:  # what is one number for all rows is, over lists, one for each
        truth = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=mr.FallbackWarning)  # a kernel is not promised for everything
            warnings.filterwarnings("ignore", message=".* encountered in", category=RuntimeWarning)  # numpy's, of inf
            found = _differentiated(program, listed)
    except Exception as error:
        refused = not truth and isinstance(error, mr.UnreducedError)
        return None if refused else Failure(f"raised {type(error).__name__}", traceback.format_exc())
    if not truth:
        return Failure("ran", "the twin has a number for every pair")
    largest = max((t[t.isfinite()].abs().max().item() for t in truth.values() if t.isfinite().any()), default=0.0)
    for name, expected in truth.items():
        got = found[name]
        if got.shape != expected.shape:
            return Failure("shape", f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        same = (got == expected) | ((got - expected).abs() <= 1e-7 * (1 + largest))
        # a gradient that the twin does not have: inf times 0, of a pair that does not exist
        same |= expected.isnan() & (got.isnan() | torch.tensor(name.startswith("gradient")))
        if not same.all():
            return Failure(f"{name.split()[0]} differs", f"{name}: got\n{got}\nexpected\n{expected}")
    return None


def _lengths(program: Program) -> tuple[int, int]:
    return program.sizes.rows, program.sizes.cols


def _differentiated(program: Program, call: Callable[..., Any]) -> dict[str, Tensor]:
    """Outputs and gradients by name, in float64."""
    args = program.arguments(torch.float64)
    outputs = flat(call(*args))
    found = {f"output {k}": _far(y.detach().double()) for k, y in enumerate(outputs)}
    chance = torch.Generator().manual_seed(program.seed)
    cotangents = [torch.randint(-4, 5, y.shape, generator=chance).double() / 4 for y in outputs]
    live = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    inputs = {p.name: a for p, a in zip(program.params, args, strict=True) if p.grad}
    if live and inputs:
        ys, gs = zip(*live, strict=True)
        grads = torch.autograd.grad(ys, list(inputs.values()), gs, allow_unused=True)
        found |= {
            f"gradient of {n}": torch.zeros_like(x) if g is None else g
            for (n, x), g in zip(inputs.items(), grads, strict=True)
        }
    return found


def _far(x: Tensor) -> Tensor:
    return torch.where(x.abs() > _FAR, x.sign() * torch.inf, x)
