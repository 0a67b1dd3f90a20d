"""Modules over :mod:`monoidreduce.ops`: they hold weights and options; the mathematics is all in the functions.

Where torch has a module of the same name, arguments and state dicts are the same.
"""

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
)

__all__ = [
    "LinearArgmax",
    "LinearCrossEntropyLoss",
    "LinearEntropy",
    "LinearJSDLoss",
    "LinearKLLoss",
    "LinearLogProbs",
    "LinearSample",
    "LinearSoftCrossEntropyLoss",
    "LinearTopK",
]
