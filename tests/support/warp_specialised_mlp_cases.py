"""Cases for warp-specialised MLP kernels: sizes, activations, strides;
run on the simulator by ``tests/interpret`` and on a GPU by ``tests/gpu``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton import KernelPlan, Rendering

ABREAST, RELAY = (
    KernelPlan(128, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED),
    KernelPlan(64, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED),
)
BY_GROUPS = {"cols": ABREAST, "rows": RELAY}
OTHERS = [  # features, types and GPUs that have no kernels by groups
    {"d": 64},
    {"d": 256},
    {"dtype": torch.float16},
    {"dtype": torch.float32},
    {"capability": 80},
]


def made(M, N, batch=(), seed=0):
    """Rows, gate, up and down, and cotangents."""
    gen = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(*batch, M, 128, generator=gen) for _ in range(2))
    weights = (torch.randn(*batch, N, 128, generator=gen) * 128**-0.5 for _ in range(3))
    return tuple(a.bfloat16() for a in (x, *weights, y))


def parts_of_one(M, N):
    """Tensors whose rows do not follow each other."""
    x, gate, up, down, y = made(M, N)
    return *torch.cat((x, x), 1).split(128, 1)[:1], *torch.cat((gate, up, down), 1).split(128, 1), y


@dataclass(frozen=True)
class Case:
    """A gated perceptron: its tensors, its activation, and how many of its kernels are grouped."""

    name: str
    make: Callable[[], tuple]
    activation: str = "silu"
    grouped: int = 3

    def __repr__(self):
        return self.name


_SIZES = [(1, 1), (64, 64), (63, 129), (200, 300), (129, 65), (700, 130)]
CASES = [
    *(Case(f"{M}x{N}", partial(made, M, N)) for M, N in _SIZES),
    *(
        Case(a, partial(made, 200, 300), a)
        for a in ("gelu", "gelu_tanh", "tanh", "relu", "elu", "leaky_relu", "hardswish")
    ),
    Case("batches", partial(made, 130, 70, (3,))),
    Case("parts of one tensor", partial(parts_of_one, 200, 130)),
]

PLAIN = [  # plain perceptrons: rows, columns, batch and activation
    *((M, N, (), "gelu_tanh") for M, N in (*_SIZES, (130, 128), (65, 513))),
    *((200, 300, (), a) for a in ("gelu", "silu", "tanh", "relu", "elu", "hardswish")),
    (130, 260, (3,), "gelu_tanh"),
]

FUNCTIONS = {
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
}


def torchs(args, y, activation):
    """The layer and its gradients, in plain torch."""
    x, gate, up, down = (a.detach().requires_grad_() for a in args)
    out = (FUNCTIONS[activation](x @ gate.mT) * (x @ up.mT)) @ down
    return out.detach(), *torch.autograd.grad(out, (x, gate, up, down), y)


def ours(args, y, activation="silu"):
    args = [a.detach().requires_grad_() for a in args]
    with mr.use(engine="triton"):
        out = ops.gated_mlp(*args, activation=activation)
        return out.detach(), *torch.autograd.grad(out, args, y)


def check(case, device):
    """Not more than twice the error of plain torch in bfloat16, both against float64; and the same again."""
    *args, y = (a.to(device) for a in case.make())
    found, again = (ours(args, y, case.activation) for _ in range(2))
    exact = torchs([a.double() for a in args], y.double(), case.activation)
    plain = torchs(args, y, case.activation)
    for got, same, right, theirs in zip(found, again, exact, plain, strict=True):
        assert torch.equal(got, same)
        allowed = max(2 * (theirs.double() - right).norm().item(), 2**-8 * right.norm().item())
        assert (got.double() - right).norm() <= allowed


def check_plain(M, N, batch, activation, device):
    """The same of a plain perceptron's forward."""
    x, p, _, q, _ = (a.to(device) for a in made(M, N, batch))
    function = FUNCTIONS[activation]
    with mr.use(engine="triton"):
        found, again = (ops.mlp(x, p, q, activation=activation) for _ in range(2))
    assert torch.equal(found, again)
    exact = function(x.double() @ p.double().mT) @ q.double()
    theirs = function(x @ p.mT) @ q
    allowed = max(2 * (theirs.double() - exact).norm().item(), 2**-8 * exact.norm().item())
    assert (found.double() - exact).norm() <= allowed


def check_infinite(device):
    """An infinite cotangent stays with the columns that are seen through a relu."""
    x, gate, up, down, y = (a.to(device) for a in made(130, 200))
    y[7, 3] = torch.inf
    exact = torchs([a.double() for a in (x, gate, up, down)], y.double(), "relu")[2]
    got = ours((x, gate, up, down), y, "relu")[2]
    rest = exact.isfinite().all(1)
    assert rest.any()
    assert got[rest].isfinite().all()
