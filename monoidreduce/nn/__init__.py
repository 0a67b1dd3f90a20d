"""Modules over :mod:`monoidreduce.ops`: they hold weights and options; the mathematics is all in the functions.

Where torch has a module of the same name, arguments and state dicts are the same.

>>> import torch
>>> from monoidreduce import nn
>>> nn.MLP(16, 4096)(torch.randn(3, 16)).shape
torch.Size([3, 16])
"""

from .attention import MultiheadAttention, PagedCache
from .heads import (
    LinearArgmax,
    LinearCrossEntropyLoss,
    LinearEntropy,
    LinearJSDLoss,
    LinearKLLoss,
    LinearLogProbs,
    LinearSample,
    LinearSoftCrossEntropyLoss,
    LinearTopK,
    SampledCrossEntropyLoss,
)
from .layers import MLP, ChamferLoss, ContrastiveLoss, GatedMLP, GraphAttention, MaxSim, SinkhornLoss

__all__ = [
    "MLP",
    "ChamferLoss",
    "ContrastiveLoss",
    "GatedMLP",
    "GraphAttention",
    "LinearArgmax",
    "LinearCrossEntropyLoss",
    "LinearEntropy",
    "LinearJSDLoss",
    "LinearKLLoss",
    "LinearLogProbs",
    "LinearSample",
    "LinearSoftCrossEntropyLoss",
    "LinearTopK",
    "MaxSim",
    "MultiheadAttention",
    "PagedCache",
    "SampledCrossEntropyLoss",
    "SinkhornLoss",
]
