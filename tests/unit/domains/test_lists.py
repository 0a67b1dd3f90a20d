"""The lists that engines read: the normal form, the transposed form and the dense mask, against loops in Python."""

import copy
import itertools
import pickle

import pytest
import torch

import monoidreduce as mr
from monoidreduce.domains import restore


def lists_of(lists):
    """A ColumnLists as Python lists, one a group."""
    bounds = lists.offsets.tolist()
    return [lists.items[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def multiplicity(pairs, rows, cols):
    found = torch.zeros(rows, cols, dtype=torch.int64)
    for i, j in pairs:
        found[i, j] += 1
    return found


def random_blocks(rows, cols, R, C, batch=(), seed=0, most=5, dtype=torch.int32):
    make = torch.Generator().manual_seed(seed)
    row_blocks, col_blocks = -(-rows // R), -(-cols // C)
    index = torch.randint(max(col_blocks, 1), (*batch, row_blocks, most), generator=make, dtype=dtype)
    count = torch.randint(most + 1 if col_blocks else 1, (*batch, row_blocks), generator=make, dtype=dtype)
    return mr.blocks(index, count, rows=R, cols=C)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows,cols", [(10, 13), (9, 12), (3, 4), (0, 4), (4, 0)])
def test_blocks_are_read_as_lists(rows, cols, dtype):
    domain = random_blocks(rows, cols, 3, 4, dtype=dtype)
    wanted = [row[:n].tolist() for row, n in zip(domain.index, domain.count, strict=True)]
    lists = domain.listing(rows, cols)
    assert lists_of(lists) == wanted
    assert not lists.items[int(lists.offsets[-1]) :].any()
    pairs = [
        (i, j)
        for b, row in enumerate(wanted)
        for c in row
        for i in range(3 * b, min(rows, 3 * b + 3))
        for j in range(4 * c, min(cols, 4 * c + 4))
    ]
    assert torch.equal(domain.mask(rows, cols), multiplicity(pairs, rows, cols))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,)])
def test_transposed_blocks_name_the_same_pairs_in_order(batch):
    domain = random_blocks(10, 13, 3, 4, batch)
    forward, back = domain.listing(10, 13), domain.transposed(10, 13)
    assert (back.row_block, back.col_block, back.batch) == (4, 3, batch)
    mask = domain.mask(10, 13)
    assert mask.shape == (*batch, 10, 13)
    if mask.numel():
        assert torch.equal(back.multiplicity(13, 10).mT, mask)
    elements = torch.Size(batch).numel()
    assert len(lists_of(back)) == 4 * elements
    owners = forward.owners()
    for g, (start, stop) in enumerate(itertools.pairwise(back.offsets.tolist())):
        entries = back.entry[start:stop].tolist()
        assert entries == sorted(entries)
        for item, entry in zip(back.items[start:stop].tolist(), entries, strict=True):
            assert forward.items[entry] == g % 4 and owners[entry] == g // 4 * 4 + item


def test_lists_are_made_once_and_anew_when_a_tensor_changes():
    domain = mr.edges(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]))
    first = domain.transposed(2, 3)
    assert domain.transposed(2, 3) is first
    domain.index[0] = 1
    assert lists_of(domain.transposed(2, 3)) == [[], [0, 1], [0]]


@pytest.mark.parametrize("batch", [(), (2,), (0,)])
def test_edges(batch):
    rowptr, index = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 3, 0, 1, 3])
    domain = mr.edges(rowptr.expand(*batch, -1), index.expand(*batch, -1))
    one = multiplicity([(0, 3), (0, 3), (2, 0), (2, 1), (2, 3)], 3, 4)
    assert torch.equal(domain.mask(3, 4), one.expand(*batch, -1, -1))
    assert torch.equal(domain.transposed(3, 4).multiplicity(4, 3).mT, domain.mask(3, 4))
    assert lists_of(domain.listing(3, 4)) == [[3, 3], [], [0, 1, 3]] * torch.Size(batch).numel()


def test_edges_may_have_room_to_spare():
    domain = mr.edges(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1, 99]))
    domain.check(2, 3)
    assert torch.equal(domain.mask(2, 3), multiplicity([(0, 2), (1, 0), (1, 1)], 2, 3))
    assert lists_of(domain.transposed(2, 3)) == [[1], [1], [0]]


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls its CSR tensors a beta
def test_neighbours_csr_and_edge_index_agree():
    near = torch.tensor([[1, 2], [0, 3], [3, 1]])
    wanted = multiplicity([(i, int(j)) for i, row in enumerate(near) for j in row], 3, 4)
    assert torch.equal(mr.edges.from_neighbours(near).mask(3, 4), wanted)
    csr = wanted.float().to_sparse_csr()
    assert torch.equal(mr.edges.from_csr(csr).mask(3, 4), wanted)
    source, target = near.flatten(), torch.arange(3).repeat_interleave(2)
    shuffle = torch.randperm(6)
    edges, order = mr.edges.from_edge_index(torch.stack([source, target])[:, shuffle], rows=3)
    assert torch.equal(edges.mask(3, 4), wanted)
    assert torch.equal(source[shuffle][order], edges.index)
    few = mr.edges.from_neighbours(near, torch.tensor([0, 2, 1]))
    assert lists_of(few.listing(3, 4)) == [[], [0, 3], [3]] and len(few.index) == 3
    batched = mr.edges.from_neighbours(near.expand(2, 3, 2))
    assert torch.equal(batched.mask(3, 4), wanted.expand(2, 3, 4))


