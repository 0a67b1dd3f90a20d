"""Modules over lists of columns: the paged cache, and the sampled loss."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops


def test_a_cache_serves_sequences_that_come_and_go():
    """Sequences grow at their own pace, one ends and another takes its pages: always the attention of each alone."""
    cache, kept = mr.nn.PagedCache(pages=6, page=4, heads=2, head_dim=3, value_dim=5, dtype=torch.float64), {}

    def grow(sequences, steps, counts=None):
        k, v = torch.randn(len(sequences), 2, steps, 3).double(), torch.randn(len(sequences), 2, steps, 5).double()
        cache.append(sequences, k, v, counts)
        for row, (s, n) in enumerate(zip(sequences, counts or [steps] * len(sequences), strict=True)):
            old = kept.get(s, (k[0, :, :0], v[0, :, :0]))
            kept[s] = tuple(torch.cat([a, b[row, :, :n]], 1) for a, b in zip(old, (k, v), strict=True))

    def check(sequences, queries):
        q = torch.randn(len(sequences), 4, queries, 3).double()
        for row, y in enumerate(cache.attend(sequences, q)):
            k, v = kept[sequences[row]]
            wanted = ops.attention(q[row], k, v, causal="lower_right", enable_gqa=True)
            torch.testing.assert_close(y, wanted)

    grow([7, 3], 6, [6, 2])
    check([7, 3], 2)
    grow([3, 7], 1)
    check([3, 7], 1)
    assert cache.lengths == {7: 7, 3: 3} and cache.pages_left == 3
    cache.free(7)
    kept.pop(7)
    grow([9, 3], 9)
    check([3, 9], 3)
    assert cache.pages_left == 0 and "0 free" in repr(cache)


def test_a_full_cache_and_a_sequence_named_twice_change_nothing():
    cache, k = mr.nn.PagedCache(pages=2, page=4, heads=1, head_dim=3), torch.ones(2, 1, 5, 3)
    with pytest.raises(mr.ArgumentError, match="2 more pages are needed than are free"):
        cache.append([0, 1], k, k)
    with pytest.raises(mr.ArgumentError, match="Name each sequence once"):
        cache.append([0, 0], k, k)
    with pytest.raises(mr.ShapeError, match="was expected"):
        cache.append([0], k[:1, :, :, :2], k[:1])
    with pytest.raises(mr.ArgumentError, match="counts has 2 numbers for 1 sequences"):
        cache.append([0], k[:1], k[:1], counts=[1, 2])
    with pytest.raises(mr.ArgumentError, match=r"holds no sequences \[0\]"):
        cache.attend([0], k[:1])
    assert cache.pages_left == 2 and cache.lengths == {} and not cache.keys.any()


def test_the_sampled_loss_is_the_function_with_weights():
    log_q = torch.randn(20)
    loss = mr.nn.SampledCrossEntropyLoss(4, 20, bias=True, log_q=log_q, remove_hits=True, temperature=0.5)
    x, target, samples = torch.randn(6, 4), torch.randint(20, (6,)), torch.randint(20, (6, 5))
    wanted = ops.sampled_cross_entropy(
        x, loss.linear.weight, target, samples, bias=loss.linear.bias, log_q=log_q, remove_hits=True, temperature=0.5
    )
    assert torch.equal(loss(x, target, samples), wanted)
    assert set(loss.state_dict()) == {"linear.weight", "linear.bias", "log_q"} and "remove_hits=True" in repr(loss)
    sparse = mr.nn.SampledCrossEntropyLoss(4, 20, sparse_grad=True)
    sparse(x, target, samples).backward()
    torch.optim.SparseAdam([sparse.linear.weight]).step()
