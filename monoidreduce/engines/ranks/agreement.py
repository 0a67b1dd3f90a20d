"""The agreement of all ranks, before a sharded call does any work, on the op, its numbers, shapes and shards.

Every rank all-gathers one small header of integers. If any differ, or a rank has failed, all ranks exchange their
reasons and raise the same error: a call that is wrong on one rank is an error on every rank, and none waits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, MonoidReduceError, RankError, ShardError
from ...plan import settings
from ...program.constructors import find_listed
from ...program.expression import Expr, topological
from ...program.trace import HIDDEN
from ..common.evaluate import Sizes
from ..common.shard import (
    Axis,
    Group,
    Ranges,
    Shard,
    abort_group,
    all_gather,
    all_gather_texts,
    all_reduce,
    sum_replicas,
)

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """The user's request: the groups that rows and columns are sharded over, and the order of the shards."""

    rows: Group = None
    cols: Group = None
    order: str = "contiguous"
    batch: tuple[tuple[int, int, int], ...] = ()  # of sharded batch dimensions: see Shard.batch
    slices: int | str | None = None  # see Shard.slices
    shared: frozenset[tuple[str, str]] = frozenset()  # (name, axis) of replicated arguments per pair

    @property
    def ring(self) -> bool:
        return self.rows is not None and self.rows is self.cols

    @property
    def groups(self) -> list[Group]:
        found = [g for g in (self.rows, self.cols) if g is not None]
        return found[:1] if self.rows is self.cols else found

    @property
    def rounds(self) -> list[Group]:
        """The groups to compare headers with: with two groups the first again, for errors found in the second."""
        return [*self.groups, *self.groups[:1]] if len(self.groups) == 2 else self.groups


@dataclass(frozen=True)
class StreamedCall(Layout):
    """In force while a layer runs on some of its rows and columns, as a stream does: its op is handed to ``call``, and
    ``totals`` are the numbers of all rows and columns, None where they are not known yet."""

    call: Any = None
    totals: tuple[int | None, int | None] = (None, None)
    memo: dict[str, int] | None = None  # numbers that are drawn once for the whole stream


def current_layout() -> Layout | None:
    """The current layout; None while torch.compile traces, and where nothing is divided."""
    return None if torch.compiler.is_dynamo_compiling() else settings.layout.get()


@contextlib.contextmanager
def shard(
    *, rows: Any = None, cols: Any = None, order: str = "contiguous", slices: int | str | None = None
) -> Iterator[None]:
    """Inside the block every op sees its rows, its columns or both divided over the ranks of a group.

    ``rows`` and ``cols`` are process groups (or one-dimensional device meshes: ``mesh["cp"]``). Tensors stay local: a
    rank passes its own part, of any length, and gets its own part of the results. What has no divided axis is the same
    on all ranks, and so is its gradient. Both over one group make a ring. With ``order="zigzag"`` a rank's part is the
    r-th and the r-th last of twice as many stretches as ranks, which balances causal work. ``slices=W``, a divisor of
    the number of ranks, makes a grid of a ring: each rank takes the columns of W ranks and the rows of as many as
    remain, which sends less and holds more; ``"best"`` sends least. What is given per pair holds this rank's rows and
    columns; in a ring, its rows and all columns.

    Raises ShardError on every rank where the ranks disagree, RankError where one is lost.

    >>> import torch, monoidreduce as mr
    >>> with mr.shard():  # nothing divided: as without
    ...     mr.ops.attention(torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)).shape
    torch.Size([3, 2])
    """
    if order not in ORDERS:
        raise ArgumentError(detail=f"mr.shard was given order={order!r}", fix=f"Use one of {', '.join(ORDERS)}")
    layout = Layout(*_resolve_groups(_resolve_group("rows", rows), _resolve_group("cols", cols)), order, slices=slices)
    if rows is not None or cols is not None:  # else it is said of DTensors, whose placements are not known yet
        check_slices(layout)
    with use_layout(layout):
        yield