def test_jagged():
    rows, cols = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 3, 6])
    domain = mr.jagged(rows, cols)
    wanted = torch.zeros(6, 7, dtype=torch.int64)
    wanted[2:5, 3:6] = 1
    assert torch.equal(domain.mask(6, 7), wanted)
    assert domain.row_positions(5).tolist() == [0, 1, 0, 1, 2] and domain.col_positions(6).tolist() == [0, 1, 2] * 2
    alike = mr.jagged(rows)
    assert alike.is_square and len(alike.tensors()) == 1
    assert torch.equal(alike.mask(5, 5), torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).long())


def test_pages():
    domain = mr.pages(torch.tensor([[2, 0, 99], [2, 1, 99], [-1, -1, -1]]), torch.tensor([3, 4, 0]), page=2)
    domain.check(1, 6)
    assert lists_of(domain.listing(1, 6)) == [[2, 0], [2, 1], []]
    assert lists_of(domain.transposed(1, 6)) == [[0], [1], [0, 1]]
    wanted = torch.tensor([[1, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0] * 6])
    assert torch.equal(domain.mask(2, 6), wanted.unsqueeze(1).expand(3, 2, 6))
    store = torch.randn(3, 2, 4, 5)
    dense = domain.gather(store)
    assert dense.shape == (3, 4, 6, 5)
    assert torch.equal(dense[0, :, :3], torch.cat([store[2], store[0, :1]]).transpose(0, 1))
    assert not dense[0, :, 3:].any() and not dense[2].any()


def test_from_block_mask_lists_partial_and_full_blocks():
    from torch.nn.attention.flex_attention import create_block_mask

    flex = create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - 300), 2, 1, 512, 640, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(mr.ArgumentError, match=r"partial blocks, inside which its mask_mod hides.*partial=True"):
        mr.blocks.from_block_mask(flex)
    with pytest.raises(mr.ArgumentError, match=r"mr\.blocks\.from_block_mask takes"):
        mr.blocks(flex)
    domain = mr.blocks.from_block_mask(flex, partial=True)
    domain.check(512, 640)
    kept = flex.to_dense().bool()
    assert kept.shape == (2, 1, 8, 10)
    assert torch.equal(domain.mask(512, 640)[..., ::64, ::64].bool(), kept)
    assert int(domain.mask(512, 640).max()) == 1
    assert torch.equal(mr.blocks.from_mask(kept, 64, 64).mask(512, 640), domain.mask(512, 640))


def test_from_block_mask_of_full_blocks_needs_no_condition():
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    full = create_block_mask(lambda b, h, i, j: j // 64 != 1, 1, 1, 128, 192, device="cpu", BLOCK_SIZE=64)
    wanted = torch.tensor([1, 0, 1]).expand(1, 1, 2, 3)
    assert torch.equal(mr.blocks.from_block_mask(full).mask(128, 192)[..., ::64, ::64], wanted)
    bare = BlockMask.from_kv_blocks(full.full_kv_num_blocks, full.full_kv_indices, BLOCK_SIZE=64)  # no mask_mod
    assert torch.equal(mr.blocks.from_block_mask(bare).mask(128, 192)[..., ::64, ::64], wanted)


@pytest.mark.parametrize(
    "domain,text",
    [
        (random_blocks(10, 13, 3, 4, (2,)), "mr.blocks(4 row blocks of 3, at most 5 column blocks of 4 each, per [2])"),
        (mr.blocks(torch.zeros(4, 5, dtype=torch.int64)), "mr.blocks(4 row blocks of 128, at most 5 ..."),
        (mr.pages(torch.tensor([[1, 0]]), torch.tensor([3]), 2), "mr.pages(1 sequences, at most 2 pages of 2 each)"),
        (mr.jagged(torch.tensor([0, 2, 5])), "mr.jagged(2 sequences, rows and columns alike)"),
        (mr.jagged(torch.tensor([0, 2]), torch.tensor([0, 3])), "mr.jagged(1 sequences, rows and columns by ..."),
        (mr.edges(torch.tensor([0, 2]), torch.tensor([0, 3])), "mr.edges(1 rows, 2 edges)"),
    ],
)  # fmt: skip
def test_copies_are_equal(domain, text):
    assert repr(domain).startswith(text.removesuffix("..."))
    assert hash(domain.form) is not None
    for other in (
        copy.copy(domain), copy.deepcopy(domain), pickle.loads(pickle.dumps(domain)), domain.to("cpu"),
        restore(domain.form, domain.tensors()),
    ):  # fmt: skip
        assert other.form == domain.form and type(other) is type(domain)
        assert all(map(torch.equal, other.tensors(), domain.tensors()))
        assert torch.equal(other.mask(10, 16), domain.mask(10, 16)) if domain.kind == "jagged" else True
    assert domain.to("meta").device.type == "meta"
