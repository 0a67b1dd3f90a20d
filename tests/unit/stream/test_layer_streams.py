"""Every ready-made layer over columns in chunks, and over rows and columns in files, is the layer itself."""

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import block_runs, ops
from monoidreduce import stream as stream_module

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
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flatten(part)]


def give(columns):
    """One source by itself, several by name."""
    return tuple(columns.values()) if len(columns) == 1 else (columns,)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LAYERS)
def test_a_streamed_layer_is_the_layer(name, tmp_path, monkeypatch):
    layer, args = getattr(ops, name.split()[0]), LAYERS[name]
    expected = flatten(layer(**args))
    cols = columns_of(layer, args)
    stays = {n: v for n, v in args.items() if n not in cols}
    monkeypatch.setattr(stream_module, "columns_per_chunk", lambda arrays, most: 23)
    found = [layer.stream(**stays).over(*give({n: args[n] for n in cols}))]
    if name not in WITH_ROWS_IN_MEMORY:
        for n, value in args.items():
            if isinstance(value, torch.Tensor):
                numpy.save(tmp_path / f"{n}.npy", value.numpy())
        monkeypatch.setattr(stream_module, "fits_in_memory", lambda files: not list(files))
        few = lambda run, limit: 0 if run.rows.total is None else 17
        monkeypatch.setattr(block_runs.BlockRun, "_rows_per_block", few)
        files = {n: tmp_path / f"{n}.npy" if n in rows_of(layer, args) else v for n, v in stays.items()}
        found.append(layer.stream(**files).over(*give({n: str(tmp_path / f"{n}.npy") for n in cols})))
    for got in found:
        for a, b in zip(flatten(got), expected, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_every_layer_has_a_stream():
    tested = {name.split()[0] for name in LAYERS}
    public = {n for n in ops.__all__ if not n[0].isupper()} - {"cross_entropy", "entropy", "sample", "document_ids"}
    lists = {
        "attention_paged",
        "graph_attention",
        "rerank",
        "sampled_cross_entropy",
        "select_blocks",
        "selected_attention",
    }
    assert public == tested | lists  # which say at the call what columns there are
    for name in lists:
        with pytest.raises(mr.StreamError, match=f"{name} does not fold"):
            getattr(ops, name).stream(X)
    with pytest.raises(mr.StreamError, match="given lists of columns"):
        ops.attention.stream(X, cols=mr.jagged(torch.tensor([0, 1])))
    with pytest.raises(mr.StreamError, match="document_ids does not fold"):
        ops.document_ids.stream(torch.tensor([1]))


def test_a_streamed_layer_has_gradients_takes_updates_and_merges():
    x = X.clone().requires_grad_()
    loss = ops.linear_cross_entropy.stream(x, TARGET).over(mr.chunks(Y, size=23))
    loss.backward()
    again = X.clone().requires_grad_()
    ops.linear_cross_entropy(again, Y, TARGET).backward()
    torch.testing.assert_close(x.grad, again.grad)
    one, two = ops.knn.stream(X, k=3), ops.knn.stream(X, k=3).starting(30)
    one.update(Y[:30])
    two.update(y=Y[30:].numpy())
    assert torch.equal(two.merge(one).result().indices, ops.knn(X, Y, 3).indices)


def test_dropout_is_drawn_once_for_all_chunks():
    torch.manual_seed(3)
    fold = ops.mlp.stream(X, dropout_p=0.5)
    for part in Y.split(20):
        fold.update(part, part)
    assert torch.equal(fold.result(), fold.result())
    torch.testing.assert_close(fold.result(), ops.mlp(X, Y, Y, dropout_p=0.5, seed=fold._memo["seed"]))


def test_wrong_calls_of_a_layers_stream():
    with pytest.raises(mr.ArgumentError, match="columns come later"):
        ops.knn.stream(X, y=Y, k=3)
    with pytest.raises(mr.ArgumentError, match="was not given k"):
        ops.knn.stream(X)
    with pytest.raises(mr.ArgumentError, match="no argument 'kk'"):
        ops.knn.stream(X, kk=3)
    with pytest.raises(mr.ShapeError, match="features"):
        ops.knn.stream(X, k=3).over(Y[:, :2])
    with pytest.raises(mr.TopKError):
        ops.knn.stream(X, k=300).over(Y)
    with pytest.raises(mr.LabelError, match="label 69"):  # known before any work: the number of classes is
        ops.linear_cross_entropy.stream(X, torch.full((M,), 69)).over(Y[:50])
    with pytest.raises(mr.LabelError, match="label 69"):
        ops.linear_cross_entropy.stream(X, torch.full((M,), 69)).over(iter(Y[:50].split(20)))
    with pytest.raises(mr.StreamError, match="several times"):
        ops.chamfer.stream(X).over(iter(Y.split(20)))
    with pytest.raises(mr.StreamError, match="no gradients"):
        ops.chamfer.stream(X.clone().requires_grad_()).over(Y)
