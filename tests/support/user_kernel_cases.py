"""Tile functions written in Triton and in torch, side by side: what the papers list, for both doors of MonoidReduce."""

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

import monoidreduce as mr

EXACT = tl.constexpr("ieee")


def _tiles(parts):
    return zip(*(part.split(7) for part in parts), strict=True)


# Attention: (z, v), the logarithm of a weight and a mean


@triton.jit
def attention_fold(q, k, v, inside):
    s = tl.where(inside, tl.dot(q, tl.trans(k), input_precision=EXACT), float("-inf"))
    top = tl.max(s, 1)
    weight = tl.exp(s - top[:, None])
    total = tl.sum(weight, 1)
    return top + tl.log(total), tl.dot(weight.to(v.dtype), v, input_precision=EXACT) / total[:, None]


@triton.jit
def attention_join(xz, xv, yz, yv):
    top = tl.maximum(xz, yz)
    safe = tl.where(top == float("-inf"), 0.0, top)
    z = safe + tl.log(tl.exp(xz - safe) + tl.exp(yz - safe))
    return z, xv * tl.exp(xz - z)[:, None] + yv * tl.exp(yz - z)[:, None]


@triton.jit
def attention_grad(q, k, v, pz, pv, gz, gv, inside):
    s = tl.dot(q, tl.trans(k), input_precision=EXACT)
    weight = tl.where(inside, tl.exp(s - pz[:, None]), 0.0)
    along = tl.dot(gv.to(v.dtype), tl.trans(v), input_precision=EXACT)
    gs = (weight * (gz[:, None] + along - tl.sum(gv * pv, 1)[:, None])).to(q.dtype)
    return (
        tl.dot(gs, k, input_precision=EXACT),
        tl.dot(tl.trans(gs), q, input_precision=EXACT),
        tl.dot(tl.trans(weight.to(v.dtype)), gv.to(v.dtype), input_precision=EXACT),
    )


