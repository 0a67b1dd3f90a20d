"""What is no list of columns is refused with one clear error; what GPUs would have to wait for only when asked."""

from types import SimpleNamespace

import pytest
import torch

import monoidreduce as mr
from monoidreduce.domains import base

I = lambda *numbers, dtype=torch.int64: torch.tensor(numbers, dtype=dtype)


def trained_store():
    """A learned prefix in pages, which autograd reads."""
    return mr.pages(I([0]), I(1)).append(torch.zeros(1, 64, 1, 2, requires_grad=True), torch.zeros(1, 1, 1, 2))


BAD_TENSORS = [
    (lambda: mr.blocks([[0]]), mr.ArgumentError, "Give a tensor of integers"),
    (lambda: mr.blocks(torch.zeros(2, 2)), mr.DTypeError, "index is float32[2, 2]. Give int32 or int64"),
    (lambda: mr.blocks(I(0, 1)), mr.ShapeError, "[..., row blocks, most] was expected"),
    (lambda: mr.blocks(I([0], [1]), I(1)), mr.ShapeError, "count has shape (1,)"),
    (lambda: mr.blocks(I([0]), I(1).to("meta")), mr.DeviceError, "index on cpu, count on meta"),
    (lambda: mr.blocks(I([0]), rows=0), mr.ArgumentError, "rows was given 0"),
    (lambda: mr.blocks(I([0]), cols=2.0), mr.ArgumentError, "cols was given 2.0"),
    (lambda: mr.blocks.from_mask(I([0])), mr.ArgumentError, "Give a boolean tensor"),
    (lambda: mr.blocks.from_block_mask(I([0])), mr.ArgumentError, "flex_attention.BlockMask"),
    (lambda: mr.pages(I(0), I(1)), mr.ShapeError, "[S, most] was expected"),
    (lambda: mr.pages(I([0], [1]), I(1)), mr.ShapeError, "table has 2 sequences and lengths 1"),
    (lambda: mr.pages(I([0]), I(1).to(torch.int16)), mr.DTypeError, "lengths is int16[1]"),
    (lambda: mr.pages(I([0]), I(1), page=True), mr.ArgumentError, "page was given True"),
    (lambda: trained_store(), mr.ArgumentError, "is written in place. Write under torch.no_grad()"),
    (lambda: mr.jagged(I(0, 2), I(0, 1, 2)), mr.ShapeError, "row_offsets has 2 numbers and col_offsets 3"),
    (lambda: mr.jagged(I()), mr.ShapeError, "row_offsets has 0 numbers"),
    (lambda: mr.jagged(I(0, 2).bool()), mr.DTypeError, "row_offsets is bool[2]"),
    (lambda: mr.edges(I([0, 2]), I(0, 1)), mr.ShapeError, "same leading dimensions"),
    (lambda: mr.edges(I(), I(0, 1)), mr.ShapeError, "[M + 1]"),
    (lambda: mr.edges.from_neighbours(I(0, 1)), mr.ShapeError, "[..., M, K] was expected"),
    (lambda: mr.edges.from_neighbours(I([0, 1]), I(3)), mr.ColumnListError, "count holds 3. Give numbers from 0 to 2"),
    (lambda: mr.edges.from_csr(I([0, 1])), mr.ArgumentError, "laid out as torch.strided. Give a tensor made by .to_"),
    (lambda: mr.edges(I([0, 1], [1, 0])), mr.ArgumentError, "mr.edges.from_csr, from_edge_index and from_neighbours"),
    (lambda: mr.edges.from_edge_index(I([0], [1], [2]), 3), mr.ShapeError, "[2, E] was expected"),
    (lambda: mr.edges.from_edge_index(I([0], [3]), 3), mr.ColumnListError, "edge_index[1][0] is 3"),
    (lambda: mr.edges.from_edge_index(I([0], [1]), -1), mr.ArgumentError, "Give the number of targets"),
]  # fmt: skip
BAD_NUMBERS = [  # domain, rows, columns
    (mr.blocks(I([0, 3]), rows=2, cols=2), 2, 6, "index[0, 1] is 3, but column blocks of 2 are numbered from 0 to 2"),
    (mr.blocks(I([0, -1]), rows=2, cols=2), 2, 6, "index[0, 1] is -1"),
    (mr.blocks(I([0, 1]), I(3), rows=2, cols=2), 2, 6, "count holds 3, but index has room for 2"),
    (mr.blocks(I([0, 1]), I(-1), rows=2, cols=2), 2, 6, "count holds -1"),
    (mr.blocks(I([0]), rows=2, cols=2), 2, 0, "there are no column blocks of 2"),
    (mr.pages(I([0, 4]), I(3), 2), 1, 8, "table[0, 1] is 4, but pages are numbered from 0 to 3"),
    (mr.pages(I([0, -1]), I(3), 2), 1, 8, "table[0, 1] is -1"),
    (mr.pages(I([0, 1]), I(5), 2), 1, 8, "lengths holds 5, but there is room for 4"),
    (mr.pages(I([0, 1]), I(-1), 2), 1, 8, "lengths holds -1"),
    (mr.pages(I([0, 1], [3, 3]), I(3, 3), 2), 1, 8, "sequence 1 has page 3 twice"),
    (mr.jagged(I(0, 3, 2)), 4, 4, "row_offsets decreases from 3 to 2 at position 2"),
    (mr.jagged(I(0, 2), I(0, 5)), 4, 4, "col_offsets ends at 5, but there are 4 columns"),
    (mr.jagged(I(1, 2)), 4, 4, "row_offsets starts at 1"),
    (mr.edges(I(0, 2, 1), I(0, 1)), 2, 2, "rowptr decreases from 2 to 1"),
    (mr.edges(I(0, 1, 3), I(0, 1)), 2, 2, "rowptr ends at 3, but there are 2 edges"),
    (mr.edges(I(0, 1, 2), I(0, 2)), 2, 2, "index[1] is 2, but columns are numbered from 0 to 1"),
    (mr.edges(I([0, 1], [0, 2]), I([0, 0], [0, 0])), 1, 2, "rowptr ends at 1 for one element of the batch"),
]  # fmt: skip


