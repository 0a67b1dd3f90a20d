"""Vocabulary heads: modules that own a linear layer over classes (``linear.weight``, ``linear.bias``).

Each calls one function of :mod:`monoidreduce.ops` with its weights and options; options are attributes and may be
changed. A softcap or temperature given as a 0-dim ``nn.Parameter`` is learned. ``Head.of(linear, ...)`` makes a head
of a layer that a model already has, sharing its weights.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from .. import ops
from ..errors import ArgumentError, shown

Number = float | Tensor | None
H = TypeVar("H", bound="Head")


class Head(nn.Module):
    """A linear layer over classes, and the options of what is computed from its logits."""

    def __init__(
        self, in_features: int, num_classes: int, bias: bool, device: Any, dtype: Any, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self._names: tuple[str, ...] = ()
        self._add_options(**options)

    def _add_options(self, **options: Any) -> None:
        self._names += tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    @classmethod
    def of(cls: type[H], linear: nn.Linear, **options: Any) -> H:
        """This head over the weights of a layer that is already there."""
        if not all(hasattr(linear, name) for name in ("in_features", "out_features", "weight", "bias")):
            raise ArgumentError(
                detail=f"linear was given {shown(linear)}",
                fix="Give a torch.nn.Linear; for tied weights, one whose weight is the embedding's",
            )
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", **options)
        head.linear = linear
        return head

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._options().items())


class LinearCrossEntropyLoss(Head):
    """:func:`monoidreduce.ops.linear_cross_entropy` with weights of its own; torch's module of that name, and more
    options.

    Call it with x [..., in], the target (labels [...] or probabilities [..., classes]) and, if wanted, the rows'
    weights [...]; it gives one number, or [...] with ``reduction="none"``. State dict: ``linear.weight``,
    ``linear.bias`` with ``bias=True``, and ``weight`` where class weights are given.

    >>> import torch
    >>> from monoidreduce.nn import LinearCrossEntropyLoss
    >>> loss = LinearCrossEntropyLoss(16, 1000, label_smoothing=0.1)
    >>> loss(torch.randn(6, 16), torch.randint(1000, (6,))).shape
    torch.Size([])
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: Number = None,
        temperature: Number = 1.0,
        return_lse: bool = False,
        return_accuracy: bool = False,
        shift: int = 0,
    ) -> None:
        options = {
            "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "temperature": temperature, "return_lse": return_lse,
            "return_accuracy": return_accuracy, "shift": shift,
        }  # fmt: skip
        super().__init__(in_features, num_classes, bias, device, dtype, options)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor, target: Tensor, token_weights: Tensor | None = None) -> Any:
        head, options = self.linear, self._options()
        return ops.linear_cross_entropy(
            x, head.weight, target, bias=head.bias, class_weights=self.weight, token_weights=token_weights, **options
        )


class LinearLogProbs(Head):
    """:func:`monoidreduce.ops.linear_logprobs` with weights of its own: what trainers of preferences and rewards need.

    Call it with x [..., in] and the tokens [...], ``ids`` [..., K] or both; it gives their log-probabilities [...], or
    a :class:`monoidreduce.ops.LogProbs` with ``ids`` or any of the ``return_...`` options.

    >>> import torch
    >>> from monoidreduce.nn import LinearLogProbs
    >>> head = LinearLogProbs(16, 1000)
    >>> head(torch.randn(6, 16), torch.randint(1000, (6,))).shape
    torch.Size([6])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        softcap: Number = None,
        temperature: Number = 1.0,
        ignore_index: int = -100,
        return_entropy: bool = False,
        return_argmax: bool = False,
        return_lse: bool = False,
        top_k: int = 0,
    ) -> None:
        options = {
            "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index,
            "return_entropy": return_entropy, "return_argmax": return_argmax, "return_lse": return_lse, "top_k": top_k,
        }  # fmt: skip
        super().__init__(in_features, num_classes, bias, device, dtype, options)

    def forward(
        self, x: Tensor, target: Tensor | None = None, *, ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        head = self.linear
        return ops.linear_logprobs(x, head.weight, target, bias=head.bias, ids=ids, mask=mask, **self._options())


class LinearEntropy(Head):
    """:func:`monoidreduce.ops.linear_entropy` with weights of its own.

    Call it with x [..., in]; it gives the entropy of each row's softmax over the classes [...], in nats.

    >>> import torch
    >>> from monoidreduce.nn import LinearEntropy
    >>> head = LinearEntropy(16, 1000)
    >>> head(torch.randn(6, 16)).shape
    torch.Size([6])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        softcap: Number = None,
        temperature: Number = 1.0,
    ) -> None:
        options = {"softcap": softcap, "temperature": temperature}
        super().__init__(in_features, num_classes, bias, device, dtype, options)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_entropy(x, self.linear.weight, bias=self.linear.bias, **self._options())


