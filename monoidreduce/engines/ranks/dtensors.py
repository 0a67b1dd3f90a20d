"""DTensor arguments: their placements say what is sharded; the call runs on the local shards.

On each mesh dimension, the rows, the columns, both, or one batch dimension of the arguments may be sharded; arguments
with other placements are redistributed (a slice of a replicated one, an all-gather of a row's sharded features; columns
whose features are sharded become sharded columns, by torch's all-to-all). A sharded batch dimension needs no
communication, except for gradients of arguments without it.

A plain tensor may stand beside DTensors where that has one meaning, and so may a DTensor on
some dimensions of the others' mesh. Results are DTensors where the arguments along their axis are, else plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, MonoidReduceError, ShardError
from ...program.expression import Expr
from ...program.trace import AXES
from ..common import shard
from ..common.evaluate import Sizes
from ..common.shard import Group, find_chunk, own_chunk, replicate
from . import agreement

# Plain tensors beside DTensors, and DTensors on a part of the others' mesh: what they mean, agreed by all ranks.
#
# Nobody said how such a tensor lies over the mesh (or over the dimensions that it lacks). Along an axis that the
# DTensors shard, its size says it: the global size is the whole tensor, of which each rank takes its slice; a rank's
# own size is that rank's shard. Without such an axis it is the same on all ranks, as under torch's
# ``implicit_replication``, which is checked by sums of its numbers. What is neither is one error on every rank.

Key = tuple[str, int] | None  # ("rows", k), ("cols", 0), ("batch", counted from the right); None: features, broadcast
Axes = tuple[Key, ...]
_TOLERANCE = 1e-5  # of sums of numbers: replicas may differ in their last digits, two batches differ in the first


class UnplacedAxis(NamedTuple):
    """A sharded axis of a tensor whose placement over mesh dimension ``dim`` nobody said."""

    name: str
    dim: int
    axis: str
    size: int
    own: int  # the size of this rank's shard
    whole: int | None  # the global size, None where no DTensor says it: then it is this rank's shard
    one: bool  # whether it is of size 1 and may be shared by all


def describe_arguments(values: Mapping[str, Any], axes: Mapping[str, Axes], dims: Mapping[str, tuple]) -> str:
    """All that must be equal on all ranks before anything is sent, as lines of text."""
    lines = ["arguments beside DTensors"]
    for name in axes:
        value = values[name]
        if dims[name]:
            where = ", ".join(map(repr, value.placements))
            lines.append(f"{name} as a DTensor {list(value.shape)} of {str(value.dtype)[6:]} placed ({where})")
        else:
            lines.append(f"{name} as a plain tensor of {value.dim()} dimensions of {str(value.dtype)[6:]}")
    return "\n".join(lines)


def agree_on_sizes(
    unplaced: Sequence[UnplacedAxis], description: str, groups: Mapping[int, Group], dim_name: Callable[[int], str]
) -> dict[tuple[str, int], str]:
    """For each (name, mesh dimension) what the tensor is along its sharded axis: "one" for all, the "whole", or a
    rank's "own" shard; a collective call.

    Raises ShardError on every rank where the ranks hold different arguments, or a size is none of these on all of them.
    """
    one = sum(1 << k for k, u in enumerate(unplaced) if u.one)  # bits, one for each
    whole = sum(1 << k for k, u in enumerate(unplaced) if u.size == u.whole)
    own = sum(1 << k for k, u in enumerate(unplaced) if u.size == u.own)
    problem: ShardError | None = None
    for m in _list_rounds(list(groups)):
        try:
            given = agreement.PairShards(own=own, shared=whole, wide=(one,))
            headers = agreement.exchange_headers(
                groups[m], problem is not None, description, {"rows": 0, "cols": 0}, given
            )
            for h in headers:
                own, whole, one = own & h[4], whole & h[5], one & h[6]
        except ShardError as error:
            problem, description = problem or error, error.text
    for k, u in enumerate(unplaced):
        if problem is None and not (own | whole | one) >> k & 1:
            problem = ShardError(
                detail=f"{u.name} is not placed over mesh dimension {dim_name(u.dim)}, over which {u.axis} are "
                f"sharded, and on some rank has neither the size of all ({u.whole}) nor of the rank's own shard",
                fix="Give every rank the whole of it or its own shard, or make it a DTensor: distribute_tensor",
            )
    if problem is not None:
        raise problem
    kinds = ("one" if one >> k & 1 else "whole" if whole >> k & 1 else "own" for k in range(len(unplaced)))
    return {(u.name, u.dim): kind for u, kind in zip(unplaced, kinds, strict=True)}


def check_replicated(
    values: Mapping[str, Any],
    same: Sequence[tuple[str, int]],
    groups: Mapping[int, Group],
    dim_name: Callable[[int], str],
    placed: Sequence[str],
) -> None:
    """Raise ShardError on every rank unless these (tensor, mesh dimension) hold the same numbers on all ranks of it."""
    if not same:
        return
    names = sorted({name for name, _ in same})
    sums = torch.cat([_sum_numbers(values[name]) for name in names])
    wrong = 0  # 1 + the number of the first that differs
    for m in _list_rounds(list(groups)):
        message = torch.cat([sums.new_tensor([wrong]), sums])
        device = agreement.header_device(groups[m])
        found = shard.all_gather(message.to(device), groups[m]).cpu()
        wrong = int(found[:, 0].max())
        for k, (name, dim) in enumerate(same):
            at = 1 + 3 * names.index(name)
            if dim == m and not wrong and not _agree(found[:, at : at + 3]):
                wrong = k + 1
    if wrong:
        name, dim = same[wrong - 1]
        where = f'mesh["{dim_name(dim)[1:-1]}"]' if dim_name(dim)[0] == "'" else "mesh"
        raise ShardError(
            detail=f"{name} is a plain tensor that differs between the ranks of mesh dimension {dim_name(dim)}, over "
            f"which {' and '.join(placed)} {'lies' if len(placed) == 1 else 'lie'}: nobody said how it is divided",
            fix=f"If every rank has its own rows (data parallelism), call the layer in the forward of the module that "
            f"owns the weight, where fully_shard gathers it, or inside mr.shard(rows={where}); "
            "else give all ranks the same tensor, or a DTensor",
        )


def _list_rounds(dims: list[int]) -> list[int]:
    """The mesh dimensions to exchange over, so that what is found in any of them is known to every rank at the end."""
    return [*dims, *dims[:-1]]


def _sum_numbers(value: Tensor) -> Tensor:
    """Three sums of a tensor in float64: of its numbers, weighted by place, and of the magnitudes of both."""
    with torch.no_grad():
        rows = (value.flatten(0, -2) if value.dim() > 1 else value.reshape(-1, 1)).sum(-1, dtype=torch.float64)
        place = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=rows.device) / max(len(rows), 1)
        return torch.stack([rows.sum(), rows @ place, rows.abs().sum()]).cpu()


def _agree(found: Tensor) -> bool:
    """Whether the sums of all ranks are those of the same numbers; NaN and infinities are equal to themselves."""
    room = _TOLERANCE * found[:, 2].nan_to_num(posinf=0.0).amax()
    first = found[:1].expand_as(found)
    near = (found - first).abs() <= room
    return bool((near | (found == first) | (found.isnan() & first.isnan())).all())


_Run = Callable[[Mapping[str, Any]], tuple[tuple[Expr, ...], list[Tensor], Sizes, Callable]]


def any_dtensor(values: Any) -> bool:
    """Whether any value is a DTensor; False if the module of DTensors has not been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(v, module.DTensor) for v in values)


