"""Folds over listed pairs with rows divided over ranks: each rank has the lists of its own rows."""

import torch

import monoidreduce as mr
from tests.support import listed_cases

WORLD = 3


def test_rows_with_their_lists(pool):
    chance = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=chance)
    args = [draw(14, 3), draw(9, 3), draw(9, 2)]
    degrees = torch.randint(0, 5, (14,), generator=chance)
    index = torch.randint(0, 9, (int(degrees.sum()),), generator=chance)
    numbers = draw(len(index))
    given = [t.clone().requires_grad_() for t in (*args, numbers)]
    by_row, by_col = listed_cases.both_ways(*given, cols=mr.edges(listed_cases.offsets(degrees), index))
    cotangents = [listed_cases.cotangent(by_row), listed_cases.ones(by_col)]
    grads = torch.autograd.grad([by_row, by_col], given, cotangents)
    answers = pool.run("listed_rows", WORLD, args, degrees, index, numbers)
    for k, whole in enumerate((by_row, by_col, *grads)):
        parts = [a[k] for a in answers]
        divided = k in (0, 2, 5)  # results of rows, gradients of rows and of numbers of edges
        torch.testing.assert_close(torch.cat(parts) if divided else parts[0], whole.detach())


def test_divided_columns_are_refused(pool):
    for answer in pool.run("listed_cols", 2):
        assert "Divide the rows alone" in answer
