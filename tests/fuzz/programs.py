"""One program: parameters and their data, a tree of outputs, and how it is run; its source in both renderings."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr

from . import dense
from .tree import BodyWriter, DenseWriter, Node

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Sizes:
    batch: tuple[int, ...]
    rows: int
    cols: int
    features: tuple[tuple[str, int], ...]  # letter, size

    def of(self, letter: str) -> int:
        return dict(self.features)[letter]


@dataclass(frozen=True)
class Param:
    """A parameter and the data that is given for it."""

    name: str
    axis: str  # row, col, batch, pair or number
    feature: str | None
    cls: str
    style: str  # which numbers: see ``_values``
    view: str = "plain"  # how they lie in memory: see ``dense.as_view``
    batch: str = "full"  # full, none or ones: the batch dimensions of the tensor
    grad: bool = False
    narrow: bool = False  # integers as int32; a pair's rows broadcast
    alias: str | None = None  # the parameter whose very tensor is given, where it has the shape

    @property
    def annotation(self) -> str:
        if self.axis == "number":
            return self.cls
        head = {"row": "Row", "col": "Col", "batch": "Batch", "pair": "Pair"}[self.axis]
        return head if self.feature is None else f'{head}["{self.feature}"]'

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if self.axis == "number":
            return ()
        batch = {"full": sizes.batch, "none": (), "ones": (1,) * len(sizes.batch)}[self.batch]
        rows, cols = 1 if self.narrow and self.axis == "pair" else sizes.rows, sizes.cols
        own = {"row": (rows,), "col": (cols,), "batch": (), "pair": (rows, cols)}[self.axis]
        return (*batch, *own, *(() if self.feature is None else (sizes.of(self.feature),)))

    @property
    def laid_out(self) -> str:
        """The dense layout of the argument, as text."""
        n = self.name
        if self.axis == "number":
            return f"const({n})"
        text = n
        if self.axis == "batch":
            text = f"{n}[..., None, None]" if self.feature is None else f"{n}[..., None, None, :]"
        elif self.axis == "row":
            text = f"{n}.unsqueeze({-1 if self.feature is None else -2})"
        elif self.axis == "col":
            text = f"{n}.unsqueeze({-2 if self.feature is None else -3})"
        return f"{text}.long()" if self.cls == "int" else text

    def value(self, sizes: Sizes, seed: int, dtype: torch.dtype) -> Any:
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        x = _values(self, self.shape(sizes), sizes, generator, dtype)
        if self.axis == "number":
            return x.item() if self.view != "tensor" else x.requires_grad_(self.grad)
        x = dense.as_view(x, self.view)
        return x.requires_grad_() if self.grad else x


def _values(p: Param, shape: tuple, sizes: Sizes, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if p.cls == "bool":
        return torch.rand(shape, generator=generator) < 0.6
    if p.cls == "int":
        length = {"row": sizes.cols, "col": sizes.rows}.get(p.axis, 3)
        low, high = {"label": (-2, length + 2), "small": (-3, 4), "divisor": (1, 4)}.get(p.style, (0, 4))
        offset = {"beyond 2**24": 2**24, "beyond 2**53": 2**53, "huge": 2**61}.get(p.style, 0)
        x = torch.randint(low, high, shape, generator=generator) + offset
        return x.int() if p.narrow and p.style in ("label", "small", "divisor") else x
    if p.style == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-4, 4).to(dtype)
    if p.style == "masking":
        return torch.where(torch.rand(shape, generator=generator) < 0.6, 0.0, -math.inf).to(dtype)
    scale = {"grid": 0.5, "large": 64.0, "zero": 0.0}[p.style]
    return (torch.randint(-6, 7, shape, generator=generator) * scale).to(dtype)


def param_node(p: Param) -> Node:
    bounds = {"label": 130, "small": 4, "divisor": 4, "beyond 2**24": 2**25, "beyond 2**53": 2.0**54, "huge": 2.0**62}
    bounds |= {"normal": 4, "grid": 3, "large": 384, "zero": 1, "truth": 1, "masking": 1}
    grain = {"normal": None, "grid": 0.5, "large": 64.0}.get(p.style, 1.0)
    rows, cols = p.axis in ("row", "pair"), p.axis in ("col", "pair")
    return Node("param", (), (p.name,), rows, cols, p.feature, p.cls, bounds[p.style], grain, p.style == "masking")


@dataclass(frozen=True)
class Run:
    """How a program is run: by which engine, with which tiles, through which of torch's transforms."""

    engine: str = "eager"  # auto, eager, panel, reference, triton
    tile: tuple[int, int, int] | None = None  # batch, rows and columns of a tile, by a choice that is followed
    mode: str = "plain"  # plain, repeat, checkpoint, vmap, grad, compile, inplace, total
    second: bool = False