def check_slices(layout: Layout) -> None:
    """Raise ArgumentError unless the ranks can form a grid with this many slices."""
    asked, ranks = layout.slices, layout.rows.size() if layout.ring else 1
    whole = isinstance(asked, int) and not isinstance(asked, bool)
    if asked not in (None, "best") and not (whole and 0 < int(asked) <= ranks and ranks % int(asked) == 0):
        there = f"a ring of {ranks} ranks" if layout.ring else "rows and columns that make no ring"
        good = [w for w in range(1, ranks + 1) if ranks % w == 0]
        raise ArgumentError(
            detail=f"mr.shard was given slices={asked!r} for {there}",
            fix=f'Use "best" or one of {", ".join(map(str, good))}, with rows and columns over one group',
        )


@contextlib.contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    token = settings.layout.set(layout)
    try:
        yield
    finally:
        settings.layout.reset(token)


def _resolve_group(name: str, given: Any) -> Group:
    """The process group of a group or a one-dimensional device mesh; None for a group of one rank."""
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


def _resolve_groups(rows: Group, cols: Group) -> tuple[Group, Group]:
    """Two groups that share one rank, or one for both if they have the same ranks; anything else raises."""
    if rows is None or cols is None or rows is cols:
        return rows, cols
    common = set(dist.get_process_group_ranks(rows)) & set(dist.get_process_group_ranks(cols))
    if len(common) == 1:
        return rows, cols
    if len(common) == rows.size() == cols.size():
        return rows, rows
    raise ArgumentError(
        detail=f"mr.shard was given groups for rows and columns that share the ranks {sorted(common)}",
        fix="Give one group for both, or two dimensions of a mesh, which share one rank",
    )


# Agreeing ---------------------------------------------------------------------------------------------------


def place_call(sizes: Sizes, outputs: tuple[Expr, ...], values: Mapping[str, Any]) -> Sizes:
    """The sizes of a call with its shard, after all ranks have agreed; unchanged if nothing is sharded."""
    layout = current_layout()
    if layout is None or not (layout.groups or layout.batch):
        return sizes
    if any(name.startswith(HIDDEN) for name in values):
        _check_lists(layout)
    here = {"rows": sizes.rows, "cols": sizes.cols}
    given = PairShards.of(layout, here, outputs, values)
    axes = {name: Axis((((0, here[name]),),)) for name in here}
    lengths, given = _agree(layout, _describe_call(sizes, outputs, values, layout), here, sizes.device, given=given)
    for name in here:
        if getattr(layout, name) is not None:
            axes[name] = Axis(_shard_ranges(lengths[name], layout.order), getattr(layout, name))
    shared = given.check(axes["cols"].total)
    groups = tuple((name, getattr(layout, axis)) for name, axis in shared)
    return replace(sizes, shard=Shard(axes["rows"], axes["cols"], layout.batch, layout.slices, groups))


def _check_lists(layout: Layout) -> None:
    """Raise where listed pairs are divided in a way that lists are not."""
    if layout.cols is not None or layout.batch or layout.order != "contiguous":
        raise ShardError(
            detail="a call with cols= is divided over columns, over a batch, or in zigzag order",
            fix="Divide the rows alone, mr.shard(rows=group), and give each rank the lists of its own rows",
        )


def pairs_have_all_columns() -> bool:
    """Whether arguments per pair hold all columns although columns are sharded: in a ring, where columns travel."""
    layout = current_layout()
    return layout is not None and layout.ring


