"""The libraries that ``bench`` compares a layer with, one row of PEERS each.

A peer gives a function of the layer's own arguments: q [M, D], k and v [N, D] for attention; x [M, D], w [N, D] and a
label per row for the cross-entropy; x, y and b for the kernel sum. Every other layer is compared with its dense form,
as written and compiled. A peer that is not installed is reported, with the command that installs it.
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

from .workload import Workload

Call = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """Another implementation: ``make(layer)`` returns the function to measure."""

    key: str  # its name on the command line
    name: str
    layers: Sequence[str] | None  # keys of the layers it implements; None for any layer with a dense form
    make: Callable[[Workload], Call]
    package: str = ""  # the module that must be importable
    install: str = ""  # what pip calls it, if that differs
    gpu: bool = False  # True if it runs on GPUs only
    missing: Callable[[Workload, torch.device], str] = lambda layer, device: ""

    def fits(self, layer: Workload) -> bool:
        return layer.dense is not None if self.layers is None else layer.key in self.layers

    def reason(self, layer: Workload, device: torch.device) -> str:
        """Why it cannot be measured here; "" if it can."""
        if self.gpu and device.type != "cuda":
            return "runs on GPUs only"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.install or self.package}"
        return self.missing(layer, device)


def find_cpp_compiler() -> str | None:
    """The path of a C++ compiler, which torch.compile needs on a CPU."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "cl"))), None)


def _reason_not_compiled(layer: Workload, device: torch.device) -> str:
    if not layer.dense_is_handwritten:
        return f"needs a dense form written by hand: put {layer.name}_dense into the file"
    return "needs a C++ compiler" if device.type == "cpu" and find_cpp_compiler() is None else ""


def _add_head_axes(call: Call) -> Call:
    """A function of [batch, heads, length, features] as a function of matrices."""
    return lambda q, k, v: call(q[None, None], k[None, None], v[None, None], scale=1.0)[0, 0]


def _make_liger(layer: Workload) -> Call:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    return lambda x, w, target: module.LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]


def _make_torch_loss(layer: Workload) -> Call:
    options = torch.nn.LinearCrossEntropyOptions()  # chunked; without options it builds the logits
    return lambda x, w, target: F.linear_cross_entropy(x, w, target, options=options)


def _make_keops(layer: Workload) -> Call:
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
        missing=_reason_not_compiled,
    ),
    Peer("sdpa", "SDPA", ("attention",), lambda layer: _add_head_axes(F.scaled_dot_product_attention)),
    Peer(
        "flex", "FlexAttention", ("attention",),
        lambda layer: _add_head_axes(torch.compile(flex_attention, dynamic=False)), missing=_reason_not_compiled,
    ),
    Peer(
        "torch-ce", "F.linear_cross_entropy", ("cross-entropy",), _make_torch_loss,
        missing=lambda layer, device: "" if hasattr(F, "linear_cross_entropy") else "this torch does not have it yet",
    ),
    Peer("liger", "Liger", ("cross-entropy",), _make_liger, "liger_kernel", "liger-kernel", gpu=True),
    Peer(
        "cce", "Cut Cross-Entropy", ("cross-entropy",),
        lambda layer: importlib.import_module("cut_cross_entropy").linear_cross_entropy,
        "cut_cross_entropy", "cut-cross-entropy", gpu=True,
    ),
    Peer("keops", "KeOps", ("attention", "kernel-sum"), _make_keops, "pykeops"),
)  # fmt: skip
