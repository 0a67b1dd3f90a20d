"""The vocabulary heads: each with its options, the plain torch that equals it, and a way to draw inputs.

A *sample* is one value for every factor: sizes, layout, and the options that the function has. Options that are tensors
(a bias, weights) are drawn where the sample says True; a number given as ``"tensor"`` becomes a 0-dim tensor, which has
a gradient. The plain forms build the logits on purpose; where torch has the loss itself, that is what is called.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce import ops
from tests.support.pairwise_options import pairwise

Inputs = dict[str, Any]


# Plain torch ---------------------------------------------------------------------------------------------------------


def plain_logits(x, weight, bias=None, softcap=None, temperature=1.0):
    s = F.linear(x, weight, bias)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    return s / temperature


def plain_log_probs(*head):
    return torch.log_softmax(plain_logits(*head), -1)


def plain_reduced(loss, reduction, weights=None):
    if weights is not None:
        loss = loss * weights.to(loss.dtype)
    total = loss.numel() if weights is None else weights.to(loss.dtype).sum()
    return loss.sum() / total if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def plain_cross_entropy(
    x, weight, target, bias=None, class_weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None,
    temperature=1.0, token_weights=None, reduction="mean", return_lse=False, return_accuracy=False, shift=0,
):  # fmt: skip
    given = target.is_floating_point()
    if shift:
        x, target = x[..., :-shift, :], target[..., shift:, :] if given else target[..., shift:]
        token_weights = None if token_weights is None else token_weights[..., shift:]
    lead = x.shape[:-1]
    options = {"weight": class_weights, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    s = plain_logits(x.reshape(-1, x.shape[-1]), weight, bias, softcap, temperature)
    target = target.reshape(-1, len(weight)) if given else target.reshape(-1)
    lse = torch.logsumexp(s, -1)
    counted = torch.ones_like(lse) if given else (target != ignore_index).to(lse.dtype)
    if token_weights is None and not z_loss:
        loss = F.cross_entropy(s, target, reduction=reduction, **options)
    else:
        share = counted if class_weights is None or given else class_weights[target.clamp(min=0)] * counted
        t = torch.ones_like(lse) if token_weights is None else token_weights.reshape(-1).to(lse.dtype)
        rows = F.cross_entropy(s, target, reduction="none", **options)
        parts = [(rows * t, share * t), (z_loss * lse.square() * counted * t, counted * t)]
        parts = [v if reduction == "none" else v.sum() / (c.sum() if reduction == "mean" else 1) for v, c in parts]
        loss = parts[0] + parts[1] if z_loss else parts[0]
    right = (s.argmax(-1) == (target.argmax(-1) if given else target)).to(lse.dtype) * counted
    right = right if reduction == "none" else right.sum() / (counted.sum() if reduction == "mean" else 1)
    if reduction == "none":
        loss, right = loss.reshape(lead), right.reshape(lead)
    extra = [lse.reshape(lead)] * return_lse + [right] * return_accuracy
    return (loss, *extra) if extra else loss


def plain_logprobs(
    x, weight, target, bias=None, softcap=None, temperature=1.0, ignore_index=-100, ids=None, mask=None,
    return_entropy=False, return_argmax=False, return_lse=False, top_k=0,
):  # fmt: skip
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    s = plain_logits(x, weight, bias, softcap, temperature)
    log_p = torch.log_softmax(s, -1)

    def gather(labels):
        skip = labels == ignore_index
        return log_p.gather(-1, torch.where(skip, 0, labels)).masked_fill(skip, 0.0)

    found = [gather(target.unsqueeze(-1)).squeeze(-1)]
    if return_entropy:
        found.append(-(log_p.exp() * log_p).sum(-1))
    if return_argmax:
        found.append(log_p.argmax(-1))
    if top_k:
        found += log_p.topk(top_k)
    if ids is not None:
        found.append(gather(ids))
    if return_lse:
        found.append(torch.logsumexp(s, -1))
    if mask is not None:
        seen = lambda y: mask.reshape((*mask.shape, *(1,) * (y.dim() - mask.dim())))
        found = [torch.where(seen(y), y, 0 if y.is_floating_point() else -1) for y in found]
    return found if len(found) > 1 else found[0]


def plain_entropy(x, weight, bias=None, softcap=None, temperature=1.0):
    log_p = plain_log_probs(x, weight, bias, softcap, temperature)
    return -(log_p.exp() * log_p).sum(-1)


def plain_divergence(kind: str) -> Callable:
    def plain(
        x, weight, teacher_x, teacher_weight, bias=None, teacher_bias=None, softcap=None, teacher_softcap=None,
        temperature=1.0, direction="forward", token_weights=None, reduction="mean", beta=0.5,
    ):  # fmt: skip
        log_q = plain_log_probs(x, weight, bias, softcap, temperature)
        log_p = plain_log_probs(teacher_x, teacher_weight, teacher_bias, teacher_softcap, temperature)
        log_q, log_p = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
        kl = lambda to, of: F.kl_div(to, of, reduction="none", log_target=True).sum(-1)
        if kind == "soft":
            loss = -(log_p.exp() * log_q).sum(-1)
        elif kind == "kl" or beta in (0, 1):
            loss = kl(log_p, log_q) if kind == "jsd" and beta == 1 else kl(log_q, log_p)
        else:
            m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
            loss = beta * kl(m, log_p) + (1 - beta) * kl(m, log_q)
        return plain_reduced(loss, reduction, token_weights)

    return plain


def plain_sample(x, weight, seed, bias=None, softcap=None, temperature=1.0):
    """The draws are ours (their frequencies have a test of their own); the log-probabilities are torch's."""
    held = [a.detach() if isinstance(a, Tensor) else a for a in (x, weight, bias, softcap, temperature)]
    index = ops.linear_sample(*held[:2], seed, bias=held[2], softcap=held[3], temperature=held[4]).index
    log_p = plain_log_probs(x, weight, bias, softcap, temperature)
    return index, log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def plain_topk(x, weight, k, bias=None, softcap=None, temperature=1.0, largest=True, log_probs=False):
    s = plain_logits(x, weight, bias, softcap, temperature)
    return (torch.log_softmax(s, -1) if log_probs else s).topk(k, largest=largest)