@dataclass(frozen=True)
class PairShards:
    """Arguments per pair: which of their axes are sharded (``own``), and which have size 1 and are ``shared``.

    Both are bit masks over ``axes``. A local length of 1 may be either, and is decided by the headers of the other
    ranks. ``wide``: the numbers of columns they hold in a ring."""

    axes: tuple[tuple[str, str], ...] = ()
    own: int = 0
    shared: int = 0
    wide: tuple[int, ...] = ()

    @staticmethod
    def of(layout: Layout, here: Mapping[str, int], outputs: tuple[Expr, ...], values: Mapping[str, Any]) -> PairShards:
        names = sorted(e.attrs[0] for e in topological(outputs) if e.op == "input" and e.is_pair)
        listed = find_listed(outputs)
        if listed is not None and listed.attrs[0][0] == "edges":  # one number an edge, of this rank's own
            names = []
        divided = [a for a in here if getattr(layout, a) is not None and not (layout.ring and a == "cols")]
        axes = tuple((name, axis) for name in names for axis in divided)
        own = shared = 0
        for k, (name, axis) in enumerate(axes):
            size = values[name].shape[-2 if axis == "rows" else -1]
            if (name, axis) in layout.shared or size != here[axis]:
                shared |= 1 << k
            elif size != 1:
                own |= 1 << k
        lengths = {values[name].shape[-1] for name in names if values[name].shape[-1] != 1} if layout.ring else ()
        return PairShards(axes, own, shared, tuple(lengths))

    def combine_headers(self, headers: list[list[int]]) -> PairShards:
        """These, combined with the headers of the other ranks."""
        own, shared = (functools.reduce(operator.or_, (h[k] for h in headers)) for k in (4, 5))
        return replace(self, own=own, shared=shared, wide=tuple({h[6] for h in headers if h[6]}))

    def check(self, cols: int) -> list[tuple[str, str]]:
        """(name, axis) of the shared ones; raises the same ShardError on every rank where they do not fit together."""
        for k, (name, axis) in enumerate(self.axes):
            if self.own >> k & self.shared >> k & 1:
                raise ShardError(
                    detail=f"{name} is given for every pair: some ranks have its own {axis}, others one for all {axis}",
                    fix=f"Give every rank its own {axis} of it, or every rank the same, of size 1",
                )
        if any(n != cols for n in self.wide):
            raise ShardError(
                detail=f"what is given for every pair has {' or '.join(map(str, sorted(self.wide)))} columns, but "
                f"there are {cols} on all ranks together",
                fix="In a ring, give every rank its own rows of it and all columns",
            )
        return [a for k, a in enumerate(self.axes) if self.shared >> k & 1]


def report_failure(error: MonoidReduceError) -> None:
    """Tell the other ranks that this one failed, so that none waits for it."""
    layout = current_layout()
    if layout is not None and not isinstance(error, (ShardError, RankError)) and not error.details.get("told"):
        error.details["told"] = True
        with contextlib.suppress(ShardError):
            _agree(layout, error.text, {"rows": 0, "cols": 0}, None, failed=True)


def total_sizes(rows: int, cols: int) -> tuple[int, int]:
    """The global numbers of rows and columns; a collective call."""
    layout = current_layout()
    if isinstance(layout, StreamedCall):
        all_rows, all_cols = layout.totals
        return rows if all_rows is None else all_rows, cols if all_cols is None else all_cols
    if layout is None or not layout.groups:
        return rows, cols
    found, _ = _agree(layout, "a count of rows and columns", {"rows": rows, "cols": cols}, None)
    return sum(found.get("rows", [rows])), sum(found.get("cols", [cols]))


def divides_cols() -> bool:
    """Whether other ranks have columns that this one has not."""
    layout = current_layout()
    return layout is not None and (layout.cols is not None or isinstance(layout, StreamedCall))


def streamed_call() -> StreamedCall | None:
    """What a stream asks of the layer that is being called; None where none does."""
    layout = current_layout()
    return layout if isinstance(layout, StreamedCall) else None


def sum_over_ranks(axis: str, total: Tensor) -> Tensor:
    """All-reduce (sum) over the ranks that this axis is sharded over; differentiable."""
    group = getattr(current_layout() or Layout(), axis)
    return total if group is None else sum_replicas(total, group)


def max_over_ranks(axis: str, value: Tensor) -> Tensor:
    """All-reduce (maximum) over the ranks that this axis is sharded over."""
    group = getattr(current_layout() or Layout(), axis)
    return value if group is None else all_reduce(value.detach().clone(), "MAX", group)


def swap_axes() -> contextlib.AbstractContextManager[None]:
    """Exchange rows and columns of the layout inside the block, for a layer that folds both ways with two calls."""
    layout = current_layout()
    if layout is None:
        return contextlib.nullcontext()
    return use_layout(replace(layout, rows=layout.cols, cols=layout.rows))


def _agree(
    layout: Layout,
    description: str,
    here: Mapping[str, int],
    device: torch.device | None,
    failed: bool = False,
    given: PairShards | None = None,
) -> tuple[dict[str, list[int]], PairShards]:
    """The numbers of rows and columns of every rank, and the combined arguments per pair. A disagreement in one group
    is passed on to the others."""
    given = given or PairShards()
    found: dict[str, list[int]] = {}
    problem: ShardError | None = None
    try:
        for group in layout.rounds:
            try:
                headers = exchange_headers(group, failed, description, here, given, device)
                given = given.combine_headers(headers)
                for name in here:
                    lengths = [h[2 if name == "rows" else 3] for h in headers]
                    if getattr(layout, name) is group:
                        found[name] = lengths
                    elif len(set(lengths)) > 1:
                        raise _uneven_error(name, lengths)
            except ShardError as error:
                problem, failed, description = problem or error, True, error.text
    except RankError:
        for group in layout.groups:
            abort_group(group)
        raise
    if problem is not None:
        raise problem
    return found, given


