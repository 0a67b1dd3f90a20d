"""Statistics of attention by plain torch, with the whole matrix."""

import math

import torch


def hidden(M, N, heads, *, causal=False, window=None, documents=None, lengths=None, attn_mask=None):
    """Which pairs are hidden, [..., M, N]."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    i = i + (N - M if causal == "lower_right" else 0)
    none = torch.zeros(M, N, dtype=torch.bool)
    none |= (j > i) if causal else none
    if window is not None:
        none = none | (j < i - window) | (j > i + window)
    if documents is not None:
        none = none | (documents[:M, None] != documents[:N])
    if lengths is not None:
        none = none | (j >= lengths.view(-1, *[1] * heads, 1, 1))
    return none if attn_mask is None else none | ~attn_mask


def scores(q, k, *, scale=None, softcap=None, bias=None, alibi_slopes=None, **options):
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    M, N = q.shape[-2], k.shape[-2]
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    if alibi_slopes is not None:
        i = torch.arange(M)[:, None] + (N - M if options.get("causal") == "lower_right" else 0)
        s = s - alibi_slopes[:, None, None] * (i - torch.arange(N)).abs()
    return s.masked_fill(hidden(M, N, q.dim() - 3, **options), -math.inf)


def softmax(s):
    """Rows that see nothing have no weights."""
    return torch.softmax(s, -1).masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0)


def statistics(q, k, v=None, **options):
    s = scores(q, k, **options)
    p, (M, N) = softmax(s), s.shape[-2:]
    i = torch.arange(M)[:, None] + (N - M if options.get("causal") == "lower_right" else 0)
    log_p = torch.log_softmax(s, -1).masked_fill(s == -math.inf, 0.0)
    found = {
        "lse": torch.logsumexp(s, -1),
        "entropy": -(p * log_p).sum(-1),
        "distance": (p * (i - torch.arange(N)).abs()).sum(-1),
        "column_sums": p.sum(-2),
    }
    if v is not None:
        found["values"] = p @ (
            v if v.dim() < 3 or v.shape[-3] == q.shape[-3] else v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        )
    return found


def kl(q, k, teacher_q, teacher_k, *, scale=None, teacher_scale=None, softcap=None, teacher_softcap=None, **options):
    s = scores(q, k, scale=scale, softcap=softcap, **options)
    t = scores(teacher_q, teacher_k, scale=teacher_scale, softcap=teacher_softcap, **options)
    gap = (torch.log_softmax(t, -1) - torch.log_softmax(s, -1)).masked_fill((t == -math.inf) | (s == -math.inf), 0.0)
    return (softmax(t) * gap).sum(-1)
