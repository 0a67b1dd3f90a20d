"""Several vectors a row or column over ranks: values and gradients as in one process."""

import pytest
import torch

from tests.support.rank_cases import DIVISIONS
from tests.support.several_vectors import CASES, tensors

WORLD = 3
AXES = {"q": "rows", "w": "rows", "k": "cols"}


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("name", ["indexer", "best_three"])
def test_ranks(pool, name, divided):
    _, twin, shapes = CASES[name]
    args, axes = tensors(shapes, 10, 14, 3, 4, torch.float64), [AXES[n] for n in shapes.split()]
    given = [t.clone().requires_grad_() for t in args]
    value = twin(*given)
    expected = [value.detach(), *torch.autograd.grad((value * value.detach().cos()).sum(), given)]
    answers = pool.run("several_vectors", WORLD, name, divided, args, " ".join(axes))
    for k, (axis, whole) in enumerate(zip(["rows", *axes], expected, strict=True)):
        parts = [a[k] for a in answers]
        torch.testing.assert_close(torch.cat(parts, 1) if axis in divided else parts[0], whole)
