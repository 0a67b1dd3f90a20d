"""What a layer is measured beside: one row of PEERS each. What is not installed is named, with how to get it.

A peer is asked for a function of the layer's own arguments: q [M, D], k and v [N, D] for attention; x [M, D], w [N, D]
and a label per row for the cross-entropy; x, y and b for the kernel sum. Other layers have their dense form, and that
compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from .subject import Subject

Call = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """``layers``: the keys it has a function for, or None for any layer; ``make`` gives the function."""

    key: str  # what one types
    name: str
    layers: Sequence[str] | None
    make: Callable[[Subject], Call]
    package: str = ""  # what must be installed,
    install: str = ""  # and the name it is installed by
    gpu: bool = False  # whether it runs on GPUs only
    missing: Callable[[Subject, torch.device], str] = lambda layer, device: ""

    def fits(self, layer: Subject) -> bool:
        return layer.dense is not None if self.layers is None else layer.key in self.layers

    def reason(self, layer: Subject, device: torch.device) -> str:
        """Why it cannot be measured here; "" if it can."""
        if self.gpu and device.type != "cuda":
            return "runs on GPUs only"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.install or self.package}"
        return self.missing(layer, device)


def _heads(call: Call) -> Call:
    """A function of [batch, heads, length, features] on matrices."""
    return lambda q, k, v: call(q[None, None], k[None, None], v[None, None], scale=1.0)[0, 0]


def _no_compiler(layer: Subject, device: torch.device) -> str:
    if not layer.by_hand:
        return f"needs a dense form written by hand: put {layer.name}_dense into the file"
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "needs a C++ compiler"
    return ""


def _liger(layer: Subject) -> Call:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    return lambda x, w, target: module.LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]


def _torch_loss(layer: Subject) -> Call:
    options = torch.nn.LinearCrossEntropyOptions()  # chunked: without it logits are built
    return lambda x, w, target: F.linear_cross_entropy(x, w, target, options=options)


def _keops(layer: Subject) -> Call:
    lazy = importlib.import_module("pykeops.torch").LazyTensor

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (lazy(q[:, None]) * lazy(k[None])).sum(-1)
        return scores.sumsoftmaxweight(lazy(v[None]), axis=1)

    def kernel_sum(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return (-((lazy(x[:, None]) - lazy(y[None])) ** 2).sum(-1) / 2).exp() @ b

    return {"attention": attention, "kernel-sum": kernel_sum}[layer.key]


PEERS = (
    Peer("naive", "naive torch", None, lambda layer: layer.dense or layer.call),
    Peer(
        "compile", "torch.compile", None, lambda layer: torch.compile(layer.dense, dynamic=False),
        missing=_no_compiler,
    ),
    Peer("sdpa", "SDPA", ("attention",), lambda layer: _heads(F.scaled_dot_product_attention)),
    Peer(
        "flex", "FlexAttention", ("attention",), lambda layer: _heads(torch.compile(flex_attention, dynamic=False)),
        missing=_no_compiler,
    ),
    Peer(
        "torch-ce", "F.linear_cross_entropy", ("cross-entropy",), _torch_loss,
        missing=lambda layer, device: "" if hasattr(F, "linear_cross_entropy") else "this torch does not have it yet",
    ),
    Peer("liger", "Liger", ("cross-entropy",), _liger, "liger_kernel", "liger-kernel", gpu=True),
    Peer(
        "cce", "Cut Cross-Entropy", ("cross-entropy",),
        lambda layer: importlib.import_module("cut_cross_entropy").linear_cross_entropy,
        "cut_cross_entropy", "cut-cross-entropy", gpu=True,
    ),
    Peer("keops", "KeOps", ("attention", "kernel-sum"), _keops, "pykeops"),
)  # fmt: skip
