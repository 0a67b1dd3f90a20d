"""Layers that one can name on the command line: ours, the dense form it equals, inputs and sizes. One row each.

LAYERS are the papers', which the demo shows; MORE are those that only ``bench`` and ``profile`` know.

Ours are the ready-made layers; losses come as one number per row, so that every row's gradient is looked at.

Legend: M rows, N columns, D features. Inputs that ask for a gradient are learned; the others are given. Every dense
form is the plain torch that one would write first, and builds at least one M × N matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops

SEED = 2023  # of the papers' first form; inputs are the same on every run
LOGIT = 2.0  # standard deviation of a logit: peaked enough that the rare large ones matter


@dataclass(frozen=True)
class Size:
    """Rows, columns and features of a layer."""

    rows: int
    cols: int
    features: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.cols}, {self.features} features"


@dataclass(frozen=True)
class Layer:
    """A layer twice: ``ours`` and ``naive`` take the same inputs and give the same values."""

    key: str  # what one types
    name: str
    formula: str
    dense: str
    ours: Callable[..., Any]
    naive: Callable[..., Any]
    inputs: Callable[[Size], tuple[Any, ...]]
    full: Size
    quick: Size
    backward: bool = True
    # What to compare and with what: (inputs in float64, what came out) -> pairs of value and truth. None: ``naive``.
    judge: Callable[[tuple[Any, ...], tuple[Tensor, ...]], list[tuple[Tensor, Tensor]]] | None = None


# The dense forms: the same through the M × N matrix --------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).softmax(-1) @ v


def _cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Against class indices (integers) or against a distribution (a matrix): torch's function takes both."""
    return F.cross_entropy(x @ w.T, target, reduction="none")


def _distill(p: Tensor, c: Tensor, q: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1), reduction="none")


def _entropy(x: Tensor, w: Tensor) -> Tensor:
    log_p = (x @ w.T).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def _mlp(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return torch.relu(x @ p.T) @ q


def _gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down


def _sample(x: Tensor, w: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    log_p = (x @ w.T).log_softmax(-1)
    drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator(x.device).manual_seed(seed))
    return drawn[:, 0], log_p.gather(1, drawn)[:, 0]


def _max_pool(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.T).max(-1).values


def _contrastive(x: Tensor, y: Tensor) -> Tensor:
    s, own = x @ y.T, torch.arange(len(x), device=x.device)
    return (F.cross_entropy(s, own, reduction="none") + F.cross_entropy(s.T, own, reduction="none")) / 2


def _mean_cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.T, target)


