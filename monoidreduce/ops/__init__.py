"""The ready-made layers: each a few lines in the pair language, and the checks of its input.

May import the errors, the algebra, the program and the decorator; never an engine by name, which the plan chooses.

>>> import torch
>>> from monoidreduce import ops
>>> ops.attention(torch.randn(5, 16), torch.randn(7, 16), torch.randn(7, 4), window=2).shape
torch.Size([5, 4])
"""

from .attention import AttentionOutput, attention, attention_decode, attention_paged, document_ids
from .attention_statistics import AttentionStatistics, attention_kl, attention_statistics
from .candidates import rerank, sampled_cross_entropy
from .contrastive import contrastive_loss
from .cross_entropy import CrossEntropy, cross_entropy, cross_entropy_given, linear_cross_entropy
from .distributions import cross_entropy_distributions, linear_cross_entropy_soft, linear_jsd, linear_kl
from .kernels import Sinkhorn, kernel_logsumexp, kernel_sum, sinkhorn, sinkhorn_step, softmin
from .logprobs import LogProbs, entropy, linear_entropy, linear_logprobs
from .mlp import MaxPool, gated_mlp, max_pool_product, mlp
from .neighbours import Neighbours, PointIndex, chamfer, kmeans_assign, knn, maxsim
from .sampling import Sample, TopK, linear_argmax, linear_sample, linear_topk, sample
from .selected_attention import graph_attention, lightning_indexer, select_blocks, selected_attention

__all__ = [
    "AttentionOutput",
    "AttentionStatistics",
    "CrossEntropy",
    "LogProbs",
    "MaxPool",
    "Neighbours",
    "PointIndex",
    "Sample",
    "Sinkhorn",
    "TopK",
    "attention",
    "attention_decode",
    "attention_kl",
    "attention_paged",
    "attention_statistics",
    "chamfer",
    "contrastive_loss",
    "cross_entropy",
    "cross_entropy_distributions",
    "cross_entropy_given",
    "document_ids",
    "entropy",
    "gated_mlp",
    "graph_attention",
    "kernel_logsumexp",
    "kernel_sum",
    "kmeans_assign",
    "knn",
    "lightning_indexer",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_cross_entropy_soft",
    "linear_entropy",
    "linear_jsd",
    "linear_kl",
    "linear_logprobs",
    "linear_sample",
    "linear_topk",
    "max_pool_product",
    "maxsim",
    "mlp",
    "rerank",
    "sample",
    "sampled_cross_entropy",
    "select_blocks",
    "selected_attention",
    "sinkhorn",
    "sinkhorn_step",
    "softmin",
]