def are_traced(values: list[Any]) -> bool:
    """Whether ``torch.compile`` traces a call with DTensors; written so that it can read it."""
    return any([type(v).__name__ == "DTensor" for v in values])


def run_on_dtensors(parameters: Mapping[str, Any], values: Mapping[str, Any], run: _Run) -> Any:
    """Run an op on DTensors: ``run(local values)`` gives outputs' expressions, values, sizes and the packing."""
    axes = {n: _list_axes(parameters[n], v) for n, v in values.items() if isinstance(v, Tensor)}
    call = PlacedCall.of(axes, values)
    local = call.to_local()
    per_pair = [n for n in call.axes if parameters[n].axis == "pairs"]
    given = {n: {key[0] for key in call.axes[n] if key is not None} for n in per_pair}
    shared = frozenset((n, a) for n in per_pair for a in call.groups if a not in given[n])
    with agreement.use_layout(call.layout(shared)):
        outputs, results, sizes, pack = run(local)
    return pack([_wrap_output(call, e, v, sizes) for e, v in zip(outputs, results, strict=True)])


def run_layer_on_dtensors(layer: Callable, axes: Mapping[str, Axes], values: dict[str, Any], first: str) -> Any:
    """Run a layer whose results have the leading dimensions of its argument ``first``, on the local shards.

    ``axes`` has the axis of every dimension of the tensors among ``values``; the result is a tensor or a named tuple.
    """
    call = PlacedCall.of(axes, values)
    local = call.to_local()
    with agreement.use_layout(call.layout()):
        try:
            result = layer(**local)
        except MonoidReduceError as error:
            agreement.report_failure(error)
            raise
    rows = axes[first][:-1]

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return call.wrap(value, "rows", (*rows, *[None] * (value.dim() - len(rows))) if value.dim() else ())

    return type(result)(*map(wrap, result)) if isinstance(result, tuple) else wrap(result)


