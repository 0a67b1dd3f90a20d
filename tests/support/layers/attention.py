"""The zoo's attention: every row is a query, every column a key with a value."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.layers.base import layer, logsumexp, only, places, softmax


@layer(lambda q, k, v, scale: torch.softmax(q @ k.mT * scale, -1) @ v, lambda d: (*d.qkv(), 0.35))
def scaled_attention(q: Row["f"], k: Col["f"], v: Col["d"], scale: float):
    return mr.softmax_mean(q @ k * scale, v)


def _causal(q, k, v):
    s = q @ k.mT
    i, j = places(s)
    return torch.softmax(only(j <= i, s), -1) @ v


@layer(_causal, lambda d: d.qkv())
def causal_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


def _window(q, k, v, window):
    s = q @ k.mT
    i, j = places(s)
    return softmax(only((i - j).abs() <= window, s)) @ v


@layer(_window, lambda d: (*d.qkv(), 7))
def window_attention(q: Row["f"], k: Col["f"], v: Col["d"], window: int):
    near = (mr.row_index - mr.col_index).abs() <= window
    return mr.softmax_mean(torch.where(near, q @ k, -torch.inf), v)


def _prefix(q, k, v, prefix):
    s = q @ k.mT
    i, j = places(s)
    return torch.softmax(only((j <= i) | (j < prefix[..., None, None]), s), -1) @ v


@layer(_prefix, lambda d: (*d.qkv(), torch.tensor(max(1, d.N // 3))))
def prefix_attention(q: Row["f"], k: Col["f"], v: Col["d"], prefix: mr.Batch):
    seen = (mr.col_index <= mr.row_index) | (mr.col_index < prefix)
    return mr.softmax_mean(torch.where(seen, q @ k, -torch.inf), v)


def _alibi(q, k, v, slope):
    s = q @ k.mT
    i, j = places(s)
    return torch.softmax(s - slope[..., None, None] * (i - j).abs(), -1) @ v


@layer(_alibi, lambda d: (d.normal(3, d.M, 5), d.normal(3, d.N, 5), d.normal(3, d.N, 4), d.uniform(3, high=0.2)))
def alibi_attention(q: Row["f"], k: Col["f"], v: Col["d"], slope: mr.Batch):
    return mr.softmax_mean(q @ k - slope * (mr.row_index - mr.col_index).abs(), v)


@layer(lambda q, k, v, cap: torch.softmax(cap * torch.tanh(q @ k.mT / cap), -1) @ v, lambda d: (*d.qkv(), 3.0))
def softcap_attention(q: Row["f"], k: Col["f"], v: Col["d"], cap: float):
    return mr.softmax_mean(cap * torch.tanh(q @ k / cap), v)


def _watched(q, k, v):
    s = q @ k.mT
    i, j = places(s)
    seen = i >> 2 >= j >> 2
    p = softmax(only(seen, s))
    entropy = logsumexp(only(seen, s)) - (p * s).sum(-1)
    return p @ v, entropy, (p * (i - j).abs()).sum(-1), p.sum(-2)


@layer(_watched, lambda d: d.qkv())
def watched_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    """Within blocks of four tokens and before them; with the entropy, distance and column sums of the weights."""
    s = q @ k
    seen = torch.where(mr.row_index >> 2 >= mr.col_index >> 2, s, -torch.inf)
    z = mr.logsumexp(seen)
    distance = mr.softmax_mean(seen, (mr.row_index - mr.col_index).abs().float())
    return mr.softmax_mean(seen, v), z - mr.softmax_mean(seen, s), distance, mr.sum(torch.exp(seen - z), over="rows")


def _documents(q, k, v, row_doc, col_doc):
    s = q @ k.mT
    i, j = places(s)
    return softmax(only((row_doc.unsqueeze(-1) == col_doc.unsqueeze(-2)) & (j <= i), s)) @ v


@layer(_documents, lambda d: (*d.qkv(), d.integers(d.M, high=4).sort()[0], d.integers(d.N, high=4).sort()[0]))
def document_attention(q: Row["f"], k: Col["f"], v: Col["d"], row_doc: Row, col_doc: Col):
    seen = (row_doc == col_doc) & (mr.col_index <= mr.row_index)
    return mr.softmax_mean(torch.where(seen, q @ k, -torch.inf), v)


def _padded(q, k, v, length):
    s = q @ k.mT
    return softmax(only(places(s)[1] < length[..., None, None], s)) @ v


@layer(
    _padded, lambda d: (d.normal(2, d.M, 5), d.normal(2, d.N, 5), d.normal(2, d.N, 4), torch.tensor([d.N, d.N // 2]))
)
def padded_attention(q: Row["f"], k: Col["f"], v: Col["d"], length: mr.Batch):
    return mr.softmax_mean(torch.where(mr.col_index < length, q @ k, -torch.inf), v)


def _distance(q, k, v, gamma):
    s = q @ k.mT
    i, j = places(s)
    return torch.softmax(s - gamma * torch.log1p((i - j).abs().to(s.dtype)), -1) @ v


@layer(_distance, lambda d: (*d.qkv(), torch.tensor(0.5, dtype=d.dtype)))
def distance_attention(q: Row["f"], k: Col["f"], v: Col["d"], gamma: float):
    return mr.softmax_mean(q @ k - gamma * torch.log1p((mr.row_index - mr.col_index).abs().float()), v)


def _cosine(q, k, v, tau):
    return torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * tau.unsqueeze(-1), -1) @ v


@layer(_cosine, lambda d: (*d.qkv(), d.uniform(d.M, low=1.0, high=4.0)))
def cosine_attention(q: Row["f"], k: Col["f"], v: Col["d"], tau: Row):
    return mr.softmax_mean(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1) * tau, v)


@layer(lambda q, k, v, bias: torch.sigmoid(q @ k.mT + bias.unsqueeze(-2)) @ v, lambda d: (*d.qkv(), d.cols()))
def sigmoid_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: Col):
    return mr.sum(torch.sigmoid(q @ k + bias) * v)


@layer(lambda q, k, v: torch.relu(q @ k.mT).square() @ v / k.shape[-2], lambda d: d.qkv())
def relu_squared_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.sum(torch.relu(q @ k) ** 2 * v) / mr.num_cols


def _linear(q, k, v):
    w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return w @ v / w.sum(-1, keepdim=True)


@layer(_linear, lambda d: d.qkv())
def linear_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.weighted_mean((F.elu(q) + 1) @ (F.elu(k) + 1), v)


def _sink(q, k, v, sink):
    s = q @ k.mT
    extra = sink[..., None, None].expand(*s.shape[:-1], 1)
    return torch.softmax(torch.cat([s, extra], -1), -1)[..., :-1] @ v


@layer(_sink, lambda d: (d.normal(2, d.M, 5), d.normal(2, d.N, 5), d.normal(2, d.N, 4), d.normal(2)))
def sink_attention(q: Row["f"], k: Col["f"], v: Col["d"], sink: mr.Batch):
    z = mr.logsumexp(q @ k)
    return mr.softmax_mean(q @ k, v) * torch.exp(z - torch.logaddexp(z, sink))


@mr.op
def _noise(like: Row, unit: Col["n"], seed: int):
    drawn = mr.uniform(seed) * unit, mr.gumbel(seed) * unit, mr.dropout(unit, 0.25, seed)
    return tuple(mr.sum(x) + 0 * like for x in drawn)


def noise(M, N, seed):
    """An op's own uniform and Gumbel numbers and what dropout keeps, all M × N of them, by the dense engine."""
    with mr.use(engine="reference"):
        return _noise(torch.zeros(M, dtype=torch.float64), torch.eye(N, dtype=torch.float64), seed)