@dataclass(frozen=True)
class Program:
    params: tuple[Param, ...]
    outputs: tuple[Node, ...]
    form: str  # single, tuple or dict: what the body returns
    sizes: Sizes
    dtype: str
    seed: int
    run: Run = field(default_factory=Run)

    def source(self) -> str:
        """The op, as a user would write it."""
        writer = BodyWriter(self.outputs)
        heads = ", ".join(f"{p.name}: {p.annotation}" for p in self.params)
        lines = [f"def program({heads}):", *(f"    {line}" for line in writer.lines())]
        return "\n".join([*lines, f"    return {self._packed(writer.returned())}", ""])

    def dense_source(self) -> str:
        """The same in plain torch: tensors of shape [..., M, N]."""
        writer = DenseWriter(self.outputs)
        lines = [
            f"def plain({', '.join(['M', 'N', 'dtype', *(p.name for p in self.params)])}):",
            "    const = lambda x: number(x, dtype)",
            "    row_index, col_index = torch.arange(M)[:, None], torch.arange(N)[None, :]",
            "    num_rows, num_cols = const(M), const(N)",
        ]
        lines += [f"    {p.name} = {p.laid_out}" for p in self.params]
        lines += [f"    {line}" for line in writer.lines()]
        return "\n".join([*lines, f"    return [{', '.join(writer.returned())}]", ""])

    def _packed(self, names: list[str]) -> str:
        if self.form == "dict":
            return "{" + ", ".join(f'"out{k}": {n}' for k, n in enumerate(names)) + "}"
        return ", ".join(names) + ("," if self.form == "tuple" and len(names) == 1 else "")

    def op(self) -> mr.Op:
        """A fresh op: nothing is kept from an earlier program or call."""
        return mr.op(_compiled(self.source(), "program"))

    def dense(self) -> Callable[..., list[Tensor]]:
        return _compiled(self.dense_source(), "plain")

    def arguments(self, dtype: torch.dtype | None = None, seed: int | None = None) -> list[Any]:
        given: dict[str, Any] = {}
        for p in self.params:
            x = p.value(self.sizes, self.seed if seed is None else seed, DTYPES[self.dtype])
            # a transform that takes gradients by argument does not add those of one tensor given twice
            other = given.get(p.alias) if p.alias and self.run.mode not in ("grad", "vmap") else None
            if (
                other is not None
                and other.shape == x.shape
                and other.dtype in (x.dtype, dtype)
                and other.requires_grad == p.grad
            ):
                x = other
            given[p.name] = x if dtype is None or x is other else _converted(x, dtype)
        return list(given.values())

    def expected(self, arguments: list[Any], dtype: torch.dtype) -> list[Tensor]:
        """The outputs by plain torch, in the documented shapes: [..., M], [..., N], [...], features last."""
        found = self.dense()(self.sizes.rows, self.sizes.cols, dtype, *arguments)
        return [shaped(x, node, self.sizes) for x, node in zip(found, self.outputs, strict=True)]

    def script(self) -> str:
        """Python source that shows the difference by itself, run from the root of the repository."""
        lines = ["import math", "import torch", "import torch.nn.functional as F", "import monoidreduce as mr"]
        lines += ["from monoidreduce import Batch, Col, Pair, Row", "from tests.fuzz.dense import *"]
        lines += ["from tests.fuzz.programs import flat, number", "", "", "@mr.op", self.source(), ""]
        lines += [self.dense_source(), ""]
        seen: dict[int, str] = {}
        for p, x in zip(self.params, self.arguments(), strict=True):
            lines.append(f"{p.name} = {seen.get(id(x)) or _literal(x, p)}")
            seen[id(x)] = p.name
        names = ", ".join(p.name for p in self.params)
        lines.append(f"# {self.run}, sizes {self.sizes}")
        how = f'mr.use(engine="{self.run.engine}")'
        if self.run.tile is not None:
            lines.append("from monoidreduce.plan.schedule import Choice, follow")
            how += f', follow(Choice("flash", (("tile", {self.run.tile}),)))'
        lines += [f"with {how}:", f"    found = flat(program({names}))"]
        lines.append(f"expected = plain({self.sizes.rows}, {self.sizes.cols}, torch.{self.dtype}, {names})")
        lines.append('print("found", found, "\\nexpected", expected)')
        inputs = ", ".join(p.name for p in self.params if p.grad)
        if inputs and any(n.cls == "float" for n in self.outputs):
            lines.append("for outputs in (found, expected):")
            lines.append("    loss = sum((y.flatten() * torch.arange(1, y.numel() + 1)).sum() for y in outputs)")
            lines.append("    if loss.requires_grad:")
            lines.append(f"        print(torch.autograd.grad(loss, [{inputs}], allow_unused=True))")
        return "\n".join(lines)


