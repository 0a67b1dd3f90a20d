"""Few rows against many columns on a GPU: values, splits that are combined by a kernel launched early, CUDA graphs."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(batch, heads, shared, rows, cols, width, dtype, split):
    make = torch.Generator("cuda").manual_seed(5)
    shapes = (heads, rows), (shared, cols), (shared, cols)
    if split:
        draw = lambda h, n: torch.randn(batch, n, h, width, generator=make, device="cuda").to(dtype).transpose(1, 2)
    else:
        draw = lambda h, n: torch.randn(batch, h, n, width, generator=make, device="cuda").to(dtype)
    return [draw(*shape) for shape in shapes]


def wide(v):
    return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [(2, 8, 2, 1, 1000, 128), (1, 32, 1, 1, 32768, 128), (1, 8, 8, 16, 5000, 64), (12, 8, 8, 3, 4096, 96)],
    ids=str,
)
def test_values_and_equal_runs(sizes, dtype):
    """No more than twice the error of plain torch in float32 rounded once; bitwise equal runs, also as a graph."""
    batch, heads, _, rows, cols, _ = sizes
    lengths = torch.randint(rows, cols + 1, (batch,), device="cuda")
    for options in (
        {},
        dict(causal="lower_right", lengths=lengths, window=(300, 0), softcap=20.0),
        dict(causal="lower_right", alibi_slopes=torch.rand(heads, device="cuda")),
    ):
        given = inputs(*sizes, dtype, split=bool(options))
        with torch.no_grad():
            found = [ops.attention(*given, enable_gqa=True, **options) for _ in range(20)]
        with mr.use(engine="reference"):
            plain = ops.attention(*given, enable_gqa=True, **options)
            exact = ops.attention(*map(wide, given), enable_gqa=True, **{n: wide(v) for n, v in options.items()})
        error, usual = ((t.double() - exact).square().mean().sqrt() for t in (found[-1], plain))
        assert error <= 2 * usual and all(torch.equal(found[0], t) for t in found)


def test_steps_of_a_decoder_in_a_graph():
    q, k, v = inputs(3, 8, 2, 1, 2048, 128, torch.bfloat16, split=True)
    lengths = torch.tensor([100, 1500, 2000], device="cuda")
    with torch.no_grad():
        for _ in range(3):
            ops.attention_decode(q, k, v, lengths)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ops.attention_decode(q, k, v, lengths)
        for step in (0, 1, 40):
            lengths += step
            graph.replay()
            assert torch.equal(found, ops.attention_decode(q, k, v, lengths))
