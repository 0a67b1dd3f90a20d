"""The catalogue: the monoids of the papers and the usual reductions, one file for each family.

To a user this is ``monoids``. A class docstring gives the equation of ⊙, the identity and the derivative ``D(c, a)``.

>>> import torch
>>> from monoidreduce import fold, monoids
>>> fold(monoids.Max, monoids.Max(v=torch.tensor([[1.0], [4.0]])), dim=0).v
tensor([4.])
"""

from monoidreduce.algebra.catalogue.extrema import And, ArgMax, ArgMin, Max, Min, Or, TopK
from monoidreduce.algebra.catalogue.sequences import Cat, Compose, MMul
from monoidreduce.algebra.catalogue.softmax import LogSumExp, LogWSum, Sample
from monoidreduce.algebra.catalogue.sums import Count, Prod, Sum, Welford, WSum

__all__ = [
    "And",
    "ArgMax",
    "ArgMin",
    "Cat",
    "Compose",
    "Count",
    "LogSumExp",
    "LogWSum",
    "MMul",
    "Max",
    "Min",
    "Or",
    "Prod",
    "Sample",
    "Sum",
    "TopK",
    "WSum",
    "Welford",
]
