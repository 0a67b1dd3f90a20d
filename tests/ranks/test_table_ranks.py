"""Tables over ranks and in streams: values and gradients as in one process; the table's gradient is whole on each."""

import pytest
import torch

from tests.support import table_cases as tables
from tests.support.rank_cases import DIVISIONS

WORLD = 3
OUTPUTS = {"causal": ["rows"], "blocks": ["rows", "cols"], "kinds": ["rows"] * 3}
INPUTS = {"causal": ["rows", "cols", "cols", None], "blocks": ["rows", "cols", "cols", None]}


def _dense(case, args):
    given = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    found = case.dense(*given)
    values = [found] if isinstance(found, torch.Tensor) else list(found)
    asked = [a for a in given if a.requires_grad]
    return [*(v.detach() for v in values), *torch.autograd.grad([v.sum() for v in values], asked)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("name", OUTPUTS)
def test_ranks(pool, name, divided):
    case = next(c for c in tables.CASES if c.name == name)
    args = case.problem(36, 48)
    axes = [*OUTPUTS[name], *INPUTS.get(name, ["rows", "cols", None, None])]
    answers = pool.run("tables", WORLD, name, divided, args)
    for k, (axis, whole) in enumerate(zip(axes, _dense(case, args), strict=True)):
        parts = [a[k] for a in answers]
        torch.testing.assert_close(torch.cat(parts) if axis in divided else parts[0], whole)
        if axis is None:  # what is not divided has its whole gradient on every rank
            assert all(torch.equal(p, parts[0]) for p in parts)


@pytest.mark.parametrize("name", ["relative", "t5", "graph"])
def test_streams(name):
    case = next(c for c in tables.CASES if c.name == name)
    q, k, v, *pairs, bias = case.problem(20, 33)
    expected = _dense(case, [q, k, v, *pairs, bias])
    q, k, v, bias = (t.clone().requires_grad_() for t in (q, k, v, bias))
    columns = {"k": k.detach(), "v": v.detach()} | ({"hops": pairs[0]} if pairs else {})
    cut = [
        {n: t[..., at : at + 10] if n == "hops" else t[at : at + 10] for n, t in columns.items()}
        for at in range(0, 33, 10)
    ]
    grads = {}
    out = case.op.stream(q, bias=bias).over(cut, gradients=lambda at, g: grads.update({at: g}))
    torch.testing.assert_close(out, expected[0])
    found = torch.autograd.grad(out.sum(), (q, bias))
    torch.testing.assert_close(found[0], expected[1])
    torch.testing.assert_close(found[1], expected[-1])
    torch.testing.assert_close(torch.cat([grads[at]["k"] for at in sorted(grads)]), expected[2])


def test_an_index_out_of_range_is_an_error_on_every_rank(pool):
    case = next(c for c in tables.CASES if c.name == "causal")
    args = case.problem(36, 48)
    args[-1] = args[-1][:30]
    with pytest.raises(Exception, match="out of range"):
        pool.run("tables", WORLD, "causal", ("rows", "cols"), args)
