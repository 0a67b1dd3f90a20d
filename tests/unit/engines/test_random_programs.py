"""250 random programs: the eager engine against the reference engine, and that against plain torch.

Values, gradients and (one program in four) gradients of gradients, in float64, by small random tiles. The programs
are the same on every run; one that fails is shrunk and printed as a script that reproduces it. ``tests/fuzz`` has
more programs, of another kind.
"""

import collections
import random
import re

import hypothesis
import pytest
import torch

from monoidreduce.program.primitives import COMPOSITES, NAMES, PRIMITIVES
from monoidreduce.reductions.sum import SumAccumulator
from tests.support import scalar_functions
from tests.support.random_programs import INPUTS, Program, program_of, programs

SHARDS, EXAMPLES = 10, 25
FIXED = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    phases=[hypothesis.Phase.generate],  # a program shrinks itself: faster, and by whole lines
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_engines_agree_on_random_programs(shard: int):
    @hypothesis.seed(shard)
    @hypothesis.settings(FIXED, max_examples=EXAMPLES)
    @hypothesis.given(programs())
    def agree(program: Program):
        program.check()

    agree()


def test_a_failure_is_printed_as_a_short_script(monkeypatch):
    """With an engine that is wrong by a thousandth, what is printed runs by itself, fails, and is short."""
    right = SumAccumulator.finish
    monkeypatch.setattr(SumAccumulator, "finish", lambda self: [x * 1.001 for x in right(self)])
    tapes = (bytes(random.Random(k).randbytes(200)) for k in range(100))
    failing = next(p for p in map(program_of, tapes) if len(p.assignments) > 8 and "eager differs" in p.failure())
    with pytest.raises(AssertionError) as caught:
        failing.check()
    words, script = str(caught.value).split("To reproduce, run:\n\n")
    assert "eager differs from reference" in words and "expected" in words
    assert script.count("\n    ") <= 5, script
    with pytest.raises(AssertionError, match="eager differs from reference"):
        exec(compile(script, "<script>", "exec"), {})


def test_random_programs_use_the_whole_language():
    """Every primitive and composite occurs in the programs, and so does every sort of program."""
    seen: collections.Counter = collections.Counter()

    @hypothesis.seed(0)
    @hypothesis.settings(FIXED, max_examples=1500)
    @hypothesis.given(programs())
    def look(program: Program):
        seen.update(set(words(program)))

    look()
    wanted = (
        set(PRIMITIVES) | set(COMPOSITES) | {"normalize", "sqdist", "topk", "sample", "reduce", "dropout", "gumbel"}
    )
    # nobody writes what torch has no name for; .float() is a cast, dropout a coin, silu and gelu have gates
    wanted -= {"contiguous", *(p.name for p in PRIMITIVES.values() if not p.in_torch)} - {"gumbel", "uniform"}
    # these have programs of their own, in test_scalar_functions.py, test_language.py and test_tables.py
    wanted -= {*scalar_functions.NAMES, *(name for name in PRIMITIVES if name.startswith("bitwise_"))}
    wanted -= {"addcdiv", "addcmul", "celu", "entr", "logaddexp2", "ndtr", "rad2deg", "selu", "xlog1py", "lookup"}
    assert not sorted(wanted - seen.keys())
    assert seen["second"] > 100 and seen["two passes"] > 100 and seen["empty"] > 20 and seen["batched"] > 200


def words(program: Program):
    """The names of the language that the text of a program holds."""
    text = program.source
    operators = {
        " @ ": "matmul", " + ": "add", " - ": "sub", " * ": "mul", " / ": "div", " ** ": "pow", " // ": "floor_divide",
        " % ": "remainder", " == ": "eq", " != ": "ne", " < ": "lt", " <= ": "le", " > ": "gt", " >= ": "ge",
        " & ": "logical_and", " | ": "logical_or", " ^ ": "logical_xor", "= ~": "logical_not", "= -": "neg",
    }  # fmt: skip
    yield from (name for sign, name in operators.items() if sign in text)
    for word in re.findall(r"(\w+)\(", text):
        yield NAMES.get(word, word)
    if program.second:
        yield "second"
    tensors = [(INPUTS[n], v) for n, v in program.arguments().items() if isinstance(v, torch.Tensor)]
    if any(0 in v.shape for _, v in tensors):
        yield "empty"
    if any(i.axis in ("rows", "cols") and v.dim() > 1 + (i.feature is not None) for i, v in tensors):
        yield "batched"
    results = set(re.findall(r"^ *(a\d+) = mr\.(?:sum|mean|logsumexp|max|min|softmax_mean)", text, re.M))
    if any(re.search(rf"= .*\b{r}\b", text) for r in results):
        yield "two passes"