class LinearSample(LinearEntropy):
    """:func:`monoidreduce.ops.linear_sample` with weights of its own.

    Call it with x [..., in] and a seed; it gives a class drawn for each row [...] and its log-probability, a
    :class:`monoidreduce.ops.Sample`. The same seed draws the same classes.

    >>> import torch
    >>> from monoidreduce.nn import LinearSample
    >>> head = LinearSample(16, 1000)
    >>> head(torch.randn(6, 16), seed=0).index.shape
    torch.Size([6])
    """

    def forward(self, x: Tensor, seed: int | Tensor) -> ops.Sample:  # type: ignore[override]
        return ops.linear_sample(x, self.linear.weight, seed, bias=self.linear.bias, **self._options())


class LinearTopK(Head):
    """:func:`monoidreduce.ops.linear_topk` with weights of its own.

    Call it with x [..., in]; it gives the logits (or log-probabilities) of the k best classes [..., k] and the classes,
    a :class:`monoidreduce.ops.TopK`.

    >>> import torch
    >>> from monoidreduce.nn import LinearTopK
    >>> head = LinearTopK(16, 1000, k=5)
    >>> head(torch.randn(6, 16)).indices.shape
    torch.Size([6, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int = 1,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        softcap: Number = None,
        temperature: Number = 1.0,
        largest: bool = True,
        log_probs: bool = False,
    ) -> None:
        options = {"k": k, "softcap": softcap, "temperature": temperature, "largest": largest, "log_probs": log_probs}
        super().__init__(in_features, num_classes, bias, device, dtype, options)

    def forward(self, x: Tensor) -> ops.TopK:
        return ops.linear_topk(x, self.linear.weight, bias=self.linear.bias, **self._options())


class LinearArgmax(Head):
    """:func:`monoidreduce.ops.linear_argmax` with weights of its own.

    Call it with x [..., in]; it gives the best class of each row [...]. Nothing has a gradient.

    >>> import torch
    >>> from monoidreduce.nn import LinearArgmax
    >>> head = LinearArgmax(16, 1000)
    >>> head(torch.randn(6, 16)).shape
    torch.Size([6])
    """

    def __init__(
        self, in_features: int, num_classes: int, *, bias: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype, {})

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_argmax(x, self.linear.weight, bias=self.linear.bias)


class TwoHeads(Head):
    """A student's head (``linear``) and its teacher's (``teacher``), frozen unless ``train_teacher``."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        teacher_features: int | None = None,
        *,
        bias: bool = False,
        teacher_bias: bool = False,
        train_teacher: bool = False,
        device: Any = None,
        dtype: Any = None,
        softcap: Number = None,
        teacher_softcap: Number = None,
        temperature: Number = 1.0,
        reduction: str = "mean",
    ) -> None:
        options = {
            "softcap": softcap, "teacher_softcap": teacher_softcap, "temperature": temperature, "reduction": reduction,
        }  # fmt: skip
        super().__init__(in_features, num_classes, bias, device, dtype, options)
        width = in_features if teacher_features is None else teacher_features
        self.teacher = nn.Linear(width, num_classes, bias=teacher_bias, device=device, dtype=dtype)
        self.teacher.requires_grad_(train_teacher)

    @classmethod
    def of(cls: type[H], linear: nn.Linear, teacher: nn.Linear, **options: Any) -> H:  # type: ignore[override]
        """This loss over the weights of two layers that are already there."""
        loss = super().of(linear, **options)
        loss.teacher = teacher
        return loss

    def _arguments(self, x: Tensor, teacher_x: Tensor, token_weights: Tensor | None) -> tuple[tuple, dict[str, Any]]:
        biases = {"bias": self.linear.bias, "teacher_bias": self.teacher.bias}
        heads = x, self.linear.weight, teacher_x, self.teacher.weight
        return heads, {**biases, "token_weights": token_weights, **self._options()}


