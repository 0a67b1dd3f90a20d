"""Writing new columns into pages, against a loop over sequences and tokens."""

import pytest
import torch

import monoidreduce as mr


def stores(pages=9, page=4, heads=2, f=3, fused=False):
    if fused:  # keys and values in one tensor, as vLLM has them: pages do not lie behind each other
        both = torch.randn(pages, 2, page, heads, f)
        return both[:, 0], both[:, 1]
    return torch.randn(pages, page, heads, f), torch.randn(pages, page, heads, f)


def append_by_hand(held, store, new, counts):
    for s, (length, count) in enumerate(zip(held.lengths.tolist(), counts, strict=True)):
        for t in range(count):
            page, slot = divmod(length + t, held.page)
            store[held.table[s, page], slot] = new[s, :, t]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("counts", [None, (3, 5, 0), (0, 0, 0), (5, 0, 5)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append(counts, fused, dtype):
    held = mr.pages(
        torch.tensor([[3, 8, 99], [0, 5, 7], [6, 1, -1]], dtype=dtype), torch.tensor([3, 7, 0], dtype=dtype), page=4
    )
    keys, values = stores(fused=fused)
    new = torch.randn(3, 2, 5, 3), torch.randn(3, 2, 5, 3)
    wanted = keys.clone(), values.clone()
    each = counts or (5, 5, 5)
    for store, fresh in zip(wanted, new, strict=True):
        append_by_hand(held, store, fresh, each)
    longer = held.append((keys, values), new, None if counts is None else torch.tensor(counts))
    assert longer.lengths.tolist() == [3 + each[0], 7 + each[1], each[2]] and longer.lengths.dtype is dtype
    assert held.lengths.tolist() == [3, 7, 0] and longer.table is held.table
    assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


def test_nothing_new_and_no_sequences():
    held, (keys, _) = mr.pages(torch.tensor([[0]]), torch.tensor([1]), page=4), stores()
    before = keys.clone()
    assert held.append(keys, torch.zeros(1, 2, 0, 3)).lengths.tolist() == [1]
    none = mr.pages(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), page=4)
    assert none.append(keys, torch.zeros(0, 2, 1, 3)).lengths.shape == (0,)
    assert torch.equal(keys, before)


def test_gradients_reach_what_was_written():
    held = mr.pages(torch.tensor([[1], [0]]), torch.tensor([0, 1]), page=2)
    new = torch.randn(2, 1, 1, 2, dtype=torch.float64, requires_grad=True)

    def written(new):
        store = torch.ones(2, 2, 1, 2, dtype=torch.float64)
        held.append(store, new)
        return store**2

    assert torch.autograd.gradcheck(written, new)


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(store=torch.zeros(9, 3, 2, 3)), mr.ShapeError, "a page holds 4"),
        (dict(new=torch.zeros(2, 2, 1, 4)), mr.ShapeError, "(2, 2, 1, 3) was expected"),
        (dict(new=torch.zeros(2, 2, 1, 3).half()), mr.DTypeError, "new is float16"),
        (dict(new=(torch.zeros(2, 2, 1, 3),) * 2), mr.ArgumentError, "1 stores and 2 tensors"),
        (dict(counts=torch.tensor([1])), mr.ShapeError, "counts has 1 numbers"),
        (dict(counts=torch.tensor([1, 2])), mr.ColumnListError, "counts holds 2, but there is room for 1"),
        (dict(lengths=(8, 1)), mr.ColumnListError, "the new lengths holds 9, but there is room for 8"),
        (dict(table=((8, 0), (8, 1))), mr.ColumnListError, "sequence 0 would write to page 8"),
        (dict(table=((9, 0), (8, 1))), mr.ColumnListError, "table[0, 0] is 9"),
        (dict(store=torch.zeros(9, 4, 2, 3, device="meta")), mr.DeviceError, "store on meta"),
    ],
)  # fmt: skip
def test_mistakes(change, error, words):
    held = mr.pages(torch.tensor(change.get("table", ((3, 0), (8, 1)))), torch.tensor(change.get("lengths", (1, 1))), 4)
    store = change.get("store", torch.zeros(9, 4, 2, 3))
    with pytest.raises(error) as caught:
        held.append(store, change.get("new", torch.zeros(2, 2, 1, 3)), change.get("counts"))
    assert words in str(caught.value)
    assert store.device.type == "meta" or not store.any()


def test_a_shared_prefix_may_be_read_and_stands_beside_what_is_written():
    held = mr.pages(torch.tensor([[8, 0], [8, 1]]), torch.tensor([4, 4]), page=4)  # both have page 8, which is full
    keys = torch.zeros(9, 4, 2, 3)
    longer = held.append(keys, torch.ones(2, 2, 1, 3))
    longer.check(1, 36)
    assert keys[8].sum() == 0 and keys[:2, 0].sum() == 12
