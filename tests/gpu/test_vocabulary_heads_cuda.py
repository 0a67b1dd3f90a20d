"""The vocabulary heads on a GPU: values and gradients against float64, and labels that are not waited for."""

import pytest
import torch

from tests.support.comparison import assert_equal, assert_error_rule, is_float, run, there
from tests.support.vocabulary_heads import FUNCTIONS, RICH, by_name, draw, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
HEADS = pytest.mark.parametrize(("name", "sample"), [pytest.param(*RICH[i], id=i) for i in RICH])


@pytest.mark.filterwarnings("ignore::monoidreduce.errors.FallbackWarning")  # probabilities of every pair have no kernel
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@HEADS
def test_a_head_within_the_error_rule(name, sample, dtype):
    f, trials = FUNCTIONS[name], []
    for seed in range(2):
        names, args = split(draw(f, sample | {"rows": (65,), "classes": 259, "features": 32}, dtype, seed))
        exact = [a.double() if is_float(a) else a for a in args]
        asked = [k for k, a in enumerate(args) if is_float(a) and names[k] != "class_weights"]
        ours, plain = by_name(f.ours, names), by_name(f.plain, names)
        trials.append(
            (run(there(ours), args, asked=asked), run(plain, args, asked=asked), run(plain, exact, asked=asked))
        )
    if dtype is torch.float64:
        for ours, _, truth in trials:
            assert_equal(ours, truth)
    else:
        assert_error_rule(trials)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "reduction": "sum"}], ids=["plain", "rich"]
)
def test_labels_are_not_waited_for(options):
    f = FUNCTIONS["linear_cross_entropy"]
    inputs = draw(f, f.default(ignore=-100), torch.float32, seed=1) | options
    names, args = split({n: a.to(DEVICE) if isinstance(a, torch.Tensor) else a for n, a in inputs.items()})
    args = [a.requires_grad_() if is_float(a) else a for a in args]
    call = by_name(f.ours, names)
    call(*args).backward()  # the first call traces and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*args).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
