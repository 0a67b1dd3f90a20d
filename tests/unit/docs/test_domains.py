"""The recipes of the page on lists of columns, beside their dense twins."""

import pytest
import torch

import monoidreduce as mr
from tests.support.doc_pages import DOCS, run

F64 = torch.float64


@pytest.fixture(scope="module")
def page():
    return run(DOCS / "domains.md")


def compare(ours, dense, inputs):
    torch.testing.assert_close(ours, dense)
    g = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(dense, inputs, g), strict=True):
        torch.testing.assert_close(a, b)


def test_native_sparse_attention(page):
    q, k, v = torch.randn(3, 2, 48, 4, dtype=F64).requires_grad_().unbind()
    gates = torch.rand(2, 48, 3, dtype=F64)
    sizes = dict(block=8, count=3, window=5)
    ours = page["native_sparse_attention"](q, k, v, gates, **sizes)
    compare(ours, page["dense_native_sparse_attention"](q, k, v, gates, **sizes), (q, k, v))


def test_graph_attention_network(page):
    net, x = page["GAT"](5, 3, 4).double(), torch.randn(20, 5, dtype=F64, requires_grad=True)
    edges = mr.edges.from_neighbours(torch.stack([torch.randperm(20)[:6] for _ in range(20)]))
    compare(net(x, edges), page["dense_gat"](net, x, edges), (x, *net.parameters()))


def test_two_towers(page):
    users, table = (torch.randn(n, 4, dtype=F64, requires_grad=True) for n in (9, 30))
    given = torch.randperm(30)[:9], torch.randint(30, (9, 7)), torch.randn(30, dtype=F64)
    compare(
        page["retriever_loss"](users, table, *given), page["dense_retriever_loss"](users, table, *given), (users, table)
    )
