"""The body of an op run by plain torch on whole matrices: an oracle that shares nothing with the package.

The text of a body is executed with :class:`Plain` values for its arguments and :class:`PlainReductions` for ``mr``,
so that what the package rewrites while it traces is checked too. For the tests of random programs; imports torch, and
from the package only what names a body's parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import monoidreduce as mr


class Plain:
    """A dense value that understands the text of a body: ``[*batch, rows, cols]``, and features last for a vector."""

    def __init__(self, t: torch.Tensor, vector: bool = False):
        self.t, self.vector = t, vector

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__.strip("_")
        if name in ("normalize", "norm"):
            return getattr(args[0], name)((kwargs or {}).get("p", 2))
        if name == "hardsigmoid":  # torch's own slope is 1/6 in float32, whatever the type
            return (args[0] / 6 + 0.5).clamp(0, 1)
        vector = any(isinstance(a, Plain) and a.vector for a in args)
        if name in ("floor_divide", "floordiv", "heaviside"):  # torch has no derivative for these, not even 0
            args = tuple(a.detach() if isinstance(a, Plain) else a for a in args)
        raw = [a.raised(vector) if isinstance(a, Plain) else a for a in args]
        return Plain(func(*raw, **(kwargs or {})), vector)

    def raised(self, vector: bool) -> torch.Tensor:
        return self.t.unsqueeze(-1) if vector and not self.vector else self.t

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(torch.Tensor, {"float": "double", "int": "long"}.get(name, name))
        return lambda *args, **kwargs: Plain.__torch_function__(method, (), (self, *args), kwargs)

    def sum(self) -> Plain:
        return Plain(self.t.sum(-1))

    def mean(self) -> Plain:
        return Plain(self.t.mean(-1))

    def amax(self) -> Plain:
        return Plain(self.t.max(-1).values)

    def amin(self) -> Plain:
        return Plain(self.t.min(-1).values)

    def norm(self, p: float = 2) -> Plain:
        return Plain(torch.linalg.vector_norm(self.t, p, dim=-1))

    def normalize(self, p: float = 2) -> Plain:
        return Plain(F.normalize(self.t, p, dim=-1), True)

    def __matmul__(self, other: Plain) -> Plain:
        return (self * other).sum()

    def __getitem__(self, k: int) -> Plain:
        return Plain(self.t[..., k])


def _operator(name: str) -> Callable:
    return lambda self, *args: Plain.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow floordiv mod and or xor eq ne lt le gt ge neg invert abs"
)
for _name in _OPERATORS.split():
    setattr(Plain, f"__{_name}__", _operator(f"__{_name}__"))


class PlainReductions:
    """What ``mr`` offers inside a body, on dense values."""

    monoids = mr.monoids

    def __init__(self, batch: tuple[int, ...], rows: int, cols: int):
        self.batch, self.lengths = batch, {"rows": rows, "cols": cols}
        ones = (1,) * len(batch)
        self.row_index = Plain(torch.arange(rows).view(*ones, rows, 1))
        self.col_index = Plain(torch.arange(cols).view(*ones, 1, cols))
        self.num_rows, self.num_cols = (Plain(torch.full((*ones, 1, 1), n)) for n in (rows, cols))

    def _along(self, x: Plain, over: str) -> tuple[torch.Tensor, int]:
        """The tensor with the folded axis in full, and which axis that is."""
        dim = (-1 if over == "cols" else -2) - x.vector
        shape = list(x.t.shape)
        shape[dim] = self.lengths[over]
        return x.t.expand(shape), dim

    def sum(self, x: Plain, over: str = "cols") -> Plain:
        t, dim = self._along(x, over)
        return Plain(t.sum(dim, keepdim=True), x.vector)

    def mean(self, x: Plain, over: str = "cols") -> Plain:
        return self.sum(x, over) / self.lengths[over]

    def logsumexp(self, x: Plain, over: str = "cols") -> Plain:
        return self._soft(x, over)[0]

    def _soft(self, x: Plain, over: str) -> tuple[Plain, Plain]:
        t, dim = self._along(x, over)
        if t.shape[dim] == 0:
            return Plain(t.sum(dim, keepdim=True) - torch.inf), Plain(t)
        nothing = (t == -torch.inf).all(dim, keepdim=True)
        safe = torch.where(nothing, 0.0, t)
        z = torch.where(nothing, -torch.inf, torch.logsumexp(safe, dim, keepdim=True))
        return Plain(z), Plain(torch.where(nothing, 0.0, torch.softmax(safe, dim)))

    def softmax_mean(self, logit: Plain, value: Plain, over: str = "cols") -> Plain:
        return self.sum(self._soft(logit, over)[1] * value, over)

    def weighted_mean(self, weight: Plain, value: Plain, over: str = "cols") -> Plain:
        total = self.sum(weight, over)
        return torch.where(total == 0, 0.0, self.sum(weight * value, over) / torch.where(total == 0, 1.0, total))

    def _best(self, x: Plain, over: str, largest: bool) -> tuple[Plain, Plain]:
        t, dim = self._along(x, over)
        worst = -torch.inf if largest else torch.inf
        if t.shape[dim] == 0:
            nothing = t.sum(dim, keepdim=True)
            return Plain(nothing + worst), Plain(torch.full_like(nothing, -1, dtype=torch.int64))
        values, at = t.sort(dim=dim, descending=largest, stable=True)  # the first of equals comes first
        value, at = values.narrow(dim, 0, 1), at.narrow(dim, 0, 1)
        return Plain(value), Plain(torch.where(value == worst, -1, at))

    def max(self, x: Plain, over: str = "cols") -> Plain:
        return self._best(x, over, True)[0]

    def min(self, x: Plain, over: str = "cols") -> Plain:
        return self._best(x, over, False)[0]

    def argmax(self, x: Plain, over: str = "cols") -> Plain:
        return self._best(x, over, True)[1]

    def argmin(self, x: Plain, over: str = "cols") -> Plain:
        return self._best(x, over, False)[1]

    def topk(self, x: Plain, k: int, largest: bool = True, over: str = "cols") -> Any:
        t, dim = self._along(x, over)
        values, at = t.sort(dim=dim, descending=largest, stable=True)
        at = torch.where(values == (-torch.inf if largest else torch.inf), -1, at)
        values, at = (v.narrow(dim, 0, k).movedim(dim, -1).unsqueeze(dim - 1) for v in (values, at))
        return SimpleNamespace(values=Plain(values, True), indices=Plain(at, True))

    def count(self, x: Plain, over: str = "cols") -> Plain:
        return self.sum(x.bool(), over)

    def any(self, x: Plain, over: str = "cols") -> Plain:
        return self.count(x, over) > 0

    def all(self, x: Plain, over: str = "cols") -> Plain:
        return self.count(x, over) == self.lengths[over]

    def var(self, x: Plain, correction: float = 1, over: str = "cols") -> Plain:
        t, dim = self._along(x, over)
        gap = t - t.mean(dim, keepdim=True)
        return Plain(gap.square().sum(dim, keepdim=True) / (t.shape[dim] - correction))

    def sqdist(self, x: Plain, y: Plain) -> Plain:
        return (x - y).square().sum()

    def _drawn(self, draw: Callable[..., float], seed: Any) -> Plain:
        seed = int(seed.t.item()) if isinstance(seed, Plain) else seed
        shape = (math.prod(self.batch), self.lengths["rows"], self.lengths["cols"])
        numbers = [draw(seed, *place) for place in itertools.product(*map(range, shape))]
        return Plain(torch.tensor(numbers, dtype=torch.float64).view(*self.batch, *shape[1:]))

    def uniform(self, seed: Any) -> Plain:
        return self._drawn(uniform, seed)

    def gumbel(self, seed: Any) -> Plain:
        return -torch.log(-torch.log1p(-self._drawn(ticket, seed)))

    def dropout(self, x: Plain, p: Any, seed: Any) -> Plain:
        value = p.t.flatten()[0].item() if isinstance(p, Plain) else float(p)
        least = min(max(round(value * 2**15), int(value > 0)), 2**15 - int(value < 1))
        kept = self._drawn(coin, seed) >= least
        return torch.where(kept, x / (1 - least / 2**15), 0.0) if value < 1 else x * 0 * kept

    def sample(self, logit: Plain, seed: Any, over: str = "cols") -> Plain:
        return self.argmax(logit + self.gumbel(seed), over)

    def reduce(self, monoid: type, over: str = "cols", **fields: Plain) -> Any:
        """Each monoid of these tests has a closed form."""
        name = monoid.__name__
        shape = torch.broadcast_shapes(*(x.t.shape[:-1] if x.vector else x.t.shape for x in fields.values()))
        fields = {n: Plain(x.t.expand(*shape, *x.t.shape[len(shape) :]), x.vector) for n, x in fields.items()}
        if name in ("Blend", "LogWSum", "LogSumExp"):
            values = {"z": self.logsumexp(fields["z"], over)}
            if "v" in fields:
                values["v"] = self.softmax_mean(fields["z"], fields["v"], over)
        elif name == "WSum":
            values = {"w": self.sum(fields["w"], over), "v": self.weighted_mean(fields["w"], fields["v"], over)}
        elif name == "Either":
            t, dim = self._along(fields["p"], over)
            values = {"p": Plain(1 - (1 - t).prod(dim, keepdim=True))}
        else:
            t, dim = self._along(Plain(torch.complex(fields["re"].t, fields["im"].t)), over)
            whole = t.prod(dim, keepdim=True)
            values = {"re": Plain(whole.real), "im": Plain(whole.imag)}
        return SimpleNamespace(**values)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as Salmon et al. (2011) define it, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@functools.lru_cache(maxsize=2**14)
def uniform(seed: int, batch: int, row: int, col: int) -> float:
    """The uniform number of a pair: the first word, made a number in (0, 1) in float32."""
    return _number(philox((col, row, batch, 0), (seed % 2**32, (seed >> 32) % 2**32))[0])


def _number(word: int) -> float:
    number = (np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)
    return float(min(number, np.float32(1 - 2.0**-24)))


@functools.lru_cache(maxsize=2**14)
def word(seed: int, batch: int, place: int) -> int:
    """The odd number of 32 bits of a row or column, in Python integers: shifts keep the sign of 64 bits."""
    signed = lambda n: (n + 2**63) % 2**64 - 2**63
    found = signed(place * 0x9E3779B97F4A7C15 + batch * 0xD1B54A32D192ED03) ^ seed
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        found = signed((found ^ (found >> 32)) * factor)
    return (found >> 32) % 2**32 | 1


def coin(seed: int, batch: int, row: int, col: int) -> int:
    """The 15 bits that decide whether a pair is dropped, in Python integers."""
    first, block = word(seed, batch, row), col // 128
    there = first + (first % 2**16 * 2**16 + first // 2**16) * block * 2
    low = (word(seed, 0, 2**40 + block) >> 17 | 1) * pow(13795, col // 2 % 64, 2**15) % 2**15
    return there * (word(seed, 0, -1 - col // 2) >> 15 << 15 | low) >> (16 if col % 2 else 0) & 0x7FFF


@functools.lru_cache(maxsize=2**14)
def ticket(seed: int, batch: int, row: int, col: int) -> float:
    """The uniform number from which a pair's Gumbel number is made, in Python integers."""
    low, high = seed % 2**32, (seed >> 32) % 2**32
    begin = _mixed(_hashed(low, high, batch) + row * 0x9E3779B9)
    step = _mixed(_hashed(batch, low, high) + row * 0x85EBCA6B) | 1
    return _number(_twice((begin + col * step) % 2**32))


