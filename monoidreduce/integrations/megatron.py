"""Megatron-core's vocabulary-parallel cross-entropy: from its logits, and from hidden states without any logits.

    loss = vocab_parallel_cross_entropy(logits, labels)                           # the signature of Megatron's own
    loss = linear_vocab_parallel_cross_entropy(hidden, output_weight, labels)     # [s, b, h] in, [s, b] out

Both take the tensor-parallel group from ``megatron.core.parallel_state``, or as ``tp_group``; then Megatron-core need
not be installed. Nothing of Megatron-core is changed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ops.cross_entropy import loss_of_hidden, loss_of_logits

__all__ = ["linear_vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, *, tp_group: Any = None
) -> Tensor:
    """The loss of each token from logits whose vocabulary is sharded, as
    ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy`` computes it.

    Shapes: this rank's logits [s, b, v] and all tokens' classes ``target`` [s, b] give float32 [s, b] (float64 for
    float64), equal on all ranks. Shards may differ in size. The softmax is not kept for the backward, and the logits
    are not changed. To never have the logits either, see :func:`linear_vocab_parallel_cross_entropy`.

    A target of -100 has loss 0 and no gradient; Megatron's function takes 0 for the logit of a target that no rank has.
    With ``label_smoothing`` the loss is Megatron's of the whole vocabulary: its own function on several ranks smooths
    over each rank's share alone, and so returns different losses on them.

    Raises :class:`LabelError` for another target outside the vocabulary, :class:`ShapeError` or :class:`ArgumentError`
    for arguments that do not fit.

    >>> import torch, torch.distributed as dist
    >>> from monoidreduce.integrations.megatron import vocab_parallel_cross_entropy
    >>> if not dist.is_initialized():  # a script started by torchrun has a group
    ...     dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> logits, target = torch.randn(5, 2, 11), torch.randint(0, 11, (5, 2))
    >>> loss = vocab_parallel_cross_entropy(logits, target, tp_group=dist.group.WORLD)
    >>> torch.allclose(loss.mean(), torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
    True
    """
    return loss_of_logits(vocab_parallel_logits, target, label_smoothing, _find_group(tp_group))


def linear_vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    softcap: float | None = None,
    tp_group: Any = None,
) -> Tensor:
    """The loss of each token from hidden states and this rank's shard of the output weights: no logits anywhere.

    The same as Megatron's output layer (a ``ColumnParallelLinear`` without gathered outputs) followed by its
    ``vocab_parallel_cross_entropy``. No rank allocates its [s, b, v] logits, their softmax or their gradient.

    Shapes: ``hidden`` [s, b, h], the shard ``weight`` [v, h], ``bias`` [v] and all tokens' classes ``target`` [s, b]
    give float32 [s, b] (float64 for float64), equal on all ranks. With ``sequence_parallel``, ``hidden`` is this rank's
    part of the sequence, [s / ranks, b, h], and so is its gradient; hidden states then travel round a ring and are
    never gathered. Otherwise ``hidden`` is the same on all ranks, and so is its gradient, as behind Megatron's
    ``copy_to_tensor_model_parallel_region``, which must not be applied as well.

    ``vocab_size``: the true size of a vocabulary that was padded to divide evenly; padding then takes no part in the
    softmax. Without it, padding is a class like others, as for Megatron. A target of -100 has loss 0. Label smoothing
    as in :func:`vocab_parallel_cross_entropy`.

    Raises :class:`LabelError` for a target outside the vocabulary, :class:`ShapeError`, :class:`DTypeError` or
    :class:`ArgumentError` for arguments that do not fit.

    >>> import torch, torch.distributed as dist
    >>> from monoidreduce.integrations.megatron import linear_vocab_parallel_cross_entropy
    >>> if not dist.is_initialized():  # a script started by torchrun has a group
    ...     dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> hidden, weight, target = torch.randn(5, 2, 4), torch.randn(12, 4), torch.randint(0, 11, (5, 2))
    >>> loss = linear_vocab_parallel_cross_entropy(hidden, weight, target, vocab_size=11, tp_group=dist.group.WORLD)
    >>> logits = (hidden @ weight.T)[..., :11]
    >>> torch.allclose(loss.mean(), torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
    True
    """
    options, group = {"bias": bias, "softcap": softcap}, _find_group(tp_group)
    return loss_of_hidden(hidden, weight, target, label_smoothing, sequence_parallel, vocab_size, options, group)


def _find_group(tp_group: Any) -> Any:
    """The given process group, or Megatron's tensor-parallel one."""
    if tp_group is not None:
        return tp_group.get_group() if hasattr(tp_group, "get_group") else tp_group
    try:
        from megatron.core import parallel_state
    except ImportError:
        raise ArgumentError(
            detail="tp_group was not given, and Megatron-core, which would know it, is not installed",
            fix="Give the tensor-parallel process group, or pip install megatron-core",
        ) from None
    if not parallel_state.model_parallel_is_initialized():
        raise ArgumentError(
            detail="tp_group was not given, and Megatron's model parallelism is not initialised",
            fix="Call megatron.core.parallel_state.initialize_model_parallel, or give tp_group",
        )
    return parallel_state.get_tensor_model_parallel_group()
