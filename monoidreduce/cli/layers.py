"""Ready-made layers that can be named on the command line: ours, the dense form it equals, inputs and sizes.

PAPER_LAYERS are shown by the demo; LAYERS has them all, by key. Losses are computed per row, so that the gradient of
every row is compared; the two layers that only ``bench`` and ``profile`` know are those other libraries have too.

Legend: M rows, N columns, D features. Inputs that require gradients are learned. Every dense form is the plain torch
that one would write first, and builds at least one M × N matrix.
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

SEED = 2023  # inputs are the same on every run
WINDOW = 256  # keys that a token attends to, in the demo
LOGIT = 2.0  # standard deviation of a logit: peaked enough that rare large logits matter


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
    """A layer in two implementations, ``ours`` and ``naive``, that take the same inputs and return the same values."""

    key: str  # its name on the command line
    name: str
    formula: str
    dense: str  # the code of ``naive``, as shown on pages
    ours: Callable[..., Any]
    naive: Callable[..., Any]
    inputs: Callable[[Size], tuple[Any, ...]]
    full: Size
    quick: Size
    backward: bool = True
    # For results that cannot be compared with those of ``naive``: (inputs in float64, results) -> (value, truth).
    judge: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Tensor, Tensor]] | None = None


# Dense forms that take more than a line ---------------------------------------------------------------------------


def _dense_entropy(x: Tensor, w: Tensor) -> Tensor:
    log_p = (x @ w.T).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def _dense_sample(x: Tensor, w: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    log_p = (x @ w.T).log_softmax(-1)
    drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator(x.device).manual_seed(seed))
    return drawn[:, 0], log_p.gather(1, drawn)[:, 0]


def _dense_contrastive(x: Tensor, y: Tensor) -> Tensor:
    s, own = x @ y.T, torch.arange(len(x), device=x.device)
    return (F.cross_entropy(s, own, reduction="none") + F.cross_entropy(s.T, own, reduction="none")) / 2


def _dense_kernel_sum(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    square = (x * x).sum(-1)[:, None] + (y * y).sum(-1) - 2 * (x @ y.T)
    return torch.exp(-square / 2) @ b


def _dense_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril_().triu_(1 - WINDOW)
    return (q @ k.T).masked_fill(~near, -torch.inf).softmax(-1) @ v


# Inputs -----------------------------------------------------------------------------------------------------------


def _draw_matrices(generator: torch.Generator, size: Size, *axes: str) -> list[Tensor]:
    """Learned matrices with a vector per row or column, scaled so that a product of two has deviation LOGIT."""
    scale = (LOGIT / size.features**0.5) ** 0.5
    shapes = [(getattr(size, axis), size.features) for axis in axes]
    return [(torch.randn(shape, generator=generator) * scale).requires_grad_() for shape in shapes]


def _matrices(*axes: str) -> Callable[[Size], tuple[Any, ...]]:
    return lambda size: tuple(_draw_matrices(torch.Generator().manual_seed(SEED), size, *axes))


def _class_inputs(s: Size) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(SEED)
    return *_draw_matrices(generator, s, "rows", "cols"), torch.randint(s.cols, (s.rows,), generator=generator)


def _distribution_inputs(s: Size) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(SEED)
    matrices = _draw_matrices(generator, s, "rows", "cols")
    return *matrices, torch.randn(s.rows, s.cols, generator=generator).mul_(LOGIT).softmax(-1)


def _sample_inputs(s: Size) -> tuple[Any, ...]:
    return (*(t.detach() for t in _matrices("rows", "cols")(s)), SEED)


def _point_inputs(s: Size) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(SEED)
    return tuple(torch.rand(count, s.features, generator=generator) for count in (s.rows, s.cols))


def _judge_sample(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Two samplers draw differently, so each is judged by the probability of what it drew itself."""
    x, w, _ = inputs
    drawn, log_probability = outputs
    return log_probability, (x @ w.T).log_softmax(-1).gather(1, drawn[:, None])[:, 0]


# The table --------------------------------------------------------------------------------------------------------

_SQUARE, _VOCABULARY, _SMALL = Size(4096, 4096, 64), Size(1024, 16384, 128), Size(96, 128, 16)