class LinearKLLoss(TwoHeads):
    """:func:`monoidreduce.ops.linear_kl` of two heads of its own, to distil a teacher into a student.

    Call it with the student's x [..., in], the teacher's [..., teacher_features] and, if wanted, the rows' weights; it
    gives one number, or [...] with ``reduction="none"``. ``direction="reverse"`` is KL(student ‖ teacher).

    >>> import torch
    >>> from monoidreduce.nn import LinearKLLoss
    >>> head = LinearKLLoss(16, 1000, teacher_features=32)
    >>> head(torch.randn(6, 16), torch.randn(6, 32)).shape
    torch.Size([])
    """

    def __init__(self, *args: Any, direction: str = "forward", **options: Any) -> None:
        super().__init__(*args, **options)
        self._add_options(direction=direction)

    def forward(self, x: Tensor, teacher_x: Tensor, token_weights: Tensor | None = None) -> Tensor:
        heads, options = self._arguments(x, teacher_x, token_weights)
        return ops.linear_kl(*heads, **options)


class LinearSoftCrossEntropyLoss(LinearKLLoss):
    """:func:`monoidreduce.ops.linear_cross_entropy_soft` of two heads of its own: cross-entropy against a teacher.

    It is called as :class:`LinearKLLoss` is; ``direction="forward"`` has the same gradient for the student.

    >>> import torch
    >>> from monoidreduce.nn import LinearSoftCrossEntropyLoss
    >>> head = LinearSoftCrossEntropyLoss(16, 1000, teacher_features=32)
    >>> head(torch.randn(6, 16), torch.randn(6, 32)).shape
    torch.Size([])
    """

    def forward(self, x: Tensor, teacher_x: Tensor, token_weights: Tensor | None = None) -> Tensor:
        heads, options = self._arguments(x, teacher_x, token_weights)
        return ops.linear_cross_entropy_soft(*heads, **options)


class LinearJSDLoss(TwoHeads):
    """:func:`monoidreduce.ops.linear_jsd` of two heads of its own, as generalised knowledge distillation has it.

    It is called as :class:`LinearKLLoss` is. ``beta`` weighs the two: 0 is KL(teacher ‖ student), 1 the reverse.

    >>> import torch
    >>> from monoidreduce.nn import LinearJSDLoss
    >>> head = LinearJSDLoss(16, 1000, teacher_features=32)
    >>> head(torch.randn(6, 16), torch.randn(6, 32)).shape
    torch.Size([])
    """

    def __init__(self, *args: Any, beta: float = 0.5, **options: Any) -> None:
        super().__init__(*args, **options)
        self._add_options(beta=beta)

    def forward(self, x: Tensor, teacher_x: Tensor, token_weights: Tensor | None = None) -> Tensor:
        heads, options = self._arguments(x, teacher_x, token_weights)
        return ops.linear_jsd(*heads, **options)


class SampledCrossEntropyLoss(Head):
    """:func:`monoidreduce.ops.sampled_cross_entropy` with weights of its own.

    Call it with x, the target and the sampled classes, for all rows [K] or for each [..., K]. ``log_q`` [classes], how
    often each class is sampled, is a buffer. State dict: ``linear.weight``, ``linear.bias`` with ``bias=True``, and
    ``log_q`` where it is given.

    >>> import torch
    >>> from monoidreduce.nn import SampledCrossEntropyLoss
    >>> loss = SampledCrossEntropyLoss(16, 100_000, remove_hits=True)
    >>> loss(torch.randn(6, 16), torch.randint(100_000, (6,)), torch.randint(100_000, (6, 50))).shape
    torch.Size([])
    """

    log_q: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        log_q: Tensor | None = None,
        remove_hits: bool = False,
        softcap: Number = None,
        temperature: Number = 1.0,
        ignore_index: int | None = None,
        reduction: str = "mean",
        sparse_grad: bool = False,
    ) -> None:
        options = {
            "remove_hits": remove_hits, "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index,
            "reduction": reduction, "sparse_grad": sparse_grad,
        }  # fmt: skip
        super().__init__(in_features, num_classes, bias, device, dtype, options)
        self.register_buffer("log_q", log_q)

    def forward(self, x: Tensor, target: Tensor, samples: Tensor, token_weights: Tensor | None = None) -> Tensor:
        head, options = self.linear, self._options()
        return ops.sampled_cross_entropy(
            x, head.weight, target, samples, bias=head.bias, log_q=self.log_q, token_weights=token_weights, **options
        )
