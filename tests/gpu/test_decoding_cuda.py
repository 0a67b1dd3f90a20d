"""Few rows against many columns on a GPU: values, splits that are combined by a kernel launched early, CUDA graphs."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from tests.support import scaled_cases

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


STORED = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", STORED, ids=lambda k: str(k)[6:])
@pytest.mark.parametrize("scales", ["number", "vector"])
@pytest.mark.parametrize("paged", [False, True])
def test_stored_columns(kind, dtype, scales, paged):
    """Rows of any size: no more than twice the error of the stored numbers as plain tensors of the rows' type."""
    q, k, v = inputs(2, 8, 2, 1, 2048, 128, dtype, split=False)
    q *= (
        torch.tensor([1.0, 50.0, 1e-3, 0.0] if dtype is torch.float16 else [1.0, 1e6, 1e-30, 0.0])
        .repeat(2)[:, None, None]
        .to(q)
    )
    lengths = torch.tensor([2000, 3], device="cuda")
    if paged:
        table = torch.arange(64, device="cuda").view(2, 32)
        k, v = (t.transpose(1, 2).reshape(64, 64, 2, 128) for t in (k, v))
        call = lambda q, k, v: ops.attention_paged(q, k, v, mr.pages(table, lengths, page=64))
    else:
        call = lambda q, k, v: ops.attention(q, k, v, enable_gqa=True, lengths=lengths)
    stored = [scaled_cases.store(t.float(), kind, scales) for t in (k, v)]
    with torch.no_grad():
        found = call(q, *stored)
        assert torch.equal(found, call(q, *stored))
        with mr.use(engine="reference"):
            plain = call(q, *(t.dequantize(dtype) for t in stored))
            exact = call(q.double(), *(t.dequantize(torch.float64) for t in stored))
    error, usual = ((t.double() - exact).square().mean().sqrt() for t in (found, plain))
    assert error <= 2 * usual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", STORED, ids=lambda k: str(k)[6:])
def test_every_stored_number(kind, dtype):
    """All bytes, infinities and NaN too, as the only value that a row sees."""
    v = torch.zeros(1, 2, 512, 128, dtype=torch.int8, device="cuda")
    v[0, :, 0] = torch.arange(-128, 128, device="cuda").view(2, 128)
    v, q = v.view(kind), torch.randn(1, 8, 1, 128, device="cuda").to(dtype)
    k = torch.zeros_like(v.view(torch.int8)).view(kind)
    with torch.no_grad():
        found = ops.attention(
            q, mr.scaled(k, 1.0), mr.scaled(v, 1.0), enable_gqa=True, lengths=torch.ones(1, device="cuda").int()
        )
    wanted = v[:, :, :1].float().to(dtype).repeat_interleave(4, 1)
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
