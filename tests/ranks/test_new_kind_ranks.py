"""A kind of reduction in one file, with one row in the table, over ranks: values and gradients as in one process."""

import pytest
import torch

from tests.support import logmeanexp as new
from tests.support.rank_cases import DIVISIONS

WORLD = 3


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("op", ["by_rows", "both_ways"])
def test_ranks(pool, op, divided):
    args = new.problem(36, 84)
    expected = new.truth(op, args)
    axes = [*new.AXES[op], "rows", "cols", "cols"]
    answers = pool.run("new_kind", WORLD, op, divided, args)
    for k, (axis, whole) in enumerate(zip(axes, expected, strict=True)):
        parts = [a[k] for a in answers]
        torch.testing.assert_close(torch.cat(parts) if axis in divided else parts[0], whole)
