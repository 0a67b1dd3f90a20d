"""Few rows against many columns, as in decoding: kernels that read the columns once for all heads that share them."""

from unittest import mock

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines import triton as engine
from monoidreduce.engines.triton.codegen import tile_ranges
from monoidreduce.engines.triton.kernels import prepared_fold
from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.schedules import kernel_plan
from tests.support.scaled_cases import store

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_tiles(tmp_path, monkeypatch):
    """Tiles of 64 columns, and a device that they are split over; the launches that were prepared."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_plan, "FEW", {256: (64, 4, 2)})
    monkeypatch.setattr(driver, "count_processors", lambda device: 8)
    monkeypatch.setattr(prepared_fold, "_PREPARED", {})


def prepared():
    return [launch for ready in engine.prepared_folds().values() for launch in ready.launches]


def inputs(batch, heads, shared, rows, cols, split=False):
    """Queries, keys and values of 32 features; ``split``: as a projection's heads lie, [B, L, H, D]."""
    make = torch.Generator().manual_seed(3)
    shapes = (heads, rows), (shared, cols), (shared, cols)
    if split:
        return [torch.randn(batch, n, h, 32, generator=make).half().transpose(1, 2) for h, n in shapes]
    return [torch.randn(batch, h, n, 32, generator=make).half() for h, n in shapes]


def exact(*given, **options):
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in options.items()}
    with mr.use(engine="reference"):
        return ops.attention(*(t.double() for t in given), enable_gqa=True, return_lse=True, **wide)


OPTIONS = {
    "plain": ((2, 4, 2, 1, 300), {}),
    "causal, lengths": ((2, 4, 2, 3, 300), dict(causal="lower_right", lengths=torch.tensor([3, 290]))),
    "window": ((1, 6, 2, 5, 520), dict(causal="lower_right", window=(90, 0), softcap=4.0)),
    "slopes": ((2, 4, 2, 2, 300), dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.3]), causal="lower_right")),
    "one row, slopes": ((1, 4, 1, 1, 400), dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.3]), window=50)),
    "nothing seen": ((2, 2, 2, 1, 300), dict(lengths=torch.tensor([0, 300]), sinks=torch.tensor([0.1, 1.0]))),
    "upper left": ((1, 4, 4, 7, 300), dict(causal=True)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_logsumexps(name):
    sizes, options = OPTIONS[name]
    with mr.use(engine="triton"), torch.no_grad():
        for split in (False, True):
            given = inputs(*sizes, split)
            found = ops.attention(*given, enable_gqa=True, return_lse=True, **options)
            wanted = exact(*given, **options)
            torch.testing.assert_close(found.values.double(), wanted.values, rtol=0, atol=2e-3)
            torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)
            again = ops.attention(*given, enable_gqa=True, return_lse=True, **options)
            assert torch.equal(found.values, again.values)
    assert all(one.spec.few_rows for one in prepared())


def test_columns_are_read_once_for_all_heads_that_share_them():
    batch, heads, shared, rows, cols = 2, 8, 2, 1, 512
    with mr.use(engine="triton"), torch.no_grad():
        ops.attention(*inputs(batch, heads, shared, rows, cols), enable_gqa=True)
    (one,) = prepared()
    assert one.spec.grouped and one.few_rows.period == rows and one.lengths == (heads // shared * rows, cols)
    assert one.splits == 2 and one.grid == batch * shared * one.splits  # eight multiprocessors


def test_new_lengths_compute_no_table_of_tiles():
    """Lengths change at every step of a decoder: kernels look at them themselves."""
    given = inputs(2, 4, 2, 1, 300)
    with (
        mr.use(engine="triton"),
        torch.no_grad(),
        mock.patch.object(tile_ranges, "compute_tile_ranges", side_effect=AssertionError),
    ):
        for lengths in (torch.tensor([300, 7]), torch.tensor([65, 299])):
            found = ops.attention_decode(*given, lengths)
            wanted = exact(*given, causal="lower_right", lengths=lengths).values
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-3)


@mr.op
def weighted_sum(x: Row["f"], y: Col["f"], bias: mr.Batch, height: Row):
    return mr.sum(torch.where(mr.col_index >= mr.row_index * 40, torch.relu(x @ y + bias) * height, 0.0) * y)


def test_any_fold_takes_a_batch_as_rows():
    """Columns without a batch, numbers of a batch element and of a row, a condition on the row's index."""
    make = torch.Generator().manual_seed(5)
    x, y = torch.randn(5, 3, 16, generator=make).half(), torch.randn(300, 16, generator=make).half()
    bias, height = torch.randn(5, generator=make), torch.rand(5, 3, generator=make).half()
    with mr.use(engine="triton"), torch.no_grad():
        found = weighted_sum(x, y, bias, height)
    (one,) = prepared()
    assert one.spec.grouped and one.lengths[0] == 15 and one.count == 1
    with mr.use(engine="reference"):
        wanted = weighted_sum(*(t.double() for t in (x, y, bias, height)))
    torch.testing.assert_close(found.double(), wanted, rtol=3e-3, atol=3e-2)


def test_gradients_of_few_rows():
    given = [t.requires_grad_() for t in inputs(1, 4, 2, 2, 300)]
    wide = [t.detach().double().requires_grad_() for t in given]
    for tensors, name in ((given, "triton"), (wide, "reference")):
        with mr.use(engine=name):
            (ops.attention(*tensors, enable_gqa=True, causal="lower_right").double() ** 2).sum().backward()
    for t, w in zip(given, wide, strict=True):
        torch.testing.assert_close(t.grad.double(), w.grad, rtol=0, atol=4e-3 * w.grad.abs().max().item() + 2e-3)


@pytest.mark.parametrize(
    "instances, tiles, splits",
    [(8, 64, 16), (8, 4, 2), (64, 512, 2), (96, 512, 1), (80, 512, 3), (128, 512, 1), (512, 512, 1), (1, 4096, 128)],
)
def test_splits_leave_hardly_a_multiprocessor_idle(instances, tiles, splits):
    assert kernel_plan.count_few_splits(instances, tiles, 132) == splits


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda k: str(k)[6:])
@pytest.mark.parametrize("scales", ["number", "batch", "vector"])
def test_columns_in_8_bit_floats_are_multiplied_in_float16(kind, scales):
    """However large or small the rows are, which are bfloat16. Values with scales of their own stay in bfloat16."""
    q, k, v = (t.bfloat16() for t in inputs(2, 4, 2, 1, 300))
    q *= torch.tensor([1.0, 1e6, 1e-30, 0.0]).view(4, 1, 1)
    stored = [store(t.float(), kind, scales) for t in (k, v)]
    with mr.use(engine="triton"), torch.no_grad():
        found = ops.attention(q, *stored, enable_gqa=True, return_lse=True)
    wanted = exact(q, *(t.dequantize(torch.float64) for t in stored))
    torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values.double(), wanted.values, rtol=0, atol=2e-2)
    (one,) = prepared()
    assert one.spec.few_rows and one.spec.multiplies_in_float16 == (scales != "vector")
