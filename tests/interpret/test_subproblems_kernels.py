"""Generated kernels on blocks of a problem, offset to their place and then combined."""

import pytest
import torch

from monoidreduce.engines import eager, triton
from monoidreduce.engines.common import subproblem
from tests.support import internals
from tests.support.comparison import assert_equal, run
from tests.support.layers import BY_NAME

# the interpreter computes with numpy, which warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
PIECES = ((0, 5), (5, 5), (5, 19)), ((0, 17), (17, 23))
NAMES = ["causal_attention", "window_attention", "cross_entropy", "categorical_sample", "dropout_attention"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_run_by_kernels_is_the_whole(name, seed, monkeypatch):
    layer = BY_NAME[name]
    args = layer.args(19, 23, seed, torch.float32)
    expected = run(layer.dense, [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args])
    kernels = []

    def kernel(fold, leaves, sizes):
        kernels.append(fold)
        return triton.run(fold, leaves, sizes, fallback=eager.run)

    def folder(fold, leaves, sizes):
        part = subproblem.Subproblem(*PIECES, (sizes.rows, sizes.cols))
        return subproblem.finish_states(fold, subproblem.run_subproblem(fold, leaves, sizes, part, kernel))

    internals.replace_eager_engine(monkeypatch, folder)
    assert_equal(run(layer.op, args), expected, rtol=1e-4, atol=1e-5)
    assert kernels
