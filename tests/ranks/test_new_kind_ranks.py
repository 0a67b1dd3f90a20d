"""A kind of reduction in one file, with one row in the table, over ranks: values and gradients as in one process."""

import pytest
import torch

from tests.support import new_kinds as new
from tests.support.rank_cases import DIVISIONS

WORLD = 3


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize(("name", "op"), new.NAMES)
def test_ranks(pool, name, op, divided):
    args = new.problem(36, 84)
    expected = new.truth(name, op, args)
    axes = [*new.CASES[name].AXES[op], "rows", "cols", "cols"]
    answers = pool.run("new_kind", WORLD, name, op, divided, args)
    for k, (axis, whole) in enumerate(zip(axes, expected, strict=True)):
        parts = [a[k] for a in answers]
        torch.testing.assert_close(torch.cat(parts) if axis in divided else parts[0], whole)
