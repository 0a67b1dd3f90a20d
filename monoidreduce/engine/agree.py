"""Before a sharded call does any work, its ranks agree: on the op, the numbers, the shapes and who has what.

Every rank sends one small header of integers. If any differ, or a rank could not even get so far, all ranks then tell
their reasons and all raise the same kind of error; a call that is wrong anywhere is wrong everywhere, and none waits.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, MonoidReduceError, RankError, ShardError
from ..program.expr import Expr, topological
from . import exchange
from .evaluate import Sizes
from .exchange import Group
from .shard import Axis, Pieces, Shard

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """What the user asked for: the groups that rows and columns are divided over, and in which order they lie."""

    rows: Group = None
    cols: Group = None
    order: str = "contiguous"
    batch: tuple[tuple[int, int, int], ...] = ()  # of divided batch dimensions: see Shard.batch

    @property
    def groups(self) -> list[Group]:
        found = [g for g in (self.rows, self.cols) if g is not None]
        return found[:1] if self.rows is self.cols else found

    @property
    def rounds(self) -> list[Group]:
        """The groups to agree with: where there are two, the first again, for what only the second one found."""
        return [*self.groups, *self.groups[:1]] if len(self.groups) == 2 else self.groups


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def current() -> Layout | None:
    """The layout in force; none in what torch.compile traces."""
    return None if torch.compiler.is_compiling() else _layout.get()


@contextlib.contextmanager
def shard(*, rows: Any = None, cols: Any = None, order: str = "contiguous") -> Iterator[None]:
    """Inside the block every op sees its rows, its columns or both divided over the ranks of a group.

    ``rows`` and ``cols`` are process groups (or one-dimensional device meshes: ``mesh["cp"]``). Tensors stay local: a
    rank passes its own part, of any length, and gets its own part of the results. What has no divided axis is the same
    on all ranks, and so is its gradient. Both over one group make a ring. With ``order="zigzag"`` a rank's part is the
    r-th and the r-th last of twice as many stretches as ranks, which balances causal work.

    Raises ShardError on every rank where the ranks disagree, RankError where one is lost.

    >>> import torch, monoidreduce as mr
    >>> with mr.shard():  # nothing divided: as without
    ...     mr.ops.attention(torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)).shape
    torch.Size([3, 2])
    """
    if order not in ORDERS:
        raise ArgumentError(detail=f"mr.shard was given order={order!r}", fix=f"Use one of {', '.join(ORDERS)}")
    with dividing(Layout(_group("rows", rows), _group("cols", cols), order)):
        yield


@contextlib.contextmanager
def dividing(layout: Layout) -> Iterator[None]:
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def _group(name: str, given: Any) -> Group:
    """A process group, a device mesh of one dimension, or nothing; a group of one divides nothing."""
    if given is None:
        return None
    if hasattr(given, "get_group") and hasattr(given, "ndim"):
        if given.ndim != 1:
            raise ArgumentError(
                detail=f"mr.shard was given a mesh of {given.ndim} dimensions for {name}", fix='Name one: mesh["name"]'
            )
        given = given.get_group()
    if not dist.is_available() or not isinstance(given, dist.ProcessGroup):
        raise ArgumentError(
            detail=f"mr.shard was given {given!r} for {name}",
            fix="Give a torch.distributed process group (dist.group.WORLD) or a DeviceMesh of one dimension",
        )
    return given if given.size() > 1 else None


# Agreeing ---------------------------------------------------------------------------------------------------


def place(sizes: Sizes, outputs: tuple[Expr, ...], values: Mapping[str, Any]) -> Sizes:
    """The sizes of a call with its place among the ranks; as they are where nothing is divided."""
    layout = current()
    if layout is None or not (layout.groups or layout.batch):
        return sizes
    if any(e.op == "input" and e.is_pair for e in topological(outputs)):
        raise ArgumentError(
            detail="an argument is given for every pair, which cannot be divided over ranks",
            fix="Say it with indices, or with numbers per row and per column",
        )
    here = {"rows": sizes.rows, "cols": sizes.cols}
    axes = {name: Axis((((0, here[name]),),)) for name in here}
    lengths = _agreed(layout, _told(sizes, outputs, values, layout), here, sizes.device)
    for name in here:
        if getattr(layout, name) is not None:
            axes[name] = Axis(_pieces(lengths[name], layout.order), getattr(layout, name))
    return replace(sizes, shard=Shard(axes["rows"], axes["cols"], layout.batch))


def withdraw(error: MonoidReduceError) -> None:
    """Tell the other ranks that this one cannot take part, so that none waits for it."""
    layout = current()
    if layout is not None and not isinstance(error, ShardError | RankError) and not error.details.get("told"):
        error.details["told"] = True
        with contextlib.suppress(ShardError):
            _agreed(layout, error.text, {"rows": 0, "cols": 0}, None, failed=True)


def whole_cols(rows: int, cols: int) -> int:
    """How many columns there are on all ranks together, for a check that comes before the op; asked by all ranks."""
    layout = current()
    if layout is None or layout.cols is None:
        return cols
    return sum(_agreed(layout, "a check of columns", {"rows": rows, "cols": cols}, None)["cols"])


def divides_cols() -> bool:
    """Whether other ranks have columns that this one has not."""
    layout = current()
    return layout is not None and layout.cols is not None


def over_rows(total: Tensor) -> Tensor:
    """A sum over this rank's rows as that over all rows; differentiable."""
    layout = current()
    return total if layout is None or layout.rows is None else exchange.Totalled.apply(total, layout.rows)


