"""The papers' layers as the demo shows them: ours, the dense form it equals, inputs and sizes. One row each.

Legend: M rows, N columns, D features. Inputs that ask for a gradient are learned; the others are given. Every dense form
is the plain torch that one would write first, and builds at least one M × N matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

SEED = 2023  # of the papers' first form; inputs are the same on every run
TEMPERATURE = 2.0  # standard deviation of a logit: peaked enough that the rare large ones matter
GIVEN = 8  # classes per row that a given distribution puts its mass on


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


# Ours: what happens to one pair -----------------------------------------------------------------------------------------


@mr.op
def _attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def _cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def _soft_cross_entropy(x: Row["d"], label: Row["k"], weight: Row["k"], w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, weight, 0.0).sum() * s)


@mr.op
def _distill(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.logsumexp(student) - mr.softmax_mean(teacher, student)


@mr.op
def _entropy(x: Row["d"], w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.softmax_mean(s, s)


@mr.op
def _mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@mr.op
def _gated_mlp(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"]):
    return mr.sum(F.silu(x @ gate) * (x @ up) * down)


@mr.op
def _sample(x: Row["d"], w: Col["d"], seed: int):
    s = x @ w
    drawn = mr.sample(s, seed)
    return drawn, mr.sum(torch.where(mr.col_index == drawn, s, 0.0)) - mr.logsumexp(s)


@mr.op
def _max_pool(x: Row["d"], w: Col["d"]):
    return mr.max(x @ w)


@mr.op
def _contrastive(x: Row["d"], y: Col["d"]):
    s = x @ y
    own = torch.where(mr.row_index == mr.col_index, s, 0.0)
    return mr.logsumexp(s) - mr.sum(own), mr.logsumexp(s, over="rows") - mr.sum(own, over="rows")


# Naive: the same, through the M × N matrix ------------------------------------------------------------------------------


def _naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).softmax(-1) @ v


def _naive_cross_entropy(x: Tensor, target: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.T, target, reduction="none")


def _naive_soft_cross_entropy(x: Tensor, label: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    distribution = weight.new_zeros(len(x), len(w)).scatter(1, label, weight)
    return F.cross_entropy(x @ w.T, distribution, reduction="none")


def _naive_distill(p: Tensor, c: Tensor, q: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1), reduction="none")


def _naive_entropy(x: Tensor, w: Tensor) -> Tensor:
    log_p = (x @ w.T).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def _naive_mlp(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return torch.relu(x @ p.T) @ q


def _naive_gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down


def _naive_sample(x: Tensor, w: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    log_p = (x @ w.T).log_softmax(-1)
    drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator(x.device).manual_seed(seed))
    return drawn[:, 0], log_p.gather(1, drawn)[:, 0]


def _naive_max_pool(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.T).max(-1).values


def _naive_contrastive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s, own = x @ y.T, torch.arange(len(x), device=x.device)
    return F.cross_entropy(s, own, reduction="none"), F.cross_entropy(s.T, own, reduction="none")


# Inputs -----------------------------------------------------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _learned(generator: torch.Generator, *shapes: tuple[int, int]) -> list[Tensor]:
    """Matrices to take gradients of, scaled so that a product of two has standard deviation TEMPERATURE."""
    scale = lambda features: (TEMPERATURE / features**0.5) ** 0.5
    return [(torch.randn(s, generator=generator) * scale(s[1])).requires_grad_() for s in shapes]


def _matrices(rows: int, cols: int) -> Callable[[Size], tuple[Any, ...]]:
    """So many learned matrices with a row per row, then so many with a row per column."""
    return lambda s: tuple(_learned(_generator(), *[(s.rows, s.features)] * rows, *[(s.cols, s.features)] * cols))


def _class_inputs(s: Size) -> tuple[Any, ...]:
    generator = _generator()
    x, w = _learned(generator, (s.rows, s.features), (s.cols, s.features))
    return x, torch.randint(s.cols, (s.rows,), generator=generator), w


def _given_inputs(s: Size) -> tuple[Any, ...]:
    generator = _generator()
    x, w = _learned(generator, (s.rows, s.features), (s.cols, s.features))
    label = torch.rand(s.rows, s.cols, generator=generator).topk(GIVEN).indices  # without repetition
    return x, label, torch.rand(s.rows, GIVEN, generator=generator).softmax(-1), w


def _distill_inputs(s: Size) -> tuple[Any, ...]:
    row, col = (s.rows, s.features), (s.cols, s.features)
    return tuple(_learned(_generator(), row, col, row, col))


def _sample_inputs(s: Size) -> tuple[Any, ...]:
    return (*(t.detach() for t in _matrices(1, 1)(s)), SEED)


def _judge_sample(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Two samplers draw differently, so each is judged by the probability of what it drew itself."""
    x, w, _ = inputs
    drawn, log_probability = outputs
    return [(log_probability, (x @ w.T).log_softmax(-1).gather(1, drawn[:, None])[:, 0])]