def _twice(word: int) -> int:
    turned = lambda word, shift, factor: (word ^ (word >> shift)) * factor % 2**32
    return turned(turned(word, 16, 0x21F0AAAD), 15, 0xD35A2D97)


def _mixed(word: int) -> int:
    word = _twice(word % 2**32)
    return word ^ (word >> 15)


def _hashed(*words: int) -> int:
    return functools.reduce(lambda found, word: _mixed(found ^ word), words, 0)


def plain(op: mr.Op, arguments: dict[str, Any]) -> Callable:
    """The body of an op as a function of tensors, run by plain torch on whole matrices."""
    given = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    side = {n: op.parameters[n].axis for n in given}
    tail = {n: (side[n] in ("rows", "cols")) + (op.parameters[n].feature is not None) for n in given}
    batch = torch.broadcast_shapes(*(v.shape[: v.dim() - tail[n]] for n, v in given.items()))
    length = {
        a: next((v.shape[v.dim() - tail[n]] for n, v in given.items() if side[n] == a), 1) for a in ("rows", "cols")
    }
    shim = PlainReductions(tuple(batch), length["rows"], length["cols"])
    body = FunctionType(op.function.__code__, {**op.function.__globals__, "mr": shim})

    def wrap(name: str, v: Any) -> Plain:
        p = op.parameters[name]
        v = torch.as_tensor(v, dtype=torch.float64 if isinstance(v, float) else None)
        at = v.dim() - (p.feature is not None)  # where features begin
        v = (
            v.unsqueeze(at)
            if p.axis == "rows"
            else v.unsqueeze(at - 1)
            if p.axis == "cols"
            else v.unsqueeze(at).unsqueeze(at)
        )
        return Plain(v[(None,) * (len(batch) + 2 + (p.feature is not None) - v.dim())], p.feature is not None)

    def unwrap(x: Plain, like: torch.Tensor) -> torch.Tensor:
        return x.t.expand(*batch, *x.t.shape[len(batch) :]).reshape(like.shape)

    def run(like: list[torch.Tensor], **arguments: Any) -> list[torch.Tensor]:
        found = body(**{n: wrap(n, v) for n, v in arguments.items()})
        found = [found] if isinstance(found, Plain) else found
        return [unwrap(x, o) for x, o in zip(found, like, strict=True)]

    return run
