"""The zoo's layers with an argument given per pair: a bias, a mask, target probabilities, edges of a graph."""

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from tests.support.layers.base import layer, logsumexp, only, softmax


def _pairs(d):
    return d.normal(d.M, d.N)


@layer(lambda q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v, lambda d: (*d.qkv(), _pairs(d)))
def biased_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: Pair):
    return mr.softmax_mean(q @ k + bias, v)


# A third of the pairs is hidden, and every fifth row sees nothing.
@layer(
    lambda q, k, v, seen: softmax(only(seen, q @ k.mT)) @ v,
    lambda d: (*d.qkv(), (d.integers(d.M, d.N, high=3) > 0) & (torch.arange(d.M) % 5 != 4).unsqueeze(-1)),
)
def attention_seen_through_a_mask(q: Row["f"], k: Col["f"], v: Col["d"], seen: Pair):
    return mr.softmax_mean(torch.where(seen, q @ k, -torch.inf), v)


@layer(
    lambda x, w, probs: F.cross_entropy(x @ w.mT, probs, reduction="none"),
    lambda d: (d.rows(6), d.cols(6), d.uniform(d.M, d.N, low=0.1) / d.N),
)
def cross_entropy_with_given_probabilities(x: Row["d"], w: Col["d"], probs: Pair):
    s = x @ w
    return mr.sum((mr.logsumexp(s) - s) * probs)


def _edges(x, y, w, kind):
    near = torch.where(kind == 1, w, torch.where(kind == 2, -0.5 * w, 0.0))
    return near @ y, (x * (near @ y)).sum(-1), near.mT @ x


@layer(_edges, lambda d: (d.rows(4), d.cols(4), _pairs(d), d.integers(d.M, d.N, high=4).to(torch.uint8)))
def messages_along_weighted_edges(x: Row["d"], y: Col["d"], w: Pair, kind: Pair):
    near = torch.where(kind == 1, w, torch.where(kind == 2, -0.5 * w, 0.0))
    return mr.sum(near * y), mr.sum(near * (x @ y)), mr.sum(near * x, over="rows")


@layer(
    lambda cost, a, b: (-logsumexp(b - cost), -logsumexp(a.unsqueeze(-1) - cost, -2)),
    lambda d: (_pairs(d), d.rows(), d.cols()),
)
def sinkhorn_step_with_a_given_cost(cost: Pair, a: Row, b: Col):
    return -mr.logsumexp(b - cost), -mr.logsumexp(a - cost, over="rows")


def _picked(scores, target, y):
    hit = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    best = scores.argmax(-1, keepdim=True)
    top = scores.gather(-1, best).squeeze(-1)  # a tie's gradient goes to its first
    return torch.logsumexp(scores, -1) - hit, top, best.squeeze(-1), torch.tanh(hit).unsqueeze(-1) * y[target]


@layer(_picked, lambda d: (_pairs(d), d.targets(), d.cols(3)))
def cross_entropy_of_given_logits(scores: Pair, target: Row, y: Col["d"]):
    own = mr.col_index == target
    hit = mr.sum(torch.where(own, scores, 0.0))
    value = mr.sum(torch.where(own, torch.tanh(scores), 0.0) * y)
    return mr.logsumexp(scores) - hit, mr.max(scores), mr.argmax(scores), value