def _dropout(q, k, v, p, seed):
    s = q @ k.mT
    assert p == 0.25  # as noise has it
    keep = noise(*s.shape, seed)[2] > 0
    return (torch.softmax(s, -1) * keep / (1 - p)) @ v


@layer(_dropout, lambda d: (*d.qkv(), 0.25, 1))
def dropout_attention(q: Row["f"], k: Col["f"], v: Col["d"], p: float, seed: int):
    return mr.softmax_mean(q @ k, mr.dropout(v, p, seed))


def _grouped(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


@layer(_grouped, lambda d: (d.normal(2, 2, 3, d.M, 4), d.normal(2, 2, 1, d.N, 4), d.normal(2, 1, 1, d.N, 3)))
def grouped_query_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


def _two_temperatures(q, k, v, hot, cold):
    s = q @ k.mT
    return 0.5 * (torch.softmax(s * hot, -1) @ v + torch.softmax(s * cold, -1) @ v)


@layer(_two_temperatures, lambda d: (*d.qkv(), 0.25, 1.5))
def two_temperature_attention(q: Row["f"], k: Col["f"], v: Col["d"], hot: float, cold: float):
    s = q @ k
    return 0.5 * (mr.softmax_mean(s * hot, v) + mr.softmax_mean(s * cold, v))


def _value_and_lse(q, k, v):
    s = q @ k.mT
    p = torch.softmax(s, -1)
    return p @ v, torch.logsumexp(s, -1), (p * s).sum(-1), s.amax(-1)


@layer(_value_and_lse, lambda d: d.qkv())
def value_and_lse(q: Row["f"], k: Col["f"], v: Col["d"]):
    s = q @ k
    return {"value": mr.softmax_mean(s, v), "lse": mr.logsumexp(s), "mean": mr.softmax_mean(s, s), "peak": mr.max(s)}


def _forgetting(q, k, v, gate_row, gate_col):
    s = q @ k.mT + gate_row.unsqueeze(-1) - gate_col.unsqueeze(-2)
    i, j = places(s)
    return torch.softmax(only(j <= i, s), -1) @ v


@layer(_forgetting, lambda d: (*d.qkv(), d.rows(), d.cols()))
def forgetting_attention(q: Row["f"], k: Col["f"], v: Col["d"], gate_row: Row, gate_col: Col):
    s = q @ k + (gate_row - gate_col)
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, s, -torch.inf), v)