def plain_argmax(x, weight, bias=None):
    return plain_logits(x, weight, bias).argmax(-1)


# The table -----------------------------------------------------------------------------------------------------------

SIZES = {
    "rows": ((33,), (3, 5), (2, 1, 7), (1,), ()),
    "classes": (59, 111, 2, 1, 257),
    "features": (16, 7, 1),
    "layout": ("plain", "transposed", "strided"),
}
HEAD = {"bias": (False, True), "softcap": (None, 5.0, "tensor"), "temperature": (1.0, 0.7, "tensor")}
LOSS = {"token_weights": (False, True), "reduction": ("mean", "sum", "none")}
TWO = {**SIZES, **HEAD, **LOSS, "teacher_bias": (False, True), "teacher_softcap": (None, 3.0)}
DIRECTION = {"direction": ("forward", "reverse")}


def _cross_entropy_allows(o: dict[str, Any]) -> bool:
    given = o["target"] == "probabilities"
    long = o["rows"] and o["rows"][-1] > 2
    some = o["classes"] > 2 or o["ignore"] != 0  # a mean of no rows at all has tests of its own
    return not (given and o["ignore"] is not None) and (long or not o["shift"]) and some


@dataclass(frozen=True)
class Function:
    """One function, the same in plain torch, and the values of its options."""

    name: str
    plain: Callable[..., Any]
    factors: dict[str, tuple]
    allowed: Callable[[dict[str, Any]], bool] = lambda _: True

    @property
    def ours(self) -> Callable[..., Any]:
        return getattr(ops, self.name)

    def samples(self) -> list[dict[str, Any]]:
        return pairwise(self.factors, self.allowed)

    def default(self, **changes: Any) -> dict[str, Any]:
        """The sample of every factor's first value."""
        return {name: values[0] for name, values in self.factors.items()} | changes


FUNCTIONS = {
    f.name: f
    for f in (
        Function(
            "linear_cross_entropy",
            plain_cross_entropy,
            {
                **SIZES, **HEAD, **LOSS, "target": ("classes", "probabilities"), "ignore": (None, -100, 0),
                "class_weights": (False, True), "label_smoothing": (0.0, 0.1, 1.0), "z_loss": (0.0, 1e-2),
                "return_lse": (False, True), "return_accuracy": (False, True), "shift": (0, 1, 2),
            },
            _cross_entropy_allows,
        ),
        Function(
            "linear_logprobs",
            plain_logprobs,
            {
                **SIZES, **HEAD, "temperature": (1.0, 0.7, "tensor", "rows"), "ignore": (None, -100),
                "ids": (0, 1, 5), "mask": (False, True), "return_entropy": (False, True),
                "return_argmax": (False, True), "return_lse": (False, True), "top_k": (0, 1, 4),
            },
            lambda o: o["top_k"] <= o["classes"],
        ),
        Function("linear_cross_entropy_soft", plain_divergence("soft"), TWO | DIRECTION),
        Function("linear_kl", plain_divergence("kl"), TWO | DIRECTION),
        Function("linear_jsd", plain_divergence("jsd"), TWO | {"beta": (0.5, 0.1, 0, 1)}),
        Function("linear_entropy", plain_entropy, SIZES | HEAD),
        Function("linear_sample", plain_sample, SIZES | HEAD | {"seed": (7, 8, 2**40)}),
        Function(
            "linear_topk",
            plain_topk,
            SIZES | HEAD | {"k": (1, 2, 50), "largest": (True, False), "log_probs": (False, True)},
            lambda o: o["k"] <= o["classes"],
        ),
        Function("linear_argmax", plain_argmax, SIZES | {"bias": (False, True)}),
    )
}  # fmt: skip

