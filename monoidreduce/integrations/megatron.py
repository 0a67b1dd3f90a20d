"""Megatron-core's vocabulary-parallel cross-entropy: from its logits, and from hidden states without any logits.

    fuse_loss(model)                                                              # a GPTModel, in place
    loss = vocab_parallel_cross_entropy(logits, labels)                           # the signature of Megatron's own
    loss = linear_vocab_parallel_cross_entropy(hidden, output_weight, labels)     # [s, b, h] in, [s, b] out

The functions take the tensor-parallel group from ``megatron.core.parallel_state``, or as ``tp_group``; then
Megatron-core need not be installed. Nothing of Megatron-core itself is changed.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import ArgumentError
from ..ops.cross_entropy import loss_of_hidden, loss_of_logits

__all__ = ["fuse_loss", "linear_vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy"]

Model = TypeVar("Model", bound=nn.Module)


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
    >>> dist.destroy_process_group()
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
    >>> dist.destroy_process_group()
    """
    options, group = {"bias": bias, "softcap": softcap}, _find_group(tp_group)
    return loss_of_hidden(hidden, weight, target, label_smoothing, sequence_parallel, vocab_size, options, group)


class DeferredLogits:
    """What a fused model's output layer returns in the place of its logits: they are built when something else than
    the model's loss asks for them."""

    def __init__(self, layer: Any, hidden: Tensor, weight: Tensor | None):
        self.layer, self.hidden, self.weight = layer, hidden, weight

    def __getattr__(self, name: str) -> Any:
        logits, _ = type(self.layer).forward(self.layer, self.hidden, self.weight)
        return getattr(logits, name)


def fuse_loss(model: Model, *, vocab_size: int | None = None) -> Model:
    """Make Megatron's ``GPTModel`` compute its loss from hidden states: no rank builds its [s, b, v] logits.

    The model (returned, and changed in place) then answers ``model(tokens, positions, mask, labels=labels)`` with the
    same losses [b, s], by :func:`linear_vocab_parallel_cross_entropy`: tied or untied weights, sequence parallelism
    and multi-token prediction as the model has them. Without labels it returns its logits as before. A stage of a
    pipeline that has no output layer is left as it is. ``vocab_size`` as in
    :func:`linear_vocab_parallel_cross_entropy`.

    Raises :class:`ArgumentError` for another kind of model, for an output layer that gathers its logits, and for
    ``defer_embedding_wgrad_compute``, which keeps what the layer would have computed.

    >>> from monoidreduce.integrations.megatron import fuse_loss
    >>> model = fuse_loss(GPTModel(config, layer_spec, 32000, 4096))  # doctest: +SKIP
    >>> losses = model(tokens, positions, mask, labels=labels)  # doctest: +SKIP
    """
    owner, layer = type(model).__name__, getattr(model, "output_layer", None)
    if not hasattr(model, "compute_language_model_loss"):
        raise ArgumentError(
            detail=f"fuse_loss was given {owner}, which is no language model of Megatron-core",
            fix="Give a GPTModel, before it is wrapped; or call linear_vocab_parallel_cross_entropy yourself",
        )
    if layer is None:
        return model
    if getattr(layer, "gather_output", True) or getattr(layer.config, "defer_embedding_wgrad_compute", False):
        raise ArgumentError(
            detail=f"the output layer of {owner} gathers its logits (parallel_output=False) or defers the gradient of "
            "its weight (defer_embedding_wgrad_compute)",
            fix="Make the model with parallel_output=True and without the deferral, or keep its own loss",
        )
    own_loss, own_forward = type(model).compute_language_model_loss, type(layer).forward  # type: ignore[attr-defined]

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if runtime_gather_output:
            return own_forward(layer, input_, weight, runtime_gather_output)
        return DeferredLogits(layer, input_, weight), None

    def compute_language_model_loss(labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return own_loss(model, labels, logits)
        loss = linear_vocab_parallel_cross_entropy(
            logits.hidden,
            layer.weight if logits.weight is None else logits.weight,
            labels.transpose(0, 1).contiguous(),
            bias=None if layer.skip_bias_add else layer.bias,
            sequence_parallel=layer.sequence_parallel,
            vocab_size=vocab_size,
            tp_group=layer.tp_group,
        )
        return loss.transpose(0, 1).contiguous()

    layer.forward = forward
    model.compute_language_model_loss = compute_language_model_loss  # type: ignore[assignment]
    return model


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
