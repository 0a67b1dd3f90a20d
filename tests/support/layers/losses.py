"""The zoo's losses: cross-entropy, distillation, contrastive learning, ranking and survival."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.layers.base import gaps, layer, logsumexp, only, places


def _xent_inputs(d):
    return d.rows(6), d.targets(), d.cols(6)


# Cross-entropy


@layer(lambda x, target, w: F.cross_entropy(x @ w.mT, target, reduction="none"), _xent_inputs)
def cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


def _smoothed(x, target, w, smoothing):
    return F.cross_entropy(x @ w.mT, target, reduction="none", label_smoothing=smoothing)


@layer(_smoothed, lambda d: (*_xent_inputs(d), 0.1))
def label_smoothing(x: Row["d"], target: Row, w: Col["d"], smoothing: float):
    s = x @ w
    hit = mr.sum(torch.where(mr.col_index == target, s, 0.0))
    return mr.logsumexp(s) - (1 - smoothing) * hit - smoothing * mr.mean(s)


def _z_loss(x, target, w, weight):
    z = torch.logsumexp(x @ w.mT, -1)
    return F.cross_entropy(x @ w.mT, target, reduction="none") + weight * z.square(), z


@layer(_z_loss, lambda d: (*_xent_inputs(d), 0.01))
def z_loss(x: Row["d"], target: Row, w: Col["d"], weight: float):
    s = x @ w
    z = mr.logsumexp(s)
    return z - mr.sum(s * (mr.col_index == target).float()) + weight * z**2, z


def _focal(x, target, w, gamma):
    loss = F.cross_entropy(x @ w.mT, target, reduction="none")
    return (1 - torch.exp(-loss)) ** gamma * loss


# One class only gives loss 0, where the power has no second derivative.
@layer(_focal, lambda d: (*_xent_inputs(d), 2.0), least_cols=2)
def focal_loss(x: Row["d"], target: Row, w: Col["d"], gamma: float):
    s = x @ w
    loss = mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))
    return (1 - torch.exp(-loss)) ** gamma * loss


def _weighted_rows(x, target, w, bias, weight):
    return weight * F.cross_entropy(x @ w.mT + bias, target, reduction="none")


@layer(_weighted_rows, lambda d: (*_xent_inputs(d), d.cols(), torch.relu(d.rows())))
def weighted_biased_cross_entropy(x: Row["d"], target: Row, w: Col["d"], bias: Col, weight: Row):
    s = x @ w + bias
    return weight * (mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0)))


def _ignored(x, target, w):
    return F.cross_entropy(x @ w.mT, target, reduction="none", ignore_index=-100)


@layer(_ignored, lambda d: (d.rows(6), torch.where(d.integers(d.M) == 0, -100, d.targets()), d.cols(6)))
def ignoring_cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    loss = mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))
    return torch.where(target == -100, 0.0, loss)


def _binary(x, target, w):
    s = x @ w.mT
    return F.binary_cross_entropy_with_logits(s, F.one_hot(target, s.shape[-1]).to(s.dtype), reduction="none").sum(-1)


@layer(_binary, _xent_inputs)
def binary_cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    return mr.sum(F.softplus(s) - torch.where(mr.col_index == target, s, 0.0))


def _margin(x, target, w, scale, margin):
    s = F.normalize(x, dim=-1) @ F.normalize(w, dim=-1).mT
    s = scale * (s - margin * F.one_hot(target, s.shape[-1]))
    return F.cross_entropy(s, target, reduction="none")


@layer(_margin, lambda d: (*_xent_inputs(d), 4.0, 0.25))
def margin_softmax(x: Row["d"], target: Row, w: Col["d"], scale: float, margin: float):
    hit = mr.col_index == target
    s = scale * (F.normalize(x, dim=-1) @ F.normalize(w, dim=-1) - torch.where(hit, margin, 0.0))
    return mr.logsumexp(s) - mr.sum(torch.where(hit, s, 0.0))


# Distillation: a student's and a teacher's logits, each a product


def _two_products(d):
    return d.rows(6), d.cols(6), d.rows(4), d.cols(4)


def _soft_targets(p, c, q, t):
    return F.cross_entropy(p @ c.mT, torch.softmax(q @ t.mT, -1), reduction="none")


@layer(_soft_targets, _two_products)
def soft_targets(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.logsumexp(student) - mr.softmax_mean(teacher, student)


def _log_probabilities(p, c, q, t):
    return torch.log_softmax(p @ c.mT, -1), torch.log_softmax(q @ t.mT, -1)


def _kl_forward(p, c, q, t):
    student, teacher = _log_probabilities(p, c, q, t)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


@layer(_kl_forward, _two_products)
def kl_forward(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.softmax_mean(teacher, teacher - student) - mr.logsumexp(teacher) + mr.logsumexp(student)


def _kl_reverse(p, c, q, t):
    """As the body has it: the two logsumexps cancel less of what they are taken from than log-probabilities do."""
    student, teacher = p @ c.mT, q @ t.mT
    mean = (torch.softmax(student, -1) * (student - teacher)).sum(-1)
    return mean - torch.logsumexp(student, -1) + torch.logsumexp(teacher, -1)


@layer(_kl_reverse, _two_products)
def kl_reverse(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.softmax_mean(student, student - teacher) - mr.logsumexp(student) + mr.logsumexp(teacher)


def _jensen_shannon(p, c, q, t):
    """As the body has it: a logsumexp is rounded before it is taken off, which log_softmax does not do."""
    a, b = p @ c.mT, q @ t.mT
    a, b = a - torch.logsumexp(a, -1, keepdim=True), b - torch.logsumexp(b, -1, keepdim=True)
    m = torch.logaddexp(a, b) - math.log(2)
    return 0.5 * (torch.exp(a) * (a - m) + torch.exp(b) * (b - m)).sum(-1)


@layer(_jensen_shannon, _two_products)
def jensen_shannon(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    a, b = p @ c, q @ t
    a, b = a - mr.logsumexp(a), b - mr.logsumexp(b)
    m = torch.logaddexp(a, b) - math.log(2)
    return 0.5 * mr.sum(torch.exp(a) * (a - m) + torch.exp(b) * (b - m))


def _entropy(x, w):
    """As the body has it: by log_softmax, nothing large would cancel, and its error would be no bar for this one."""
    s = x @ w.mT
    p = torch.softmax(s, -1)
    mean = (p * s).sum(-1)
    return torch.logsumexp(s, -1) - mean, (p * (s - mean.unsqueeze(-1)).square()).sum(-1)


@layer(_entropy, lambda d: (d.rows(6), d.cols(6)))
def entropy_and_its_variance(x: Row["d"], w: Col["d"]):
    s = x @ w
    z = mr.logsumexp(s)
    mean = mr.softmax_mean(s, s)
    return z - mean, mr.softmax_mean(s, (s - mean) ** 2)


def _tsallis(x, w):
    """As the body has it, too."""
    s = x @ w.mT
    return 1 - torch.exp(s - torch.logsumexp(s, -1, keepdim=True)).square().sum(-1)


@layer(_tsallis, lambda d: (d.rows(6), d.cols(6)))
def tsallis_entropy(x: Row["d"], w: Col["d"]):
    s = x @ w
    z = mr.logsumexp(s)
    return 1 - mr.sum(torch.exp(s - z) ** 2)


# Contrastive: the diagonal holds the positives


def _info_nce(x, y, tau):
    s = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT / tau
    i, j = places(s)
    positive = torch.where(i == j, s, 0.0)
    return torch.logsumexp(s, -1) - positive.sum(-1), torch.logsumexp(s, -2) - positive.sum(-2)


@layer(_info_nce, lambda d: (d.rows(6), d.cols(6), torch.tensor(0.5, dtype=d.dtype)))
def info_nce(x: Row["d"], y: Col["d"], tau: float):
    s = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1) / tau
    positive = torch.where(mr.row_index == mr.col_index, s, 0.0)
    to_cols = mr.logsumexp(s) - mr.sum(positive)
    return to_cols, mr.logsumexp(s, over="rows") - mr.sum(positive, over="rows")


def _siglip(x, y, tau, bias):
    s = x @ y.mT * tau + bias
    i, j = places(s)
    return -F.logsigmoid(torch.where(i == j, s, -s)).sum(-1)


@layer(_siglip, lambda d: (d.rows(6), d.cols(6), torch.tensor(0.75, dtype=d.dtype), torch.tensor(-1.5, dtype=d.dtype)))
def siglip(x: Row["d"], y: Col["d"], tau: float, bias: float):
    label = torch.where(mr.row_index == mr.col_index, 1.0, -1.0)
    return -mr.sum(F.logsigmoid(label * (x @ y * tau + bias)))


def _triplet(x, y, margin):
    s = x @ y.mT
    i, j = places(s)
    return torch.relu(margin + only(i != j, s).amax(-1) - torch.where(i == j, s, 0.0).sum(-1))


@layer(_triplet, lambda d: (d.rows(6), d.cols(6), 0.5))
def triplet_hinge(x: Row["d"], y: Col["d"], margin: float):
    s = x @ y
    same = mr.row_index == mr.col_index
    return torch.relu(margin + mr.max(torch.where(same, -torch.inf, s)) - mr.sum(torch.where(same, s, 0.0)))


def _supervised(x, y, row_label, col_label):
    s = x @ y.mT
    i, j = places(s)
    same = (row_label.unsqueeze(-1) == col_label.unsqueeze(-2)) & (i != j)
    z = logsumexp(only(i != j, s)).clamp(min=-100)
    total = torch.where(same, s - z.unsqueeze(-1), 0.0).sum(-1)
    return -total / same.sum(-1).clamp(min=1)


@layer(_supervised, lambda d: (d.rows(6), d.cols(6), d.integers(d.M, high=5), d.integers(d.N, high=5)))
def supervised_contrastive(x: Row["d"], y: Col["d"], row_label: Row, col_label: Col):
    s = x @ y
    other = mr.row_index != mr.col_index
    same = (row_label == col_label) & other
    z = mr.logsumexp(torch.where(other, s, -torch.inf)).clamp(min=-100)
    return -mr.sum(torch.where(same, s - z, 0.0)) / mr.count(same).clamp(min=1)


def _hard_negatives(x, y, beta):
    s = x @ y.mT
    i, j = places(s)
    s = only(i != j, s)
    return logsumexp(torch.where(i != j, (1 + beta) * s, s)).clamp(min=-50) - logsumexp(beta * s).clamp(min=-50)


@layer(_hard_negatives, lambda d: (d.rows(6), d.cols(6), 0.5))
def hard_negatives(x: Row["d"], y: Col["d"], beta: float):
    s, other = x @ y, mr.row_index != mr.col_index
    weighted = mr.logsumexp(torch.where(other, (1 + beta) * s, -torch.inf))
    return weighted.clamp(min=-50) - mr.logsumexp(torch.where(other, beta * s, -torch.inf)).clamp(min=-50)


# Ranking and survival: numbers per row and column, no features


def _cox(score, time, event, risk_score, risk_time):
    at_risk = gaps(time, risk_time) <= 0
    z = logsumexp(only(at_risk, risk_score.unsqueeze(-2).expand(at_risk.shape)))
    return event * (z.clamp(min=-100) - score)


@layer(_cox, lambda d: (d.rows(), d.integers(d.M, high=20), d.integers(d.M), d.cols(), d.integers(d.N, low=3, high=23)))
def cox_partial_likelihood(score: Row, time: Row, event: Row, risk_score: Col, risk_time: Col):
    z = mr.logsumexp(torch.where(risk_time >= time, risk_score, -torch.inf))
    return event * (z.clamp(min=-100) - score)


def _rank_logistic(a, y, b, z):
    return torch.where(gaps(y, z) > 0, F.softplus(-gaps(a, b)), 0.0).sum(-1)


@layer(_rank_logistic, lambda d: (d.rows(), d.integers(d.M, high=4), d.cols(), d.integers(d.N, high=4)))
def ranking_logistic(a: Row, y: Row, b: Col, z: Col):
    return mr.sum(torch.where(y > z, F.softplus(b - a), 0.0))


def _rank_hinge(a, b, margin):
    loss = torch.relu(margin - gaps(a, b))
    return loss.mean(-1), loss.mean(-2)


@layer(_rank_hinge, lambda d: (d.rows(), d.cols(), 0.5))
def ranking_hinge(a: Row, b: Col, margin: float):
    loss = torch.relu(margin - (a - b))
    return mr.mean(loss), mr.mean(loss, over="rows")


def _auc(a, b):
    wins = gaps(a, b) > 0
    share = wins.sum(-2).to(torch.promote_types(a.dtype, torch.float32)) / a.shape[-1]
    return wins.sum(-1), wins.any(-1), wins.all(-1), share


@layer(_auc, lambda d: (d.rows(), d.cols()), differentiable=False)
def auc_counts(a: Row, b: Col):
    wins = a > b
    return mr.count(wins), mr.any(wins), mr.all(wins), mr.count(wins, over="rows") / mr.num_rows
