"""The catalogue: the monoids of the papers and the usual reductions, one a file.

To a user this is ``monoids``. A class docstring gives the equation of ⊙, the identity and the derivative ``D(c, a)``.

>>> import torch
>>> from monoidreduce import fold, monoids
>>> fold(monoids.Max, monoids.Max(v=torch.tensor([[1.0], [4.0]])), dim=0).v
tensor([4.])
"""

from monoidreduce.algebra.catalogue.and_ import And
from monoidreduce.algebra.catalogue.argmax import ArgMax
from monoidreduce.algebra.catalogue.argmin import ArgMin
from monoidreduce.algebra.catalogue.cat import Cat
from monoidreduce.algebra.catalogue.compose import Compose
from monoidreduce.algebra.catalogue.count import Count
from monoidreduce.algebra.catalogue.log_sum_exp import LogSumExp
from monoidreduce.algebra.catalogue.log_wsum import LogWSum
from monoidreduce.algebra.catalogue.max import Max
from monoidreduce.algebra.catalogue.min import Min
from monoidreduce.algebra.catalogue.mmul import MMul
from monoidreduce.algebra.catalogue.or_ import Or
from monoidreduce.algebra.catalogue.prod import Prod
from monoidreduce.algebra.catalogue.sample import Sample
from monoidreduce.algebra.catalogue.sum import Sum
from monoidreduce.algebra.catalogue.topk import TopK
from monoidreduce.algebra.catalogue.welford import Welford
from monoidreduce.algebra.catalogue.wsum import WSum

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
