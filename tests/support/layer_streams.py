"""Every ready-made layer with rows and columns for a stream, by name."""

import torch

M, N, D = 40, 70, 4
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR)


X, Y, OTHER = normal(M, D), normal(N, D), normal(M, D)
TARGET = torch.randint(0, N, (M,), generator=GENERATOR)
TARGET[3] = -100
TWO = dict(x=X, weight=Y, teacher_x=OTHER, teacher_weight=normal(N, D))

LAYERS = {
    "knn": dict(x=X, y=Y, k=3, exclude_self=True),
    "kmeans_assign": dict(x=X, centroids=Y),
    "maxsim": dict(q=X, d=Y),
    "lightning_indexer": dict(q=normal(M, 2, Y.shape[-1]), k=Y, weight=normal(M, 2).abs(), best=3),
    "kernel_sum": dict(x=X, y=Y, b=normal(N, 2)),
    "kernel_sum of numbers": dict(x=X, y=Y, b=normal(N)),
    "kernel_logsumexp": dict(x=X, y=Y, log_weights=normal(N)),
    "softmin": dict(x=X, y=Y, h=normal(N), eps=0.5),
    "linear_sample": dict(x=X, weight=Y, seed=3, bias=normal(N)),
    "linear_topk": dict(x=X, weight=Y, k=4, log_probs=True),
    "linear_argmax": dict(x=X, weight=Y),
    "linear_logprobs": dict(x=X, weight=Y, target=TARGET, return_entropy=True, top_k=2),
    "linear_logprobs of ids": dict(x=X, weight=Y, ids=TARGET[:, None].clamp(min=0).repeat(1, 2), return_lse=True),
    "linear_entropy": dict(x=X, weight=Y),
    "linear_cross_entropy": dict(x=X, weight=Y, target=TARGET, return_accuracy=True, token_weights=OTHER[:, 0] ** 2),
    "linear_cross_entropy of classes": dict(x=X, weight=Y, target=TARGET, class_weights=Y[:, 0] ** 2, z_loss=0.1),
    "linear_cross_entropy smoothed": dict(x=X, weight=Y, target=TARGET, label_smoothing=0.1),
    "cross_entropy_given": dict(x=X, weight=Y, probs=torch.rand(M, N, generator=GENERATOR)),
    "linear_cross_entropy_soft": TWO,
    "linear_kl": TWO | dict(reduction="none"),
    "linear_jsd": TWO,
    "cross_entropy_distributions": dict(p=X, c=Y, q=OTHER, t=normal(N, D)),
    "mlp": dict(x=X, p=Y, q=normal(N, 3), bias=normal(N), out_bias=normal(3), dropout_p=0.2, seed=5),
    "gated_mlp": dict(x=X, gate=Y, up=normal(N, D), down=normal(N, 3)),
    "max_pool_product": dict(x=X, w=Y, return_indices=True),
    "attention": dict(q=X, k=Y, v=normal(N, 3), causal="lower_right"),
    "attention biased": dict(q=X, k=Y, v=normal(N, 3), bias=normal(M, N)),
    "attention_decode": dict(
        q=normal(1, 2, 1, D), k_cache=normal(1, 1, N, D), v_cache=normal(1, 1, N, D), lengths=torch.tensor([50])
    ),
    "contrastive_loss": dict(x=X, y=OTHER, temperature=0.5),
    "contrastive_loss one way": dict(x=X, y=Y, kind="infonce", hard_negatives=0.5),
    "contrastive_loss siglip": dict(x=X, y=OTHER, kind="siglip", bias=-1.0),
    "chamfer": dict(x=X, y=Y),
    "sinkhorn": dict(x=X, y=Y, eps=0.5, iterations=3),
    "sinkhorn_step": dict(x=X, y=Y, g=normal(N), log_a=normal(M), log_b=normal(N), eps=0.5),
    "attention_statistics": dict(
        q=X, k=Y, v=normal(N, 3), causal=True, window=20, statistics=("lse", "entropy", "distance")
    ),
    "attention_kl": dict(q=X, k=Y, teacher_q=OTHER, teacher_k=normal(N, D), softcap=3.0, window=30),
}
WITH_ROWS_IN_MEMORY = {"maxsim", "cross_entropy_given", "attention biased", "attention_decode"}


def columns_of(layer, args):
    known = getattr(layer.stream, "__self__", None)
    return [n for n in (known.cols if known is not None else ["y"]) if n in args]


def rows_of(layer, args):
    known = getattr(layer.stream, "__self__", None)
    return [n for n in (known.rows if known is not None else ["x"]) if n in args]


def flatten(result):
    if result is None or isinstance(result, bool | int | float):
        return []
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flatten(part)]


def give(columns):
    """One source by itself, several by name."""
    return tuple(columns.values()) if len(columns) == 1 else (columns,)
