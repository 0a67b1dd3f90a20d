"""The k best of rows that see nothing, or less than k columns: infinities without a place, as the eager engine says."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seen", ["none", "few"])
def test_slots_that_were_never_filled(dtype, seen):
    @mr.op
    def best(x: Row, y: Col, group: Row, member: Col):
        visible = group == member
        return (
            mr.topk(torch.where(visible, x * y, -torch.inf), 3),
            mr.topk(torch.where(visible, x * y, torch.inf), 3, largest=False),
        )

    x, y = torch.randn(5, dtype=dtype), torch.randn(33, dtype=dtype)
    member = torch.zeros(33, dtype=torch.int64)
    if seen == "few":
        member[32] = 1  # the only column of the last tile: the other tiles are skipped
    group = torch.ones(5, dtype=torch.int64)
    found = {}
    for engine in ("eager", "triton"):
        with mr.use(engine=engine, strict=True):
            found[engine] = best(x, y, group, member)
    for ours, expected in zip(found["triton"], found["eager"], strict=True):
        torch.testing.assert_close(ours.values, expected.values, rtol=0, atol=0)
        assert torch.equal(ours.indices, expected.indices)
        assert (ours.indices == -1).sum() == (15 if seen == "none" else 10)


@mr.op
def three(x: Row, y: Col):
    return mr.topk(x * y, 3), mr.topk(x * y, 3, largest=False)


def k_smallest(x, y, k, **more):
    @mr.op
    def smallest(x: Row, y: Col):
        return mr.topk(x * y, k, largest=False)

    return smallest(x, y, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("lists", ["all", "edges", "blocks", "jagged"])
def test_the_first_of_equals(dtype, lists):
    """Whatever the order of tiles and lists; with a list of more than a tile, and one of less than k columns."""
    y = torch.randint(0, 3, (300,)).to(dtype)
    index = torch.cat([torch.randperm(300), torch.randperm(300)[:2], torch.randperm(300)[:40]])
    cols = {
        "all": None,
        "edges": mr.edges(torch.tensor([0, 300, 302, 342]), index),
        # tiles in the middle of a sequence are visited before those at its ends
        "jagged": mr.jagged(torch.tensor([0, 0, 3, 3]), torch.tensor([0, 131, 299, 300])),
        "blocks": mr.blocks(torch.randperm(10)[None], torch.tensor([7]), rows=4, cols=30),
    }[lists]
    found = {}
    for engine in ("reference", "triton"):
        with mr.use(engine=engine, strict=True):
            found[engine] = three(torch.ones(3, dtype=dtype), y, cols=cols)
    for ours, expected in zip(found["triton"], found["reference"], strict=True):
        assert torch.equal(ours.indices, expected.indices) and torch.equal(ours.values, expected.values)


def test_nan_is_among_the_k_smallest_where_little_else_is():
    """Behind all numbers, as in torch."""
    y = torch.tensor([2.0, math.nan, math.inf, 1.0, math.nan])
    with mr.use(engine="triton", strict=True):
        for k, wanted in ((3, [1.0, 2.0, math.inf]), (5, [1.0, 2.0, math.inf, math.nan, math.nan])):
            found = k_smallest(torch.ones(1), y, k)
            torch.testing.assert_close(found.values, torch.tensor([wanted]), equal_nan=True)
            assert found.indices.tolist() == [[3, 0, -1, 1, 4][:k]]


@pytest.mark.parametrize("lists", ["edges", "blocks", "pages", "jagged", "condition"])
def test_nan_is_behind_pairs_that_do_not_exist(lists):
    """These are infinities, as under a mask in torch, whether tiles of them are visited or not."""
    y = torch.where(torch.rand(70) < 0.4, math.nan, torch.randn(70))
    mask, cols, k = torch.zeros(6, 70, dtype=torch.bool), None, 60
    if lists == "edges":
        for i, n in enumerate((70, 0, 3, 60, 61, 69)):
            mask[i, torch.randperm(70)[:n]] = True
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
        cols = mr.edges(ends, mask.nonzero()[:, 1])
    elif lists == "blocks":
        keep = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 1, 1]]) > 0
        mask = keep.repeat_interleave(2, 0).repeat_interleave(20, 1)[:, :70]
        cols = mr.blocks.from_mask(keep, rows=2, cols=20)
    elif lists == "pages":
        mask = (torch.arange(70) < 33).expand(1, 70)
        cols = mr.pages(torch.arange(5)[None], torch.tensor([33]), page=14)
    elif lists == "jagged":
        ends = torch.tensor([0, 3, 6]), torch.tensor([0, 62, 70])
        mask, cols = mr.jagged(*ends).mask(6, 70) > 0, mr.jagged(*ends)
    else:
        gap = torch.arange(70) - torch.arange(6)[:, None]
        mask, k = (gap < 9) & (gap > -3), 40

    @mr.op
    def smallest(x: Row, y: Col, near: bool):
        s, gap = x * y, mr.col_index - mr.row_index
        return mr.topk(torch.where((gap < 9) & (gap > -3), s, torch.inf) if near else s, k, largest=False)

    values, places = torch.where(mask, y, torch.inf).sort(stable=True)
    if lists == "pages":
        given = torch.ones(1, 1, 1), y.view(5, 14, 1)
    else:
        given = torch.ones(6), y
    for engine in ("reference", "eager", "triton"):
        with mr.use(engine=engine):
            found = smallest(*given, lists == "condition", cols=cols)
        wanted = places.masked_fill(values == math.inf, -1)[:, :k]
        torch.testing.assert_close(found.values.view(-1, k), values[:, :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.indices.view(-1, k), wanted)