def _uneven_error(name: str, lengths: list[int]) -> ShardError:
    counts = ", ".join(f"{n} on rank {r}" for r, n in enumerate(lengths))
    return ShardError(
        detail=f"{name} are not divided over this group, but differ in number: {counts}",
        fix=f"Give every rank the same {name}, or divide them with mr.shard({name}=...)",
    )


def header_device(group: Group) -> torch.device:
    """Where messages of a group's backend lie."""
    return torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")


def exchange_headers(
    group: Group,
    failed: bool,
    description: str,
    here: Mapping[str, int],
    given: PairShards,
    device: torch.device | None = None,
) -> list[list[int]]:
    """All-gather the headers [status, hash of the description, rows, cols, own, shared, wide]; raises ShardError on all
    ranks unless all descriptions are equal."""
    device = header_device(group) if device is None or dist.get_backend(group) == "gloo" else device
    mine = [
        int(failed),
        _hash_text(description),
        here["rows"],
        here["cols"],
        given.own,
        given.shared,
        max(given.wide, default=0),
    ]
    found = all_gather(torch.tensor(mine, device=device), group).tolist()
    if any(h[0] for h in found) or any(h[1] != found[0][1] for h in found):
        _raise_disagreement([h[0] for h in found], all_gather_texts(description, group))
    return found


def _raise_disagreement(status: list[int], description: list[str]) -> None:
    failed = [r for r, s in enumerate(status) if s]
    if failed:
        reasons = "; ".join(f"rank {r}: {description[r]}" for r in failed)
        raise ShardError(detail=f"not every rank could take part: {reasons}")
    lines = [text.split("\n") for text in description]
    for parts in zip(*lines, strict=False):
        if len(set(parts)) > 1:
            raise ShardError(
                detail="the ranks disagree: " + "; ".join(f"rank {r} has {part}" for r, part in enumerate(parts)),
                fix="Call the same op on every rank, with the same numbers, types, features and batch",
            )
    raise ShardError(detail="the ranks call different programs", fix="Call the same op on every rank")


def _describe_call(sizes: Sizes, outputs: tuple[Expr, ...], values: Mapping[str, Any], layout: Layout) -> str:
    """Everything that must be equal on all ranks, as lines of text."""
    lines = [f"program {fingerprint(outputs)}", f"batch {list(sizes.batch)}", f"device {sizes.device.type}"]
    lines += [f"order {layout.order}", f"slices {layout.slices}"]
    for name, value in values.items():
        if isinstance(value, Tensor):
            lines.append(f"{name} of {str(value.dtype)[6:]} and {value.dim()} dimensions")
        elif isinstance(value, (int, float, bool)):
            lines.append(f"{name} = {value!r}")
    lines += [f'{count} features "{letter}"' for letter, count in sorted(sizes.letters.items())]
    return "\n".join(lines)


@functools.lru_cache(maxsize=1024)
def fingerprint(outputs: tuple[Expr, ...]) -> str:
    """A hash of a program's nodes, equal on all machines for equal programs."""
    number: dict[Expr, int] = {}
    text = hashlib.sha256()
    for e in topological(outputs):
        number[e] = len(number)
        attrs = [a.__name__ if isinstance(a, type) else repr(a) for a in e.attrs]
        text.update(f"{e.op} {[number[a] for a in e.args]} {attrs} {e.axes} {e.dtype}\n".encode())
    return text.hexdigest()[:16]


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _shard_ranges(lengths: list[int], order: str) -> tuple[Ranges, ...]:
    """The global index ranges of each rank, from the lengths of the shards."""
    if order == "contiguous":
        ends = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        return tuple(((ends[r], ends[r + 1]),) for r in range(len(lengths)))
    halves = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
    ends = [sum(halves[:k]) for k in range(len(halves) + 1)]
    last = len(halves) - 1
    return tuple(((ends[r], ends[r + 1]), (ends[last - r], ends[last - r + 1])) for r in range(len(lengths)))
