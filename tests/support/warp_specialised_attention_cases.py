"""Cases for warp-specialised attention: sizes, masks, strides, peaked rows;
run on the simulator by ``tests/interpret`` and on a GPU by ``tests/gpu``."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import monoidreduce as mr
from benchmarks.accuracy import inputs
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, Rendering
from monoidreduce.engines.triton.schedules import attention


def shipped(width: int) -> attention.AttentionSchedule:
    """The schedule that 16-bit heads of so many features have."""
    return next(s for s in attention.SCHEDULES if width <= s.widest and s.runs_by_default)


BY_TURNS = {"cols": KernelPlan(*shipped(128).tile, splits=1, rendering=Rendering.HAND_SCHEDULED)}


def made(M, N, batch=(2,), size=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*batch, n, 128, generator=gen) for n in (M, N, N))
    return (q * size).bfloat16(), k.bfloat16(), v.bfloat16()


@dataclass(frozen=True)
class Case:
    """Tensors for an attention, and what else it is given."""

    name: str
    make: Callable[[], tuple]
    options: dict = field(default_factory=dict)

    def on(self, device):
        args = tuple(a.to(device) for a in self.make())
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return args, moved

    def __repr__(self):
        return self.name


def _sized(M, N, **options):
    return Case(f"{M}x{N} {', '.join(options)}".strip(), lambda: made(M, N), options)


def _transposed():
    q, k, v = made(300, 200, (2, 3))
    return q.transpose(0, 1), k[:1].expand(2, 3, 200, 128).transpose(0, 1), v.transpose(0, 1)


def _rising(sign):
    """Later logits lie far above, or below, those of the first tile."""
    q, k, v = made(200, 400, size=0.1)
    here = (torch.arange(128) == 3).float()
    q, k = q + 12 * here * sign, k + torch.linspace(0, 400, 400)[:, None] * here
    return q.bfloat16(), k.bfloat16(), v


def _low():
    """Rows that see nothing in the first tile have logits 300 below what the guess is for them."""
    q, k, v = made(300, 300, size=0.1)
    here = (torch.arange(128) == 3).float()
    return (q + 12 * here).bfloat16(), (k - 25 * here).bfloat16(), v


def _far(*sizes):
    """Logits of these sizes in turn, one a tile of 128 columns, beside small ones: tanh bends, or ends, the large."""
    q, k, v = made(200, 128 * len(sizes) + 5, size=0.1)
    here = (torch.arange(128) == 3).float()
    large = torch.zeros(k.shape[-2]).index_copy(0, torch.arange(7, k.shape[-2], 128)[: len(sizes)], torch.tensor(sizes))
    return (q * (1 - here) + here).bfloat16(), (k * (1 - here) + large[:, None] * here).bfloat16(), v


def _all_at(size):
    """All logits are about as large as this."""
    q, k, v = made(200, 400, size=0.1)
    here = (torch.arange(128) == 3).float()
    return (q * (1 - here) + here).bfloat16(), (k * (1 - here) + size * here).bfloat16(), v


_ODD = [(1, 1), (59, 111), (128, 128), (129, 257), (300, 385), (64, 513)]
CASES = [
    *(_sized(M, N) for M, N in _ODD),
    *(_sized(M, N, causal=True) for M, N in ((129, 257), (385, 300), (256, 256))),
    *(_sized(M, N, causal="lower_right") for M, N in ((129, 257), (385, 200))),
    _sized(400, 400, causal=True, window=(100, 0)),
    _sized(200, 300, softcap=20.0),
    _sized(300, 300, causal=True, softcap=5.0),
    *(_sized(M, N, softcap=30.0, **o) for M, N, o in ((200, 520, {}), (520, 520, {"causal": True}))),
    _sized(200, 520, softcap=30.0, dropout_p=0.2, seed=3),
    _sized(64, 400, softcap=500.0),
    _sized(64, 400, softcap=2e4),
    *(_sized(64, 300, softcap=30.0, scale=x) for x in (0.0, -0.1, 1e-30, 1e30)),
    Case("far apart, capped", lambda: _far(0.0, 15.0, -40.0, 12.0), {"scale": 1.0, "softcap": 20.0}),
    Case("beyond, capped", lambda: _far(0.0, 2.0, 28.0, 40.0), {"scale": 1.0, "softcap": 30.0}),
    Case("beyond, capped at 20", lambda: _far(0.0, 2.0, 19.0, 27.0), {"scale": 1.0, "softcap": 20.0}),
    Case("far beyond, capped", lambda: _far(0.0, 2.0, 300.0), {"scale": 1.0, "softcap": 30.0}),
    Case("beyond at first, capped", lambda: _far(30.0, 2.0, 25.0), {"scale": 1.0, "softcap": 30.0}),
    Case("huge, capped", lambda: _far(0.0, 3e38, -3e38, 1e20, -1e20), {"scale": 1.0, "softcap": 30.0}),
    *(Case(f"all at {x}, capped", lambda x=x: _all_at(x), {"scale": 1.0, "softcap": 30.0}) for x in (1e3, -1e3, -25.0)),
    *(_sized(M, N, alibi_slopes=torch.tensor([0.1, 5.0])) for M, N in ((300, 600), (600, 300), (59, 111))),
    _sized(400, 400, causal=True, alibi_slopes=torch.tensor([0.02, 2.0])),
    _sized(520, 650, alibi_slopes=torch.tensor([-0.02, 1e-4])),
    _sized(300, 650, alibi_slopes=torch.tensor([0.0, 300.0])),
    _sized(300, 520, causal="lower_right", alibi_slopes=torch.tensor([0.02, 2.0])),
    *(_sized(650, 650, window=w, alibi_slopes=torch.tensor([0.01, -0.01])) for w in (200, (300, 100))),
    _sized(200, 520, alibi_slopes=torch.tensor([0.02, 0.5]), dropout_p=0.2, seed=3),
    Case("a slope a head", lambda: made(200, 400, (2, 3)), {"alibi_slopes": torch.tensor([0.01, 0.3, 2.0])}),
    Case("documents", lambda: made(400, 400), {"documents": torch.arange(400) // 60, "causal": True}),
    _sized(200, 300, alibi_slopes=torch.tensor([0.5, 0.1])),
    _sized(300, 300, alibi_slopes=torch.tensor([0.5, 0.1]), causal=True),
    _sized(200, 300, dropout_p=0.2, seed=3),
    _sized(200, 301, dropout_p=0.2, seed=3),  # the last column has no neighbour
    _sized(200, 130, dropout_p=0.98, seed=3),  # more than numbers of 16 bits are compared with
    _sized(300, 300, causal=True, dropout_p=0.5, seed=-(2**62)),
    _sized(100, 200, dropout_p=1.0, seed=3),
    Case("rising, dropout", lambda: _rising(1), {"scale": 1.0, "dropout_p": 0.2, "seed": 3}),
    Case("float16", lambda: tuple(a.half() for a in made(200, 300))),
    Case("float16, causal", lambda: tuple(a.half() for a in made(300, 300, size=4.0)), {"causal": True}),
    Case("transposed, shared keys", _transposed),
    Case("parts of one tensor", lambda: torch.cat(made(300, 300), -1).split(128, -1)),
    Case("rising", lambda: _rising(1), {"scale": 1.0}),
    Case("rising, causal", lambda: _rising(1), {"scale": 1.0, "causal": True}),
    Case("falling", lambda: _rising(-1), {"scale": 1.0}),
    Case("low", _low, {"scale": 1.0, "documents": torch.arange(300) // 110}),
]

CAPPED = [c for c in CASES if "softcap" in c.options and not {"causal", "dropout_p"} & set(c.options)]  # three groups


@mr.op
def leaning(q: Row["f"], k: Col["f"], v: Col["d"], slope: mr.Batch):
    """Logits rise from column to column."""
    return mr.softmax_mean(q @ k * 0.1 + slope * (mr.col_index - mr.row_index), v)


@mr.op
def lagging(q: Row["f"], k: Col["f"], v: Col["d"], slope: float):
    return mr.softmax_mean((q @ k - (mr.row_index - mr.col_index) * slope) * 0.1, v)


@mr.op
def from_columns(q: Row["f"], k: Col["f"], v: Col["d"], slope: float):
    return mr.softmax_mean(q @ k * 0.1 + (mr.col_index - mr.row_index).abs() * slope, v)


@mr.op
def capped_first(q: Row["f"], k: Col["f"], v: Col["d"], slope: mr.Batch):
    return mr.softmax_mean(5.0 * torch.tanh(q @ k * 0.02) - slope * (mr.row_index - mr.col_index).abs(), v)


@mr.op
def parted(q: Row["f"], k: Col["f"], v: Col["d"], slope: mr.Batch, low: int, high: int):
    """Whole tiles come in two runs; the tile nearest to some rows lies in the second."""
    s = q @ k * 0.1 - slope * (mr.row_index - mr.col_index).abs()
    return mr.softmax_mean(torch.where((mr.col_index < low) | (mr.col_index >= high), s, -torch.inf), v)


SLOPES = torch.tensor([0.02, 0.5])
SLANTED = {  # logits that are lines in the column, on either side of the diagonal
    "leaning": (leaning, SLOPES),
    "lagging": (lagging, 0.3),
    "from columns": (from_columns, -0.05),
    "capped first": (capped_first, SLOPES),
    "parted": (parted, SLOPES, 200, 300),
}


def check_slanted(name, device):
    """Not more than twice the error of rounding once, against float64."""
    op, *more = SLANTED[name]
    args = [a.to(device) for a in made(700, 700)]
    more = [a.to(device) if isinstance(a, torch.Tensor) else a for a in more]
    got = op(*args, *more)
    with mr.use(engine="reference"):
        exact = op(*(a.double() for a in args), *(a.double() if isinstance(a, torch.Tensor) else a for a in more))
    assert (got.double() - exact).norm() <= 2**-8 * exact.norm()


def check(case, device):
    """Not more than twice the error of plain torch in bfloat16, both against float64; what sees nothing is 0."""
    args, options = case.on(device)
    got, lse = ops.attention(*args, return_lse=True, **options)
    with mr.use(engine="reference"):
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()
        }
        exact, exact_lse = ops.attention(*(a.double() for a in args), return_lse=True, **wide)
        plain = ops.attention(*args, **options)
    allowed = max(2 * (plain.double() - exact).norm().item(), 2**-9 * exact.norm().item())
    assert (got.double() - exact).norm() <= allowed
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert not got[~seen].any()
    torch.testing.assert_close(lse[seen].double(), exact_lse[seen], rtol=1e-4, atol=1e-2)


def online_softmax(q, k, v, causal=False, tile=128):
    """Attention as FlashAttention and cuDNN compute it: weights measured from the running maximum are rounded to 16
    bits for their product, the total is not."""
    s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    top, total, mean = torch.full_like(s[..., :1], -1e30), 0.0, 0.0
    for at in range(0, s.shape[-1], tile):
        part = s[..., at : at + tile]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        weight, shrink = torch.exp(part - new), torch.exp(top - new)
        total = total * shrink + weight.sum(-1, keepdim=True)
        mean = mean * shrink + weight.to(v.dtype).float() @ v[..., at : at + tile, :].float()
        top = new
    return (mean / total).to(v.dtype)


def check_peaked(kind, device, d=128, causal=False, length=300, dtype=torch.bfloat16):
    """Where few weights dominate a row, an error of at most 1.2 times that of an online softmax (root mean square);
    the logsumexp is exact."""
    q, k, v, _ = inputs(kind, (1, length, d), dtype, device)
    got, lse = ops.attention(q, k, v, causal=causal, return_lse=True)
    with mr.use(engine="reference"):
        exact, exact_lse = ops.attention(q.double(), k.double(), v.double(), causal=causal, return_lse=True)
    ours, peers = ((x.double() - exact).square().mean().sqrt() for x in (got, online_softmax(q, k, v, causal)))
    assert ours <= 1.2 * peers + 1e-7, (kind, ours, peers)
    assert (lse.double() - exact_lse).abs().max() <= 2e-5 * exact_lse.abs().max().clamp(min=1)


def check_nan(device, **options):
    """NaN and infinity stay in their rows."""
    q, k, v = (a.to(device) for a in made(200, 150))
    q[:, 7, 3], q[:, 150, 0] = torch.nan, torch.inf
    rest = torch.tensor([i for i in range(200) if i not in (7, 150)], device=device)
    got, lse = ops.attention(q, k, v, return_lse=True, **options)
    with mr.use(engine="reference"):
        want, want_lse = ops.attention(q[:, rest].double(), k.double(), v.double(), return_lse=True, **options)
    assert got[:, 7].isnan().all() and lse[:, 7].isnan().all()
    assert (got[:, rest].double() - want).norm() <= 2**-8 * want.norm()
    torch.testing.assert_close(lse[:, rest].double(), want_lse, rtol=1e-4, atol=1e-2)