# for each function, one sample with most of its options at once
ALL_OPTIONS = {
    "linear_cross_entropy": {
        "bias": True, "softcap": "tensor", "temperature": "tensor", "class_weights": True, "label_smoothing": 0.1,
        "z_loss": 0.01, "token_weights": True, "return_lse": True, "shift": 1,
    },
    "linear_logprobs": {
        "bias": True, "softcap": 5.0, "temperature": "tensor", "ignore": -100, "ids": 5, "mask": True,
        "return_entropy": True, "return_lse": True, "top_k": 4,
    },
    "linear_cross_entropy_soft": {"bias": True, "teacher_bias": True, "temperature": "tensor", "token_weights": True},
    "linear_kl": {"bias": True, "softcap": "tensor", "teacher_softcap": 3.0, "reduction": "none"},
    "linear_jsd": {"teacher_bias": True, "temperature": "tensor", "beta": 0.1, "reduction": "none"},
    "linear_entropy": {"bias": True, "softcap": "tensor", "temperature": "tensor"},
    "linear_sample": {"bias": True, "softcap": "tensor", "temperature": "tensor"},
    "linear_topk": {"bias": True, "softcap": "tensor", "k": 2, "log_probs": True},
    "linear_argmax": {"bias": True},
}  # fmt: skip
RICH = {name: (name, FUNCTIONS[name].default(**options)) for name, options in ALL_OPTIONS.items()}
RICH["probabilities"] = ("linear_cross_entropy", {**RICH["linear_cross_entropy"][1], "target": "probabilities"})


# Inputs --------------------------------------------------------------------------------------------------------------


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers: as they are; with the last axis first in memory; or every other element from the second on."""
    if layout == "transposed" and t.dim() > 1:
        return t.mT.contiguous().mT
    if layout == "strided":
        wide = t.new_full((2 * t.numel() + 1,), 7.0)[1:].as_strided(t.shape, [2 * k for k in t.contiguous().stride()])
        return wide.copy_(t)
    return t


def draw(f: Function, sample: dict[str, Any], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Inputs:
    """Every argument of a call: tensors drawn in float64 and rounded, numbers as the sample has them."""
    gen = torch.Generator().manual_seed(seed)
    normal = lambda *shape: (torch.randn(shape, generator=gen, dtype=torch.float64) * scale).to(dtype)
    positive = lambda *shape: (torch.rand(shape, generator=gen, dtype=torch.float64) + 0.3).to(dtype)
    asked = inspect.signature(f.ours).parameters
    rows, classes, width = sample["rows"], sample["classes"], sample["features"]
    found: Inputs = {"x": laid_out(normal(*rows, width), sample["layout"])}
    found["weight"] = laid_out(normal(classes, width), sample["layout"])
    if "target" in asked:
        target = torch.randint(classes, rows, generator=gen)
        place = torch.arange(target.numel()).view(rows)
        ignored = sample.get("ignore")
        found["target"] = target if ignored is None else torch.where(place % 3 == 1, ignored, target)
        if sample.get("target") == "probabilities":
            found["target"] = torch.softmax(2 * normal(*rows, classes).double(), -1).to(dtype)
        if ignored is not None:
            found["ignore_index"] = ignored
    if sample.get("ids"):
        ids = torch.randint(classes, (*rows, sample["ids"]), generator=gen)
        found["ids"] = ids if ignored is None else torch.where(place.unsqueeze(-1) % 2 == 1, ignored, ids)
    if sample.get("mask"):
        found["mask"] = torch.rand(rows, generator=gen) < 0.7
    if "teacher_x" in asked:
        found |= {"teacher_x": normal(*rows, 5), "teacher_weight": normal(classes, 5)}
    shapes = {"bias": (classes,), "teacher_bias": (classes,), "class_weights": (classes,), "token_weights": rows}
    for name, shape in shapes.items():
        if sample.get(name):
            found[name] = normal(*shape) if name.endswith("bias") else positive(*shape)
    for name, value in sample.items():
        if name in asked and name not in (*shapes, "ids", "mask") and name not in found:
            numbers = {"tensor": (), "rows": rows}
            found[name] = (positive(*numbers[value]) + 1.5).to(dtype) if value in numbers else value
    return found


def split(inputs: Inputs) -> tuple[list[str], list[Any]]:
    """Names and values, the tensors (whose gradients are taken) and all else alike."""
    return list(inputs), list(inputs.values())


def by_name(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A function of keyword arguments as one of positions; what was not asked is dropped from its result."""

    def call(*args: Any) -> Any:
        result = function(**dict(zip(names, args, strict=True)))
        return tuple(r for r in result if r is not None) if isinstance(result, tuple | list) else result

    return call
