"""Labels that are arithmetic on an index, integers beyond 2**53, large top-k lists, over ranks: as in one process."""

import pytest
import torch

from tests.support import label_arithmetic_cases as labels
from tests.support import large_topk_cases
from tests.support.rank_cases import DIVISIONS

WORLD = 3


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("name", ["next", "reversed", "column names row"])
def test_labels_count_from_the_start_of_the_whole(pool, name, divided):
    for over in ("cols", "rows"):
        args = [a.requires_grad_() if k < 2 else a for k, a in enumerate(labels.arguments(torch.float64))]
        value = labels.dense(name, over)(*args)
        whole = [value.detach(), *torch.autograd.grad((value * value.detach().cos()).sum(), args[:2])]
        answers = pool.run("picked_labels", WORLD, name, over, divided)
        for k, axis in enumerate(["rows" if over == "cols" else "cols", "rows", "cols"]):
            parts = [a[k] for a in answers]
            found = torch.cat(parts, 1) if axis in divided else parts[0]
            torch.testing.assert_close(found, whole[k])


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
def test_documents_whose_ids_are_hashes(pool, divided):
    ids, values = 2**60 + torch.arange(48) // 6, torch.arange(48) + 2**55
    kept = torch.where(ids.unsqueeze(-1) == ids, values, 0)
    expected = kept.sum(1), kept.amax(1), kept.argmax(1), kept.topk(2).values
    answers = pool.run("documents_of_hashes", WORLD, divided)
    for k, whole in enumerate(expected):
        parts = [a[k] for a in answers]
        assert torch.equal(torch.cat(parts) if "rows" in divided else parts[0], whole)


@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
def test_lists_longer_than_a_shard_and_what_is_gathered_at_their_winners(pool, divided):
    """Three ranks have 66 columns each, and 25 rows; lists have 70."""
    wanted, gradients = large_topk_cases.derive(large_topk_cases.dense, large_topk_cases.arguments())
    answers = pool.run("large_topk", WORLD, divided)
    for k, axis in enumerate([*large_topk_cases.AXES, "rows", "cols", "cols"]):
        parts = [a[k] for a in answers]
        found = torch.cat(parts) if axis in divided else parts[0]
        torch.testing.assert_close(found, [*wanted, *gradients][k])
