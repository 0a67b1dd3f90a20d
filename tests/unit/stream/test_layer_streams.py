"""Every ready-made layer over columns in chunks, and over rows and columns in files, is the layer itself."""

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import block_runs, ops
from monoidreduce import stream as stream_module
from monoidreduce.engines.common import subproblem
from tests.support.layer_streams import LAYERS, TARGET, WITH_ROWS_IN_MEMORY, M, X, Y, columns_of, flatten, give, rows_of


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


def test_a_gradient_of_several_passes_reads_chunks_too():
    x, weight = X.clone().requires_grad_(), Y.clone().requires_grad_()
    streamed = ops.linear_topk.stream(x, k=4, log_probs=True).over(mr.chunks(weight, size=23))
    whole = ops.linear_topk(x, weight, 4, log_probs=True)
    given = torch.randn_like(whole.values)
    for a, b in zip(*(torch.autograd.grad(r.values, x, given) for r in (streamed, whole)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("source", ["chunks", "tensor", "list", "network"])
def test_a_weight_that_is_cut_into_chunks_has_its_gradient(source):
    x, weight, net = X.clone().requires_grad_(), Y.clone().requires_grad_(), torch.nn.Linear(Y.shape[1], Y.shape[1])
    cut = {
        "chunks": lambda: mr.chunks(weight, size=23),
        "tensor": lambda: weight,
        "list": lambda: list(weight.split(23)),
        "network": lambda: [net(part) for part in weight.split(23)],
    }
    ours = ops.linear_logprobs.stream(x, TARGET, return_entropy=True).over(cut[source]())
    (ours.log_prob.sum() + ours.entropy.sum()).backward()
    given = net(weight) if source == "network" else weight
    theirs = ops.linear_logprobs(x, given, TARGET, return_entropy=True)
    own = [x, weight, *(net.parameters() if source == "network" else ())]
    expected = torch.autograd.grad(theirs.log_prob.sum() + theirs.entropy.sum(), own)
    for a, g in zip(own, expected, strict=True):
        torch.testing.assert_close(a.grad, g, atol=1e-5, rtol=1e-4)


def test_what_pays_is_decided_by_the_whole_run(tmp_path, monkeypatch):
    """Every chunk says how many there are like it: a small one is not left to slower code."""
    numpy.save(tmp_path / "x.npy", X.numpy())
    seen = []
    run = subproblem.run_subproblem
    note = lambda fold, leaves, sizes, *rest: (seen.append(sizes), run(fold, leaves, sizes, *rest))[1]
    monkeypatch.setattr(subproblem, "run_subproblem", note)
    monkeypatch.setattr(stream_module, "columns_per_chunk", lambda arrays, most: 23)
    monkeypatch.setattr(stream_module, "fits_in_memory", lambda files: False)
    monkeypatch.setattr(block_runs.BlockRun, "_rows_per_block", lambda run, limit: 17)
    ops.knn.stream(tmp_path / "x.npy", k=3).over(Y, out=tmp_path / "near.npy")
    assert len(seen) > 8
    assert all(M * len(Y) / 2 < s.rows * s.cols * s.repeats <= M * len(Y) for s in seen)


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