def _agreed(
    layout: Layout, told: str, here: Mapping[str, int], device: torch.device | None, failed: bool = False
) -> dict[str, list[int]]:
    """How many rows and columns every rank has. A disagreement in one group is carried into the others."""
    found: dict[str, list[int]] = {}
    problem: ShardError | None = None
    try:
        for group in layout.rounds:
            try:
                headers = _headers(group, failed, told, here, device or _device(group))
                for name in here:
                    lengths = headers[:, 2 if name == "rows" else 3].tolist()
                    if getattr(layout, name) is group:
                        found[name] = lengths
                    elif len(set(lengths)) > 1:
                        raise _uneven(name, lengths)
            except ShardError as error:
                problem, failed, told = problem or error, True, error.text
    except RankError:
        for group in layout.groups:
            exchange.hang_up(group)
        raise
    if problem is not None:
        raise problem
    return found


def _uneven(name: str, lengths: list[int]) -> ShardError:
    counts = ", ".join(f"{n} on rank {r}" for r, n in enumerate(lengths))
    return ShardError(
        detail=f"{name} are not divided over this group, but differ in number: {counts}",
        fix=f"Give every rank the same {name}, or divide them with mr.shard({name}=...)",
    )


def _device(group: Group) -> torch.device:
    return torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")


def _headers(group: Group, failed: bool, told: str, here: Mapping[str, int], device: torch.device) -> Tensor:
    """Everybody's [status, what was told (hashed), rows, cols]; an error on all ranks unless all tell the same."""
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
    header = torch.tensor([int(failed), _digest(told), here["rows"], here["cols"]], device=device)
    found = exchange.gather(header, group).cpu()
    if bool(found[:, 0].any()) or bool((found[:, 1] != found[0, 1]).any()):
        _raise(found[:, 0].tolist(), exchange.texts(told, group))
    return found


def _raise(status: list[int], told: list[str]) -> None:
    failed = [r for r, s in enumerate(status) if s]
    if failed:
        reasons = "; ".join(f"rank {r}: {told[r]}" for r in failed)
        raise ShardError(detail=f"not every rank could take part: {reasons}")
    lines = [text.split("\n") for text in told]
    for parts in zip(*lines, strict=False):
        if len(set(parts)) > 1:
            raise ShardError(
                detail="the ranks disagree: " + "; ".join(f"rank {r} has {part}" for r, part in enumerate(parts)),
                fix="Call the same op on every rank, with the same numbers, types, features and batch",
            )
    raise ShardError(detail="the ranks call different programs", fix="Call the same op on every rank")


def _told(sizes: Sizes, outputs: tuple[Expr, ...], values: Mapping[str, Any], layout: Layout) -> str:
    """All that must be equal on every rank, as lines of text."""
    lines = [f"program {fingerprint(outputs)}", f"batch {list(sizes.batch)}", f"device {sizes.device.type}"]
    lines += [f"order {layout.order}"]
    for name, value in values.items():
        if isinstance(value, Tensor):
            lines.append(f"{name} of {str(value.dtype)[6:]} and {value.dim()} dimensions")
        elif isinstance(value, int | float | bool):
            lines.append(f"{name} = {value!r}")
    lines += [f'{count} features "{letter}"' for letter, count in sorted(sizes.letters.items())]
    return "\n".join(lines)


@functools.lru_cache(maxsize=1024)
def fingerprint(outputs: tuple[Expr, ...]) -> str:
    """A program, told by its nodes: equal on all machines for equal programs."""
    number: dict[Expr, int] = {}
    text = hashlib.sha256()
    for e in topological(outputs):
        number[e] = len(number)
        attrs = [a.__name__ if isinstance(a, type) else repr(a) for a in e.attrs]
        text.update(f"{e.op} {[number[a] for a in e.args]} {attrs} {e.axes} {e.dtype}\n".encode())
    return text.hexdigest()[:16]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _pieces(lengths: list[int], order: str) -> tuple[Pieces, ...]:
    """Which stretches of the whole axis each rank has, from how much it has."""
    if order == "contiguous":
        ends = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        return tuple(((ends[r], ends[r + 1]),) for r in range(len(lengths)))
    halves = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
    ends = [sum(halves[:k]) for k in range(len(halves) + 1)]
    last = len(halves) - 1
    return tuple(((ends[r], ends[r + 1]), (ends[last - r], ends[last - r + 1])) for r in range(len(lengths)))
