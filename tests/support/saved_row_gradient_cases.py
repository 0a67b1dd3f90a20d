"""Losses whose row gradients a forward can keep, beside their plain forms; and a way to have them kept at any size."""

import math

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program.gradient import fold_saving_row_gradients
from monoidreduce.runtime import dispatch
from tests.support import internals


@mr.op
def contrastive(x: Row["d"], y: Col["d"], scale: float = 3.0):
    s = x @ y * scale
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
def labelled(x: Row["d"], y: Col["d"], label: Row):
    s = x @ y
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


@mr.op
def biased(x: Row["d"], y: Col["d"], bias: Col):
    return mr.logsumexp(x @ y * 2.0 + bias)


@mr.op
def earlier(x: Row["d"], y: Col["d"]):
    return mr.logsumexp(torch.where(mr.col_index < mr.row_index, x @ y, -torch.inf))


@mr.op
def two_vectors(x: Row["d"], y: Col["d"], u: Row["e"], v: Col["e"]):
    return mr.logsumexp(x @ y + u @ v)


@mr.op
def hinge(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.relu(1.0 - x @ y))


@mr.op
def gated_sum(x: Row["d"], y: Col["d"], z: Col["d"]):
    return mr.sum(torch.sin(x @ y) * (x @ z))


def dense_labelled(x, y, label):
    s = x @ y.mT
    inside = (label >= 0) & (label < y.shape[-2])
    at = s.gather(-1, torch.where(inside, label, 0)[..., None])[..., 0]
    return torch.logsumexp(s, -1).to(torch.promote_types(s.dtype, torch.float32)) - torch.where(inside, at, 0.0)


def dense_earlier(x, y):
    s = x @ y.mT
    hidden = torch.ones_like(s, dtype=torch.bool).triu()
    return torch.logsumexp(s.masked_fill(hidden, -math.inf), -1)


def _normal(*shapes):
    def make(gen, dtype):
        return tuple(torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes)

    return make


def _with_labels(gen, dtype):
    x, y = _normal((59, 16), (111, 16))(gen, dtype)
    label = torch.randint(0, 111, (59,), generator=gen)
    label[3], label[7] = -100, 111  # of no column
    return x, y, label


def _confident(gen, dtype):
    """Rows whose probability of their own column is 1 to rounding: softmax less one-hot is what is left of it."""
    y = torch.randn(59, 16, generator=gen, dtype=torch.float64)
    return (y * 1.5).to(dtype), y.to(dtype)


dense_contrastive = lambda x, y: F.cross_entropy(
    (x @ y.mT).flatten(0, -2) * 3.0, torch.arange(x.shape[-2]).repeat(x.shape[:-2].numel()), reduction="none"
).view(x.shape[:-1])

# op, plain form, inputs from a generator and a type
LOSSES = {
    "contrastive": (contrastive, dense_contrastive, _normal((59, 16), (59, 16))),
    "contrastive, confident": (contrastive, dense_contrastive, _confident),
    "contrastive, batch": (contrastive, dense_contrastive, _normal((2, 33, 16), (2, 33, 16))),
    "labelled": (labelled, dense_labelled, _with_labels),
    "biased": (biased, lambda x, y, b: torch.logsumexp(x @ y.mT * 2.0 + b, -1), _normal((59, 32), (111, 32), (111,))),
    "two vectors": (
        two_vectors,
        lambda x, y, u, v: torch.logsumexp(x @ y.mT + u @ v.mT, -1),
        _normal((59, 16), (65, 16), (59, 32), (65, 32)),
    ),
    "hinge": (hinge, lambda x, y: torch.relu(1.0 - x @ y.mT).sum(-1), _normal((59, 16), (111, 16))),
    "gated sum": (
        gated_sum,
        lambda x, y, z: (torch.sin(x @ y.mT) * (x @ z.mT)).sum(-1),
        _normal((2, 33, 32), (65, 32), (65, 32)),
    ),
    "earlier columns": (earlier, dense_earlier, _normal((59, 16), (59, 16))),
}


def keep_always(patch: pytest.MonkeyPatch) -> list:
    """Every pass that has such a form takes it, whatever engine runs it; the forms met."""
    met: list = []

    def form(fold, leaves, sizes, engine):
        found = fold_saving_row_gradients(fold, tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves))
        met.append(found)
        return found

    patch.setattr(dispatch, "has_many_pairs", lambda sizes: True)
    internals.replace_saved_row_gradients(patch, form)
    return met