@pytest.mark.parametrize("call,error,words", BAD_TENSORS)
def test_tensors_that_are_no_lists(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("domain,rows,cols,words", BAD_NUMBERS, ids=lambda v: v if isinstance(v, str) else "")
def test_numbers_that_are_no_lists(domain, rows, cols, words, monkeypatch):
    with pytest.raises(mr.ColumnListError) as caught:
        domain.check(rows, cols)
    assert words in str(caught.value)
    monkeypatch.setattr(base, "can_inspect", lambda *tensors: False)  # as on a GPU: nothing is read
    domain.check(rows, cols)


@pytest.mark.parametrize(
    "domain,words",
    [
        (mr.blocks(I([0]), rows=2, cols=2), "index has lists for 1 row blocks, but 5 rows in blocks of 2 are 3"),
        (mr.edges(I(0, 1), I(0)), "rowptr has 2 offsets, but there are 5 rows"),
    ],
)
def test_sizes_that_do_not_fit(domain, words):
    with pytest.raises(mr.ShapeError) as caught:
        domain.check(5, 4)
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: torch.eye(2).to_sparse_csr(), "mr.edges.from_csr takes a CSR tensor"),
        (lambda: SimpleNamespace(kv_num_blocks=1), "mr.blocks.from_block_mask takes FlexAttention's BlockMask"),
        (lambda: I([0, 1]), "mr.edges.from_neighbours takes columns [M, K]"),
        (lambda: I([0, 1]).bool(), "mr.blocks.from_mask one truth value"),
    ],
    ids=["csr", "block mask", "indices", "mask"],
)
def test_what_others_call_a_list(make, words):
    cols, x = make(), torch.zeros(2, 2)
    for call in (mr.ops.attention, mr.ops.kernel_sum):
        with pytest.raises(mr.ArgumentError) as caught:
            call(x, x, x, cols=cols)
        assert words in str(caught.value) and "None" not in str(caught.value)


def test_numbers_are_read_again_only_when_they_change():
    domain = mr.edges(I(0, 1, 2), I(0, 1))
    domain.check(2, 2)
    assert domain._memo["checked"][0][:2] == (2, 2)
    domain.index[1] = 5
    with pytest.raises(mr.ColumnListError, match="is 5"):
        domain.check(2, 2)


def test_a_gpu_is_asked_only_under_check():
    class Elsewhere:
        """What is asked of a tensor before its numbers are read."""

        device = torch.device("cuda")

    far = object.__new__(Elsewhere)
    original, base.Tensor = base.Tensor, Elsewhere
    try:
        assert not base.can_inspect(far)
        with mr.use(check=True):
            assert base.can_inspect(far)
        assert not base.can_inspect(far)
    finally:
        base.Tensor = original


def test_nothing_is_read_under_a_compiler():
    @torch.compile(fullgraph=True, backend="eager")
    def lists(index, x):
        return x + mr.edges.from_neighbours(index).rowptr.sum()

    assert lists(I([0, 1], [1, 9]), torch.zeros(())) == 6