def flat(value: Any) -> list[Tensor]:
    """The tensors of what an op returns."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in (value.values() if isinstance(value, dict) else value) for t in flat(v)]


def number(x: Any, dtype: torch.dtype) -> Tensor:
    """A number as a [1, 1] tensor of the program's type for its class, so that torch's promotion is by class alone."""
    if isinstance(x, Tensor):
        whole = not x.is_floating_point() and x.dtype != torch.bool
        return x.reshape(1, 1).long() if whole else x.reshape(1, 1)
    kind = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else dtype
    return torch.full((1, 1), x, dtype=kind)


def shaped(x: Tensor, node: Node, sizes: Sizes) -> Tensor:
    """From the dense layout to the documented shape of a result."""
    own = (sizes.rows if node.rows else 1, sizes.cols if node.cols else 1)
    x = x.expand(*sizes.batch, *own, *(() if node.feature is None else x.shape[-1:]))
    cols_at = -1 if node.feature is None else -2
    if not node.rows:
        x = x.squeeze(cols_at - 1)
    return x if node.cols else x.squeeze(cols_at)


def _converted(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.dtype.is_floating_point:
        return x.detach().to(dtype).requires_grad_(x.requires_grad)
    return x


def _literal(x: Any, p: Param) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    values = str(x.tolist()).replace("inf", "math.inf").replace("nan", "math.nan")
    text = f"torch.tensor({values}, dtype={x.dtype})"
    if 0 in x.shape:
        text = f"torch.zeros({tuple(x.shape)}, dtype={x.dtype})"
    if p.view not in ("plain", "tensor"):
        text = f"as_view({text}, {p.view!r})"
    return text + (".requires_grad_()" if x.requires_grad else "")


def _compiled(source: str, name: str) -> Any:
    """A function from source, known to linecache, so that errors show its lines."""
    path = f"<fuzz {next(_NUMBERS)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope: dict[str, Any] = {"torch": torch, "F": F, "mr": mr, "math": math, "number": number}
    scope |= {n: getattr(mr, n) for n in ("Row", "Col", "Batch", "Pair")}
    scope |= {n: f for n, f in vars(dense).items() if callable(f)}
    exec(compile(source, path, "exec"), scope)
    return scope[name]


def with_run(program: Program, **changes: Any) -> Program:
    return replace(program, run=replace(program.run, **changes))