# The table --------------------------------------------------------------------------------------------------------------

_SQUARE = Size(4096, 4096, 64)
_VOCABULARY = Size(1024, 16384, 128)
_SMALL = Size(96, 128, 16)
_SMALL_SQUARE = Size(128, 128, 16)

LAYERS: tuple[Layer, ...] = (
    Layer(
        "attention",
        "Σⱼ softmaxⱼ(q·kⱼ) vⱼ",
        "(q @ k.T).softmax(-1) @ v",
        _attention, _naive_attention, _matrices(1, 2), _SQUARE, _SMALL,
    ),
    Layer(
        "cross-entropy, classes",
        "log Σⱼ exp(x·wⱼ) − x·w_target",
        "F.cross_entropy(x @ w.T, target)",
        _cross_entropy, _naive_cross_entropy, _class_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy, given distribution",
        "log Σⱼ exp(x·wⱼ) − Σⱼ pⱼ x·wⱼ",
        "F.cross_entropy(x @ w.T, p)",
        _soft_cross_entropy, _naive_soft_cross_entropy, _given_inputs, _VOCABULARY, _SMALL,
    ),
    Layer(
        "cross-entropy, two parameterised",
        "log Σⱼ exp(p·cⱼ) − Σⱼ softmaxⱼ(q·tⱼ) p·cⱼ",
        "F.cross_entropy(p @ c.T, (q @ t.T).softmax(-1))",
        _distill, _naive_distill, _distill_inputs, Size(1024, 16384, 64), _SMALL,
    ),
    Layer(
        "entropy",
        "log Σⱼ exp(x·wⱼ) − Σⱼ softmaxⱼ(x·wⱼ) x·wⱼ",
        "l = (x @ w.T).log_softmax(-1); -(l.exp() * l).sum(-1)",
        _entropy, _naive_entropy, _matrices(1, 1), _VOCABULARY, _SMALL,
    ),
    Layer(
        "two-layer MLP",
        "Σⱼ relu(x·pⱼ) qⱼ",
        "torch.relu(x @ p.T) @ q",
        _mlp, _naive_mlp, _matrices(1, 2), _SQUARE, _SMALL,
    ),
    Layer(
        "gated MLP",
        "Σⱼ silu(x·gⱼ) (x·uⱼ) oⱼ",
        "(F.silu(x @ g.T) * (x @ u.T)) @ o",
        _gated_mlp, _naive_gated_mlp, _matrices(1, 3), _SQUARE, _SMALL,
    ),
    Layer(
        "sampling, with its probability",
        "j ~ softmaxⱼ(x·wⱼ), and x·wⱼ − log Σ exp(x·w)",
        "l = (x @ w.T).log_softmax(-1); j = l.exp().multinomial(1); l.gather(1, j)",
        _sample, _naive_sample, _sample_inputs, Size(256, 16384, 128), _SMALL, backward=False, judge=_judge_sample,
    ),
    Layer(
        "max-pooling over a product",
        "maxⱼ x·wⱼ",
        "(x @ w.T).max(-1).values",
        _max_pool, _naive_max_pool, _matrices(1, 1), _SQUARE, _SMALL,
    ),
    Layer(
        "contrastive loss, both ways",
        "log Σⱼ exp(xᵢ·yⱼ) − xᵢ·yᵢ and log Σᵢ exp(xᵢ·yⱼ) − xⱼ·yⱼ",
        "F.cross_entropy(x @ y.T, own), F.cross_entropy((x @ y.T).T, own)",
        _contrastive, _naive_contrastive, _matrices(1, 1), Size(4096, 4096, 128), _SMALL_SQUARE,
    ),
)  # fmt: skip