# Where everything lies


@dataclass
class _MeshRoles:
    """What each mesh dimension m shards: ``axis[m]`` has "rows" and "cols" with the number of their dimension among a
    tensor's dimensions of rows (0 unless a layer takes rows in several), ``batch[m]`` a batch dimension counted from
    the right."""

    axis: dict[int, dict[str, int]] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)

    def key_at(self, m: int, axes: Axes) -> Key:
        """What mesh dimension m shards of a tensor with these axes; in a ring, of what is given per pair its rows."""
        role = self.axis.get(m, {})
        for axis in ("rows", "cols"):
            if axis in role and (axis, role[axis]) in axes:
                return axis, role[axis]
        key = ("batch", self.batch.get(m, 0))
        return key if key in axes else None


@dataclass
class PlacedCall:
    """The tensors of a call, the mesh they lie on, and what each of its dimensions shards."""

    dtensor: Any  # the module torch.distributed.tensor
    mesh: Any
    axes: dict[str, Axes]
    values: Mapping[str, Any]
    dims: dict[str, tuple[int, ...]]  # of each tensor: the mesh dimensions its placements are of; none of a plain one
    roles: _MeshRoles
    outside: dict[str, Group]  # groups of mr.shard that are no dimension of the mesh, by axis

    @staticmethod
    def of(axes: Mapping[str, Axes], values: Mapping[str, Any]) -> PlacedCall:
        dtensor = sys.modules["torch.distributed.tensor"]
        tensors = {n: values[n] for n in axes if isinstance(values.get(n), Tensor)}
        mesh, dims = _find_mesh(dtensor, tensors)
        call = PlacedCall(dtensor, mesh, {n: axes[n] for n in tensors}, values, dims, _MeshRoles(), {})
        for name, value in tensors.items():
            if len(dims[name]) == mesh.ndim:  # of others the ranks must agree what a size of 1 means
                call._broadcast(name, [key for key, size in zip(axes[name], value.shape, strict=True) if size == 1])
        call._find_roles()
        return call

    def _broadcast(self, name: str, keys: list[Key]) -> None:
        """These axes of a tensor are of size 1 and shared by all: batch dimensions, and axes of a tensor per pair."""
        pair = {("rows", 0), ("cols", 0)} <= {*self.axes[name]}
        gone = [k for k in keys if k is not None and (k[0] == "batch" or pair)]
        self.axes[name] = tuple(None if key in gone else key for key in self.axes[name])

    # What is sharded

    def _find_roles(self) -> None:
        wanted: dict[str, dict[int, int]] = {"rows": {}, "cols": {}, "batch": {}}
        features: list[int] = []  # mesh dimensions that shard the features of columns
        for name, axes in self.axes.items():
            for m, placement in zip(self.dims[name], getattr(self.values[name], "placements", ()), strict=True):
                if (dim := getattr(placement, "dim", None)) is None:
                    continue
                dim = dim % len(axes)
                key = axes[dim]
                if key is not None:
                    wanted[key[0]].setdefault(m, key[1])
                elif ("cols", 0) in axes:
                    features.append(m)
        self._follow_layout(wanted)
        roles, picked = self.roles, _pick_dims(wanted["rows"], wanted["cols"])
        for axis, m in picked.items():
            roles.axis.setdefault(m, {})[axis] = wanted[axis][m]
        roles.batch = {m: right for m, right in sorted(wanted["batch"].items()) if m not in roles.axis}
        free = [m for m in features if m not in roles.axis and m not in roles.batch]
        if free and "cols" not in picked and "cols" not in self.outside:
            roles.axis[free[0]] = {"cols": 0}

    def _follow_layout(self, wanted: dict[str, dict[int, int]]) -> None:
        """Add what ``mr.shard`` says of rows and columns, which is of the plain tensors."""
        around = agreement.current_layout() or agreement.Layout()
        if around.order != "contiguous" and around.groups:
            raise ArgumentError(
                detail=f"mr.shard was given order={around.order!r} beside DTensors, whose shards are contiguous",
                fix="Leave the order out, or give every rank's part as plain tensors",
            )
        for axis, group in (("rows", around.rows), ("cols", around.cols)):
            if group is None:
                continue
            m = next(
                (m for m in range(self.mesh.ndim) if _read_ranks(self.mesh.get_group(m)) == _read_ranks(group)), None
            )
            other = [k for k in wanted[axis] if k != m]
            if other:
                raise ShardError(
                    detail=f"mr.shard divides {axis} over the ranks {_read_ranks(group)}, but a DTensor divides them "
                    f"over mesh dimension {self._dim_name(other[0])}",
                    fix=f"Name that dimension in mr.shard({axis}=...), or leave it out",
                )
            if m is None:
                self.outside[axis] = group
            else:
                wanted[axis].setdefault(m, 0)

    def _dim_name(self, m: int) -> str:
        names = self.mesh.mesh_dim_names
        return repr(names[m]) if names else str(m)

    @property
    def groups(self) -> dict[str, Group]:
        """The groups that rows and columns are sharded over."""
        found = {axis: self.mesh.get_group(m) for m, role in self.roles.axis.items() for axis in role}
        return {**found, **self.outside}

    def layout(self, shared: frozenset[tuple[str, str]] = frozenset()) -> agreement.Layout:
        """The layout that the local call runs under."""
        groups, around = self.groups, agreement.current_layout() or agreement.Layout()
        chunks = {right: self._chunk(("batch", right)) for right in self.roles.batch.values()}
        batch = tuple((right, start, whole) for right, (start, _, whole) in chunks.items())
        layout = agreement.Layout(groups.get("rows"), groups.get("cols"), "contiguous", batch, around.slices, shared)
        agreement.check_slices(layout)
        return layout

    def _shards(self, key: Key) -> list[int]:
        """The mesh dimensions that shard an axis."""
        return [m for m in range(self.mesh.ndim) if key is not None and self.roles.key_at(m, (key,)) == key]

    def _whole_size(self, key: Key) -> int | None:
        """The global size of an axis; None where no DTensor has it that says how it lies."""
        over = set(self._shards(key))
        saying = [n for n, axes in self.axes.items() if key in axes and self.dims[n] and over <= {*self.dims[n]}]
        return max((self.values[n].shape[self.axes[n].index(key)] for n in saying), default=None)

    def _chunk(self, key: Key) -> tuple[int, int, int]:
        """This rank's first index along an axis, its number of indices, and the global number."""
        whole = self._whole_size(key)
        start, size = 0, 0 if whole is None else whole
        for m in self._shards(key):
            first, size = find_chunk(size, self.mesh.size(m), self.mesh.get_local_rank(m))
            start += first
        return start, size, 0 if whole is None else whole

    # Local shards

    def to_local(self) -> dict[str, Any]:
        """All values, each tensor as this rank's shard; a collective call."""
        used = [m for m in range(self.mesh.ndim) if m in self.roles.axis or m in self.roles.batch]
        groups = {m: self.mesh.get_group(m) for m in used}
        unplaced = self._find_unplaced(used)
        description = describe_arguments(self.values, self.axes, self.dims)
        found = agree_on_sizes(unplaced, description, groups, self._dim_name) if self._is_mixed else {}
        for (name, m), what in found.items():
            if what == "one":
                self._broadcast(name, [self._key(name, m)])
        whole = {place for place, what in found.items() if what == "whole"}
        local = dict(self.values)
        for name in self.axes:
            if self.dims[name]:
                local[name] = self._redistribute(name)
        if self._is_mixed:
            same = [(n, m) for n in self.axes for m in used if m not in self.dims[n]]
            same = [(n, m) for n, m in same if self._key(n, m) is None or (n, m) in whole]
            given = [n for n, dims in self.dims.items() if dims]
            check_replicated(local, same, groups, self._dim_name, given)
        for name, axes in self.axes.items():
            for m in used:
                key = self._key(name, m)
                if (name, m) in whole:
                    local[name] = own_chunk(local[name], axes.index(key), groups[m])
                elif m in self.roles.batch and key is None:
                    local[name] = replicate(local[name], groups[m])
        return local

    @property
    def _is_mixed(self) -> bool:
        return any(len(dims) < self.mesh.ndim for dims in self.dims.values())

    def _key(self, name: str, m: int) -> Key:
        """What mesh dimension m shards of a tensor."""
        return self.roles.key_at(m, self.axes[name])

    def _find_unplaced(self, used: list[int]) -> list[UnplacedAxis]:
        """Sharded axes of tensors whose placement over that mesh dimension nobody said."""
        found = []
        for name, axes in self.axes.items():
            for m in used:
                key = self._key(name, m)
                if key is not None and m not in self.dims[name]:
                    size = self.values[name].shape[axes.index(key)]
                    _, own, whole = self._chunk(key)
                    known = self._whole_size(key) is not None
                    shared = key[0] == "batch" or {("rows", 0), ("cols", 0)} <= {*axes}
                    own, total = (own, whole) if known else (size, None)
                    found.append(UnplacedAxis(name, m, key[0], size, own, total, shared and size == 1))
        return found

    def _redistribute(self, name: str) -> Tensor:
        axes, value = self.axes[name], self.values[name]
        placements = []
        for m in self.dims[name]:
            key = self._key(name, m)
            placements.append(self.dtensor.Replicate() if key is None else self.dtensor.Shard(axes.index(key)))
        return value.redistribute(placements=placements).to_local(grad_placements=placements)

    # Results

    def wrap(self, value: Tensor, axis: str | None, axes: Axes) -> Any:
        """A local result with these axes: on the mesh of the DTensors along its axis (None: along the rows), or as it
        is where plain tensors alone are."""
        having = [n for n, own in self.axes.items() if any(k is not None and k[0] == (axis or "rows") for k in own)]
        home = max(having or self.axes, key=lambda n: len(self.dims[n]))
        if not self.dims[home]:
            return value
        shape, placements = list(value.shape), []
        for m in self.dims[home]:
            key = self.roles.key_at(m, axes)
            whole = self._whole_size(key)
            if key is None or whole is None:
                placements.append(self.dtensor.Replicate())
            else:
                placements.append(self.dtensor.Shard(axes.index(key)))
                shape[axes.index(key)] = whole
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.values[home].device_mesh
        return self.dtensor.DTensor.from_local(
            value.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _find_mesh(dtensor: Any, tensors: Mapping[str, Any]) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The mesh that all tensors' meshes are dimensions of, and for every tensor which ones."""
    meshes = {n: v.device_mesh for n, v in tensors.items() if isinstance(v, dtensor.DTensor)}
    first = max(meshes, key=lambda n: meshes[n].ndim)
    root = getattr(meshes[first], "_get_root_mesh", lambda: meshes[first])()
    dims: dict[str, tuple[int, ...]] = {}
    for mesh in (meshes[first], root):
        own = {_read_ranks(mesh.get_group(m)): m for m in range(mesh.ndim)}
        found = {
            n: [own.get(_read_ranks(other.get_group(m))) for m in range(other.ndim)] for n, other in meshes.items()
        }
        dims = {n: tuple(m for m in found.get(n, ()) if m is not None) for n in tensors}
        outside = [n for n, at in found.items() if None in at]
        if not outside:
            return mesh, dims
    raise ShardError(
        detail=f"{first} lies on {meshes[first]}, but {outside[0]} on {meshes[outside[0]]}, which is no part of it",
        fix="Distribute all arguments over one mesh, or over dimensions of one",
    )


def _read_ranks(group: Group) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _pick_dims(rows: Mapping[int, int], cols: Mapping[int, int]) -> dict[str, int]:
    """The mesh dimension of each axis. One that several dimensions shard keeps the one it has for itself: a weight that
    lies over data × tensor ranks is gathered over the first, where the rows lie, as FSDP does."""
    picked: dict[str, int] = {}
    if rows:
        picked["rows"] = min(set(rows) - set(cols) or rows)
    if cols:
        apart = set(cols) - set(rows) or set(cols) - {picked.get("rows")}
        picked["cols"] = min(apart or cols)
    return picked


# Ops


def _list_axes(p: Any, value: Tensor) -> Axes:
    """The axes of an op's argument: batch dimensions, rows or columns or both, features."""
    own: Axes = tuple((axis, 0) for axis in AXES.get(p.axis, ()))
    at = value.dim() - len(p.tail)
    return (*(("batch", at - d) for d in range(at)), *own, *[None] * (len(p.tail) - len(own)))


def _wrap_output(call: PlacedCall, e: Expr, value: Tensor, sizes: Sizes) -> Any:
    axis = "rows" if e.rows else "cols" if e.cols else None
    at = len(sizes.batch)
    axes: Axes = (*(("batch", at - d) for d in range(at)), *(() if axis is None else ((axis, 0),)))
    return call.wrap(value, axis, (*axes, *[None] * (value.dim() - len(axes))))