PAPER_LAYERS: tuple[Layer, ...] = (
    Layer(
        "attention", "attention", "Σⱼ softmaxⱼ(q·kⱼ) vⱼ", "(q @ k.T).softmax(-1) @ v",
        partial(ops.attention, scale=1.0), lambda q, k, v: (q @ k.T).softmax(-1) @ v,
        _matrices("rows", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "cross-entropy-rows", "cross-entropy, classes", "log Σⱼ exp(x·wⱼ) − x·wₜ", "F.cross_entropy(x @ w.T, t)",
        partial(ops.cross_entropy, reduction="none"), lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="none"),
        _class_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy-given", "cross-entropy, given distribution",
        "log Σⱼ exp(x·wⱼ) − Σⱼ pⱼ x·wⱼ", "F.cross_entropy(x @ w.T, p)",
        partial(ops.cross_entropy_given, reduction="none"),
        lambda x, w, p: F.cross_entropy(x @ w.T, p, reduction="none"),
        _distribution_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy-two", "cross-entropy, two parameterised",
        "log Σⱼ exp(p·cⱼ) − Σⱼ softmaxⱼ(q·tⱼ) p·cⱼ", "F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1))",
        partial(ops.cross_entropy_distributions, reduction="none"),
        lambda p, c, q, t: F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1), reduction="none"),
        _matrices("rows", "cols", "rows", "cols"), Size(1024, 16384, 64), _SMALL,
    ),
    Layer(
        "entropy", "entropy", "log Σⱼ exp(x·wⱼ) − Σⱼ softmaxⱼ(x·wⱼ) x·wⱼ",
        "l = (x @ w.T).log_softmax(-1); -(l.exp() * l).sum(-1)",
        ops.entropy, _dense_entropy, _matrices("rows", "cols"), _VOCABULARY, _SMALL,
    ),
    Layer(
        "mlp", "two-layer MLP", "Σⱼ relu(x·pⱼ) qⱼ", "torch.relu(x @ p.T) @ q",
        ops.mlp, lambda x, p, q: torch.relu(x @ p.T) @ q, _matrices("rows", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "gated-mlp", "gated MLP", "Σⱼ silu(x·gⱼ) (x·uⱼ) oⱼ", "(F.silu(x @ g.T) * (x @ u.T)) @ o",
        ops.gated_mlp, lambda x, g, u, o: (F.silu(x @ g.T) * (x @ u.T)) @ o,
        _matrices("rows", "cols", "cols", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "sample", "sampling, with its probability", "j ~ softmax(x·w), and x·wⱼ − log Σₖ exp(x·wₖ)",
        "l = (x @ w.T).log_softmax(-1); j = l.exp().multinomial(1); l.gather(1, j)",
        ops.sample, _dense_sample, _sample_inputs, Size(256, 16384, 128), _SMALL, backward=False, judge=_judge_sample,
    ),
    Layer(
        "max-pool", "max-pooling over a product", "maxⱼ x·wⱼ", "(x @ w.T).max(-1).values",
        ops.max_pool_product, lambda x, w: (x @ w.T).max(-1).values, _matrices("rows", "cols"), _SQUARE, _SMALL,
    ),
    Layer(
        "contrastive", "contrastive loss, both ways", "½ log Σⱼ exp(xᵢ·yⱼ) + ½ log Σⱼ exp(xⱼ·yᵢ) − xᵢ·yᵢ",
        "s = x @ y.T; (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2",
        partial(ops.contrastive_loss, reduction="none"), _dense_contrastive,
        _matrices("rows", "cols"), Size(4096, 4096, 128), Size(128, 128, 16),
    ),
)  # fmt: skip

_OTHER_LAYERS: tuple[Layer, ...] = (
    Layer(
        "cross-entropy", "cross-entropy, mean", "mean of log Σⱼ exp(x·wⱼ) − x·wₜ", "F.cross_entropy(x @ w.T, t)",
        ops.cross_entropy, lambda x, w, t: F.cross_entropy(x @ w.T, t), _class_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "kernel-sum", "Gaussian kernel sum", "Σⱼ exp(−|x − yⱼ|²/2) bⱼ", "torch.exp(-(x² + y² - 2 x @ y.T) / 2) @ b",
        ops.kernel_sum, _dense_kernel_sum, _matrices("rows", "cols", "cols"), Size(4096, 4096, 3), Size(96, 128, 3),
    ),
)  # fmt: skip

_KERNEL_SUM = _OTHER_LAYERS[1]

# Shown by the demo as those that skip most pairs, or whose pairs are cheap.
TIME_LAYERS: tuple[Layer, ...] = (
    Layer(
        "window-attention", "attention within a window", f"Σⱼ softmaxⱼ(q·kⱼ) vⱼ over the last {WINDOW} keys",
        f"near = ones(n, n, bool).tril().triu({1 - WINDOW}); (q @ k.T).masked_fill(~near, -inf).softmax(-1) @ v",
        partial(ops.attention, scale=1.0, causal=True, window=WINDOW - 1), _dense_window,
        _matrices("rows", "cols", "cols"), _SQUARE, Size(128, 128, 16),
    ),
    _KERNEL_SUM,
    Layer(
        "knn", "10 nearest neighbours in space", "the 10 smallest |x − yⱼ|",
        "torch.cdist(x, y).topk(10, largest=False)",
        partial(ops.knn, k=10), lambda x, y: torch.cdist(x, y).topk(10, largest=False), _point_inputs,
        Size(8192, 8192, 3), Size(96, 128, 3), backward=False,
    ),
)  # fmt: skip

LAYERS = {layer.key: layer for layer in (*PAPER_LAYERS, *_OTHER_LAYERS)}
EXPLAINED = {layer.key: layer for layer in (*LAYERS.values(), *TIME_LAYERS)}


def find_ready_made(name: str) -> Layer | None:
    """The layer with this key, or that calls the function of ``ops`` with this name."""
    of_function = (k for k in EXPLAINED.values() if getattr(ops, name, ops) is getattr(k.ours, "func", k.ours))
    return EXPLAINED.get(name) or next(of_function, None)
