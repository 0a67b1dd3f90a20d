"""DTensor arguments: their placements say what is sharded; the op runs on the local shards and returns DTensors.

On each mesh dimension, the rows, the columns, both, or one batch dimension of the arguments may be sharded; arguments
with other placements are redistributed (a slice of a replicated one, an all-gather of sharded features). A sharded
batch dimension needs no communication, except for gradients of arguments without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import ShardError
from ...program.declarations import AXES
from ...program.expression import Expr
from ..common.collectives import ReplicatedInput
from ..common.evaluate import Sizes
from . import agreement

_Run = Callable[[Mapping[str, Any]], tuple[tuple[Expr, ...], list[Tensor], Sizes, Callable]]


def any_dtensor(values: Any) -> bool:
    """Whether any value is a DTensor; False if the module of DTensors has not been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(v, module.DTensor) for v in values)


@dataclass
class _MeshRoles:
    """What each mesh dimension m shards: ``axis[m]`` is a set of "rows" and "cols", ``batch[m]`` a batch dimension
    counted from the right."""

    axis: dict[int, set[str]] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)


def run_on_dtensors(parameters: Mapping[str, Any], values: Mapping[str, Any], run: _Run) -> Any:
    """Run an op on DTensors: ``run(local values)`` gives outputs' expressions, values, sizes and the packing."""
    dtensor = sys.modules["torch.distributed.tensor"]
    mesh = _find_mesh(dtensor, values)
    roles = _find_roles(dtensor, mesh, parameters, values)
    local = {}
    for name, value in values.items():
        p = parameters[name]
        if isinstance(value, dtensor.DTensor):
            local[name] = _to_local(dtensor, mesh, roles, p, value)
        elif isinstance(value, Tensor) and p.is_tensor:
            raise ShardError(
                detail=f"{name} is a plain tensor, but others are DTensors",
                fix="Make it one: distribute_tensor(x, mesh, placements), Replicate() where all ranks have it all",
            )
        else:
            local[name] = value
    groups = {a: mesh.get_group(m) for m, axes in roles.axis.items() for a in axes}
    batch = _find_batch_shards(mesh, roles, parameters, values)
    per_pair = [n for n, v in values.items() if isinstance(v, Tensor) and parameters[n].axis == "pairs"]
    shared = frozenset((n, a) for n in per_pair for a in groups if a not in _axis_dims(parameters[n], values[n]))
    around = agreement.current_layout() or agreement.Layout()
    layout = agreement.Layout(groups.get("rows"), groups.get("cols"), "contiguous", batch, around.slices, shared)
    agreement.check_slices(layout)
    with agreement.use_layout(layout):
        outputs, results, sizes, pack = run(local)
    return pack([_to_dtensor(dtensor, mesh, roles, e, v, sizes) for e, v in zip(outputs, results, strict=True)])


def _find_mesh(dtensor: Any, values: Mapping[str, Any]) -> Any:
    meshes = {name: v.device_mesh for name, v in values.items() if isinstance(v, dtensor.DTensor)}
    (first, mesh), *rest = meshes.items()
    for name, other in rest:
        if other != mesh:
            raise ShardError(
                detail=f"{first} lies on {mesh}, but {name} on {other}", fix="Distribute all arguments over one mesh"
            )
    return mesh


def _batch_ndim(p: Any, value: Tensor) -> int:
    """The number of a tensor's batch dimensions: its rows or columns, if it has them, come next."""
    return value.dim() - len(p.tail)


def _axis_dims(p: Any, value: Tensor) -> dict[str, int]:
    """The dimensions of a tensor's rows and columns; broadcast axes of arguments per pair are left out."""
    found = {axis: _batch_ndim(p, value) + k for k, axis in enumerate(AXES.get(p.axis, ()))}
    return {axis: at for axis, at in found.items() if p.axis != "pairs" or value.shape[at] != 1}


def _find_roles(dtensor: Any, mesh: Any, parameters: Mapping[str, Any], values: Mapping[str, Any]) -> _MeshRoles:
    roles = _MeshRoles()
    taken: set[str] = set()
    for m in range(mesh.ndim):
        found: set[str] = set()
        for name, value in values.items():
            placement = value.placements[m] if isinstance(value, dtensor.DTensor) else None
            if not isinstance(placement, dtensor.Shard):
                continue
            p, at = parameters[name], _batch_ndim(parameters[name], value)
            dim = placement.dim % value.dim()
            found |= {axis for axis, where in _axis_dims(p, value).items() if where == dim}
            if dim < at:
                roles.batch.setdefault(m, at - dim)
        found -= taken  # an axis is sharded over one mesh dimension
        if found:
            roles.batch.pop(m, None)
            roles.axis[m] = found
            taken |= found
    return roles


def _choose_placements(
    dtensor: Any, mesh: Any, roles: _MeshRoles, axes: Mapping[str, int], at: int, shape: Any
) -> list[Any]:
    """The placements of a tensor with ``at`` batch dimensions; in a ring, arguments per pair are sharded by rows."""
    found: list[Any] = []
    for m in range(mesh.ndim):
        dim = at - roles.batch[m] if m in roles.batch else -1
        divided = [axes[a] for a in ("rows", "cols") if a in axes and a in roles.axis.get(m, ())]
        if divided:
            found.append(dtensor.Shard(divided[0]))
        elif m in roles.batch and dim >= 0 and shape[dim] > 1:
            found.append(dtensor.Shard(dim))
        else:
            found.append(dtensor.Replicate())
    return found


def _to_local(dtensor: Any, mesh: Any, roles: _MeshRoles, p: Any, value: Any) -> Tensor:
    placements = _choose_placements(dtensor, mesh, roles, _axis_dims(p, value), _batch_ndim(p, value), value.shape)
    part = value.redistribute(mesh, placements).to_local(grad_placements=placements)
    for m in roles.batch:
        if isinstance(placements[m], dtensor.Replicate):
            part = ReplicatedInput.apply(part, mesh.get_group(m))
    return part


def _find_batch_shards(mesh: Any, roles: _MeshRoles, parameters: Mapping[str, Any], values: Mapping[str, Any]) -> tuple:
    """(dimension from the right, first local index, global size) of every sharded batch dimension."""
    found = []
    for m, right in roles.batch.items():
        sizes = [
            v.shape[_batch_ndim(parameters[n], v) - right]
            for n, v in values.items()
            if isinstance(v, Tensor) and _batch_ndim(parameters[n], v) >= right
        ]
        whole = max(sizes)
        each = -(-whole // mesh.size(m))  # as torch.chunk
        found.append((right, min(whole, each * mesh.get_local_rank(m)), whole))
    return tuple(found)


def _to_dtensor(dtensor: Any, mesh: Any, roles: _MeshRoles, e: Expr, value: Tensor, sizes: Sizes) -> Any:
    at = len(sizes.batch)
    shape = list(value.shape)
    for right, _, whole in sizes.shard.batch if sizes.shard is not None else ():
        shape[at - right] = whole
    if e.rows or e.cols:
        shape[at] = sizes.of("rows" if e.rows else "cols")
    axes = {axis: at for axis, has in (("rows", e.rows), ("cols", e.cols)) if has}
    placements = _choose_placements(dtensor, mesh, roles, axes, at, shape)
    stride = torch.empty(shape, device="meta").stride()
    return dtensor.DTensor.from_local(
        value.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
