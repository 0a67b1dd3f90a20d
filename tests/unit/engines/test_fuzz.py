"""Random programs, each called cold, against plain torch: some in every run, a thousand with the slow tests.

More of them: ``python -m tests.fuzz --programs 10000``.
"""

import collections

import pytest

from monoidreduce.reductions import KINDS
from tests.fuzz.generate import generate
from tests.fuzz.lists import assert_lists
from tests.fuzz.runner import Outcome, assert_programs, outcomes, report
from tests.fuzz.tree import topological

SHARDS, PROGRAMS = 25, 40


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_agree_with_plain_torch(shard: int):
    assert_programs(range(shard * PROGRAMS, (shard + 1) * PROGRAMS))


def test_compiled_programs_agree_with_plain_torch():
    assert_programs(range(3), mode="compile")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_programs_over_lists_agree_with_masked_ones(first: int):
    assert_lists(range(first, first + 50))


def test_a_failure_is_shrunk_to_a_short_script(monkeypatch):
    """With a dense engine that is wrong, what is printed is short, runs by itself, and prints two different results."""
    right = KINDS["soft"].dense
    wrong = lambda *given: [x * 1.001 for x in right(*given)]
    monkeypatch.setattr(KINDS["soft"], "dense", wrong)
    softened = (k for k in range(1000) if _is_soft(k))
    failing: Outcome = next(o for o in outcomes(softened) if o.failure and "differs" in o.failure.kind)
    text = report(failing)
    assert "output 0 is wrong by" in text
    script = text.split("To reproduce, run:\n\n")[1]
    assert len(script.split("def program")[1].split("def plain")[0].strip().splitlines()) <= 4, script
    exec(compile(script, "<script>", "exec"), {})


def _is_soft(seed: int) -> bool:
    program = generate(seed)
    return program.run.engine == "reference" and any(n.op == "mr.logsumexp" for n in topological(program.outputs))


def test_programs_use_the_whole_language():
    """Operations, data, layouts, sizes, engines and transforms all occur in the share that CI runs."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(SHARDS * PROGRAMS):
        program = generate(seed)
        nodes = topological(program.outputs)
        words = {n.op for n in nodes} | {program.run.engine, program.run.mode, program.dtype}
        words |= (
            {p.style for p in program.params} | {p.view for p in program.params} | {p.batch for p in program.params}
        )
        words |= {"second"} if program.run.second else set()
        words |= {"tiles"} if program.run.tile is not None else set()
        words |= {"alias"} if any(p.alias for p in program.params) else set()
        words |= {"empty batch"} if 0 in program.sizes.batch else set()
        words |= {"empty axis"} if 0 in (program.sizes.rows, program.sizes.cols) else set()
        words |= {"no features"} if any(size == 0 for _, size in program.sizes.features) else set()
        words |= {"over rows"} if any(dict(n.attrs).get("over") == "rows" for n in nodes if n.is_reduction) else set()
        words |= {"two passes"} if any(n.is_reduction and _reduces(n) for n in nodes) else set()
        seen.update(words)
    rare = {word: seen[word] for word in EXPECTED if seen[word] < 5}
    assert not rare
    assert seen["two passes"] > 50 and seen["over rows"] > 150 and seen["tiles"] > 100 and seen["second"] > 50


def _reduces(node) -> bool:
    return any(n.is_reduction for a in node.args for n in topological([a]))


# fmt: off
EXPECTED = [
    "mr.sum", "mr.mean", "mr.logsumexp", "mr.softmax_mean", "mr.weighted_mean", "mr.max", "mr.min", "mr.argmax",
    "mr.argmin", "mr.topk.values", "mr.topk.indices", "mr.any", "mr.all", "mr.count", "mr.var", "mr.row_index",
    "mr.col_index", "mr.num_rows", "mr.num_cols", "dot", "sqdist", "distance", "where", "minimum", "maximum",
    "floor_divide", "trunc_divide", "remainder", "pow_int", "pow_const", "pow_at_zero", "div_int", "eager",
    "auto", "panel", "reference", "plain", "repeat", "checkpoint", "vmap", "grad", "inplace", "total", "reuse",
    "float64", "float32", "bfloat16", "float16", "grid", "normal", "large", "zero", "masking", "label", "small",
    "truth", "transposed", "strided", "offset", "repeated", "full", "none", "ones", "alias",
]
# fmt: on
EXPECTED += ["beyond 2**24", "beyond 2**53", "huge", "flipped strides", "empty batch", "empty axis", "no features"]