def attention_init(a, b):
    (q,), (_, v) = a, b
    z = torch.full((), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return z.expand(len(q)), v.new_zeros(len(q), v.shape[1])


def attention_fold_torch(a, b):
    (q,), (k, v) = a, b
    s = q @ k.T
    z = s.logsumexp(1)
    return z, torch.exp(s - z[:, None]) @ v


def attention_join_torch(x, y):
    (xz, xv), (yz, yv) = x, y
    z = torch.logaddexp(xz, yz)
    return z, torch.exp(xz - z)[:, None] * xv + torch.exp(yz - z)[:, None] * yv


def attention_grad_torch(a, b, p, gp):
    (q,), (k, v), (pz, pv), (gz, gv) = a, b, p, gp
    weight = torch.exp(q @ k.T - pz[:, None])
    gs = (weight * (gz[:, None] + gv @ v.T - (gv * pv).sum(1, keepdim=True))).to(q.dtype)
    return (gs @ k,), (gs.T @ q, weight.to(v.dtype).T @ gv)


# A loss: logsumexp and the label's logit; the label is an integer, the bias a number per column


@triton.jit
def loss_logits(x, w, bias):
    return tl.dot(x, tl.trans(w), input_precision=EXACT) + bias[None, :]


@triton.jit
def loss_fold(x, label, w, bias, column, inside):
    s = tl.where(inside, loss_logits(x, w, bias), float("-inf"))
    top = tl.max(s, 1)
    hit = inside & (label[:, None] == column[None, :])
    return top + tl.log(tl.sum(tl.exp(s - top[:, None]), 1)), tl.sum(tl.where(hit, s, 0.0), 1)


@triton.jit
def loss_join(xz, xs, yz, ys):
    top = tl.maximum(xz, yz)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log(tl.exp(xz - safe) + tl.exp(yz - safe)), xs + ys


@triton.jit
def loss_grad(x, label, w, bias, column, pz, ps, gz, gs, inside):
    weight = tl.exp(loss_logits(x, w, bias) - pz[:, None]) * gz[:, None]
    hit = tl.where(label[:, None] == column[None, :], gs[:, None], 0.0)
    whole = tl.where(inside, weight + hit, 0.0)
    g = whole.to(x.dtype)
    return tl.dot(g, w, input_precision=EXACT), tl.dot(tl.trans(g), x, input_precision=EXACT), tl.sum(whole, 0)


def loss_init(a, b):
    x = a[0]
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.new_full((len(x),), -torch.inf, dtype=kind), x.new_zeros(len(x), dtype=kind)


def _loss_logits_torch(a, b):
    return a[0] @ b[0].T + b[1]


def loss_fold_torch(a, b):
    s = _loss_logits_torch(a, b)
    hit = a[1][:, None] == b[2]
    return s.logsumexp(1), torch.where(hit, s, 0.0).sum(1)


def loss_join_torch(x, y):
    return torch.logaddexp(x[0], y[0]), x[1] + y[1]


def loss_grad_torch(a, b, p, gp):
    g = torch.exp(_loss_logits_torch(a, b) - p[0][:, None]) * gp[0][:, None]
    g = (g + torch.where(a[1][:, None] == b[2], gp[1][:, None], 0.0)).to(a[0].dtype)
    return (g @ b[0], None), (g.T @ a[0], g.sum(0), None)


# A perceptron: one product, a sum


@triton.jit
def mlp_fold(x, p, q, inside):
    s = tl.where(inside, tl.dot(x, tl.trans(p), input_precision=EXACT), 0.0)
    return tl.dot(tl.maximum(s, 0.0).to(q.dtype), q, input_precision=EXACT)


@triton.jit
def mlp_join(x, y):
    return x + y


@triton.jit
def mlp_grad(x, p, q, y, gy, inside):
    s = tl.where(inside, tl.dot(x, tl.trans(p), input_precision=EXACT), 0.0)
    along = tl.dot(gy.to(q.dtype), tl.trans(q), input_precision=EXACT)
    gs = tl.where(s > 0, along, 0.0).to(x.dtype)
    hidden = tl.maximum(s, 0.0).to(q.dtype)
    return (
        tl.dot(gs, p, input_precision=EXACT),
        tl.dot(tl.trans(gs), x, input_precision=EXACT),
        tl.dot(tl.trans(hidden), gy.to(q.dtype), input_precision=EXACT),
    )


def mlp_init(a, b):
    return (a[0].new_zeros(len(a[0]), b[1].shape[1]),)


def mlp_fold_torch(a, b):
    return (torch.relu(a[0] @ b[0].T) @ b[1],)


def mlp_join_torch(x, y):
    return (x[0] + y[0],)


def mlp_grad_torch(a, b, p, gp):
    s = a[0] @ b[0].T
    gs = torch.where(s > 0, gp[0] @ b[1].T, 0.0)
    return (gs @ b[0],), (gs.T @ a[0], torch.relu(s).T @ gp[0])


def _both(name, avals, bvals, **functions):
    """The layer by its Triton functions and by its torch functions."""
    made = {}
    for ending, cut in (("", {"islice": 32, "jslice": 16}), ("_torch", {"islice": _tiles, "jslice": _tiles})):
        mine = {k: functions[k + ending] for k in ("proj_fold", "proj_fold_bwd", "binary_reduce")}
        made["torch" if ending else "kernels"] = mr.MonoidReduce(
            name, avals=avals, bvals=bvals, init=functions["init"], **cut, **mine
        )
    return SimpleNamespace(**made)


def _layer(name, avals, bvals):
    here = globals()
    found = {"init": here[f"{name}_init"]}
    for role, short in (("proj_fold", "fold"), ("proj_fold_bwd", "grad"), ("binary_reduce", "join")):
        found |= {role: here[f"{name}_{short}"], f"{role}_torch": here[f"{name}_{short}_torch"]}
    return _both(name, avals, bvals, **found)


LAYERS = {"attention": _layer("attention", 1, 2), "loss": _layer("loss", 2, 3), "mlp": _layer("mlp", 1, 2)}


def inputs(name, rows, cols, dtype, generator=None, d=20, e=24):
    """Arguments of a layer: ragged features, nothing a multiple of a tile."""
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / 2
    if name == "loss":
        label = torch.randint(0, max(cols, 1), (rows,), generator=generator)
        return draw(rows, d), label, draw(cols, d), draw(cols), torch.arange(cols)
    return draw(rows, d), draw(cols, d), draw(cols, e)