def _kernel_sum(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    square = (x * x).sum(-1)[:, None] + (y * y).sum(-1) - 2 * (x @ y.T)
    return torch.exp(-square / 2) @ b


# Inputs ----------------------------------------------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _learned(generator: torch.Generator, *shapes: tuple[int, int]) -> list[Tensor]:
    """Matrices to take gradients of, scaled so that a product of two has standard deviation LOGIT."""
    scale = lambda features: (LOGIT / features**0.5) ** 0.5
    return [(torch.randn(s, generator=generator) * scale(s[1])).requires_grad_() for s in shapes]


def _matrices(*kinds: str) -> Callable[[Size], tuple[Any, ...]]:
    """Learned matrices with a vector for each of the ``rows``, or of the ``cols``."""
    return lambda s: tuple(_learned(_generator(), *((getattr(s, kind), s.features) for kind in kinds)))


def _class_inputs(s: Size) -> tuple[Any, ...]:
    generator = _generator()
    x, w = _learned(generator, (s.rows, s.features), (s.cols, s.features))
    return x, w, torch.randint(s.cols, (s.rows,), generator=generator)


def _given_inputs(s: Size) -> tuple[Any, ...]:
    generator = _generator()
    x, w = _learned(generator, (s.rows, s.features), (s.cols, s.features))
    return x, w, torch.randn(s.rows, s.cols, generator=generator).mul_(LOGIT).softmax(-1)


def _sample_inputs(s: Size) -> tuple[Any, ...]:
    return (*(t.detach() for t in _matrices("rows", "cols")(s)), SEED)


def _judge_sample(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Two samplers draw differently, so each is judged by the probability of what it drew itself."""
    x, w, _ = inputs
    drawn, log_probability = outputs
    return [(log_probability, (x @ w.T).log_softmax(-1).gather(1, drawn[:, None])[:, 0])]


# The table -------------------------------------------------------------------------------------------------------

_SQUARE = Size(4096, 4096, 64)
_VOCABULARY = Size(1024, 16384, 128)
_SMALL = Size(96, 128, 16)

LAYERS: tuple[Layer, ...] = (
    Layer(
        "attention",
        "attention",
        "Σⱼ softmaxⱼ(q·kⱼ) vⱼ",
        "(q @ k.T).softmax(-1) @ v",
        partial(ops.attention, scale=1.0), _attention,
        _matrices("rows", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "cross-entropy-rows",
        "cross-entropy, classes",
        "log Σⱼ exp(x·wⱼ) − x·wₜ",
        "F.cross_entropy(x @ w.T, t)",
        partial(ops.cross_entropy, reduction="none"), _cross_entropy,
        _class_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy-given",
        "cross-entropy, given distribution",
        "log Σⱼ exp(x·wⱼ) − Σⱼ pⱼ x·wⱼ",
        "F.cross_entropy(x @ w.T, p)",
        partial(ops.cross_entropy_given, reduction="none"), _cross_entropy,
        _given_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy-two",
        "cross-entropy, two parameterised",
        "log Σⱼ exp(p·cⱼ) − Σⱼ softmaxⱼ(q·tⱼ) p·cⱼ",
        "F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1))",
        partial(ops.cross_entropy_distributions, reduction="none"), _distill,
        _matrices("rows", "cols", "rows", "cols"), Size(1024, 16384, 64), _SMALL,
    ),
    Layer(
        "entropy",
        "entropy",
        "log Σⱼ exp(x·wⱼ) − Σⱼ softmaxⱼ(x·wⱼ) x·wⱼ",
        "l = (x @ w.T).log_softmax(-1); -(l.exp() * l).sum(-1)",
        ops.entropy, _entropy,
        _matrices("rows", "cols"), _VOCABULARY, _SMALL,
    ),
    Layer(
        "mlp",
        "two-layer MLP",
        "Σⱼ relu(x·pⱼ) qⱼ",
        "torch.relu(x @ p.T) @ q",
        ops.mlp, _mlp,
        _matrices("rows", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "gated-mlp",
        "gated MLP",
        "Σⱼ silu(x·gⱼ) (x·uⱼ) oⱼ",
        "(F.silu(x @ g.T) * (x @ u.T)) @ o",
        ops.gated_mlp, _gated_mlp,
        _matrices("rows", "cols", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "sample",
        "sampling, with its probability",
        "j ~ softmax(x·w), and x·wⱼ − log Σₖ exp(x·wₖ)",
        "l = (x @ w.T).log_softmax(-1); j = l.exp().multinomial(1); l.gather(1, j)",
        ops.sample, _sample,
        _sample_inputs, Size(256, 16384, 128), _SMALL, backward=False, judge=_judge_sample,
    ),
    Layer(
        "max-pool",
        "max-pooling over a product",
        "maxⱼ x·wⱼ",
        "(x @ w.T).max(-1).values",
        ops.max_pool_product, _max_pool,
        _matrices("rows", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "contrastive",
        "contrastive loss, both ways",
        "½ log Σⱼ exp(xᵢ·yⱼ) + ½ log Σⱼ exp(xⱼ·yᵢ) − xᵢ·yᵢ",
        "s = x @ y.T; (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2",
        partial(ops.contrastive_loss, reduction="none"), _contrastive,
        _matrices("rows", "cols"), Size(4096, 4096, 128), Size(128, 128, 16),
    ),
)  # fmt: skip

# Losses as one trains with them, and the kernel sum: what other libraries have a function for.
MORE: tuple[Layer, ...] = (
    Layer(
        "cross-entropy",
        "cross-entropy, mean",
        "mean of log Σⱼ exp(x·wⱼ) − x·wₜ",
        "F.cross_entropy(x @ w.T, t)",
        ops.cross_entropy, _mean_cross_entropy,
        _class_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "kernel-sum",
        "Gaussian kernel sum",
        "Σⱼ exp(−|x − yⱼ|²/2) bⱼ",
        "torch.exp(-(x² + y² - 2 x @ y.T) / 2) @ b",
        ops.kernel_sum, _kernel_sum,
        _matrices("rows", "cols", "cols"), Size(4096, 4096, 3), Size(96, 128, 3),
    ),
)  # fmt: skip

NAMED = {layer.key: layer for layer in (*LAYERS, *MORE)}