def _dilated(q, k, v, stride):
    s = q @ k.mT
    i, j = places(s)
    return softmax(only(torch.logical_and((i - j) % stride == 0, ~(j > i)), s)) @ v


@layer(_dilated, lambda d: (*d.qkv(), 3))
def dilated_attention(q: Row["f"], k: Col["f"], v: Col["d"], stride: int):
    seen = torch.logical_and((mr.row_index - mr.col_index) % stride == 0, ~(mr.col_index > mr.row_index))
    return mr.softmax_mean(torch.where(seen, q @ k, -torch.inf), v)


def _graph(x, a, b, v):
    x = F.normalize(x - x.amax(-1, keepdim=True), p=1, dim=-1)
    return torch.softmax(F.leaky_relu((x @ a).unsqueeze(-1) + b.unsqueeze(-2), 0.2), -1) @ v


@layer(_graph, lambda d: (d.rows(4), d.normal(4), d.cols(), d.cols(3)))
def graph_attention(x: Row["f"], a: mr.Batch["f"], b: Col, v: Col["d"]):
    x = F.normalize(x - x.amax(), p=1, dim=-1)
    return mr.softmax_mean(F.leaky_relu(x @ a + b, 0.2), v)


def _slots(q, k, v):
    share = torch.softmax(q @ k.mT, -2)
    return share @ v / share.sum(-1, keepdim=True)


@layer(_slots, lambda d: d.qkv())
def slot_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    s = q @ k
    return mr.weighted_mean(torch.exp(s - mr.logsumexp(s, over="rows")), v)


def _gated(q, k, v, bias):
    s = q @ k.mT
    return torch.softmax(s, -1) @ v * torch.sigmoid(logsumexp(s + bias.unsqueeze(-2))).unsqueeze(-1)


@layer(_gated, lambda d: (*d.qkv(), d.cols()))
def gated_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: Col):
    return mr.softmax_mean(q @ k, v) * torch.sigmoid(mr.logsumexp(q @ k + bias))


@layer(
    lambda q, k, v, temperature: torch.softmax(q @ k.mT / temperature.unsqueeze(-2), -1) @ v * math.sqrt(2),
    lambda d: (*d.qkv(), d.uniform(d.N, low=0.5, high=2.0)),
)
def key_temperature_attention(q: Row["f"], k: Col["f"], v: Col["d"], temperature: Col):
    return mr.softmax_mean(q @ k / temperature, v) * math.sqrt(2)
