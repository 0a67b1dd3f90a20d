"""The weights of a head that ``fully_shard`` wraps by itself, where its loss is computed without calling it.

FSDP2 gathers a module's weights when the module is called, and averages their gradients over the ranks. A head that
describes its logits is not called; its weights are then gathered here, to the same effect. Heads that belong to a
larger wrapped module (the model itself) are gathered with that, and tensor-parallel ones keep their shards.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError


def gather_weight(weight: Any, head: nn.Module, hidden: Tensor, owner: str) -> Any:
    """A head's parameter as the head's own forward would see it: whole and of the hidden states' type, if the head is
    wrapped by ``fully_shard``; else as it is. Its gradient is the mean over the ranks, summed in the parameter's type.
    """
    module = sys.modules.get("torch.distributed.tensor")
    wrapped = hasattr(head, "unshard") and module is not None and isinstance(weight, module.DTensor)
    if module is None or not wrapped:
        return weight
    if any(type(p) not in (module.Shard, module.Replicate) for p in weight.placements):
        raise ArgumentError(
            detail=f"the head of {owner} is sharded by tensor parallelism and wrapped by fully_shard on its own, "
            f"placed {tuple(weight.placements)}",
            fix="Leave the head to the fully_shard of the whole model: its classes then stay on the tensor ranks",
        )
    whole = weight.redistribute(placements=[module.Replicate()] * len(weight.placements))
    return whole.to_local(grad_placements=[module.Partial("avg")] * len(weight.placements)).to(hidden.dtype)
