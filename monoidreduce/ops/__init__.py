"""The ready-made layers: each a few lines in the pair language, and the checks of its input.

May import the errors, the algebra, the program and the decorator; never an engine by name, which the plan chooses.
"""

from .attention import AttentionOutput, attention, attention_decode, document_ids
from .contrastive import contrastive_loss
from .cross_entropy import cross_entropy
from .distributions import cross_entropy_distributions, cross_entropy_given, entropy
from .mlp import gated_mlp, mlp
from .pooling import MaxPool, max_pool_product
from .sampling import Sample, sample

__all__ = [
    "AttentionOutput",
    "MaxPool",
    "Sample",
    "attention",
    "attention_decode",
    "contrastive_loss",
    "cross_entropy",
    "cross_entropy_distributions",
    "cross_entropy_given",
    "document_ids",
    "entropy",
    "gated_mlp",
    "max_pool_product",
    "mlp",
    "sample",
]
