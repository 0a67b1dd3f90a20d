"""The papers' factories: layers from tile functions, for what the pair language cannot say.

:func:`MonoidReduce` takes rows and columns apart (``proj_fold(a, b)``), :func:`mk_GeMMMapReduce` is its first form
(``proj_fold(*x)`` and one ``chunker``). Both answer a ``torch.autograd.Function`` that walks tiles forward and, by the
Local Gradient Theorem (2.1), walks the same tiles backward from the final product alone. :func:`elementwise_fold` and
:func:`elementwise_grad` are the definition that both must agree with, pair by pair.

Apart because a tile function is opaque: nothing here is traced or planned. Tile functions written in Triton get their
walk as a kernel (``engines/triton/kernels/user_kernels.py``).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree  # private, but what torch.func itself flattens its arguments with

from monoidreduce.engines import triton
from monoidreduce.errors import ArgumentError, MonoidReduceError, NoGradientError, ShapeError

from .runtime.dispatch import is_untraced

__all__ = ["MonoidReduce", "elementwise_fold", "elementwise_grad", "mk_GeMMMapReduce"]

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
Slices = Iterator[tuple[list[Tensors], list[Tensors]]]  # per tile: slices of input-like, of product-like tuples


def MonoidReduce(
    name: str,
    *,
    init: Callable[[Tensors, Tensors], Tensors],
    avals: int,
    bvals: int,
    islice: Callable[[Tensors], Iterable[Tensors]] | int,
    jslice: Callable[[Tensors], Iterable[Tensors]] | int,
    proj_fold: Callable[[Tensors, Tensors], Tensors],
    proj_fold_bwd: Callable[[Tensors, Tensors, Tensors, Tensors], tuple[Gradients, Gradients]] | None = None,
    binary_reduce: Callable[[Tensors, Tensors], Tensors],
    D: Callable[[Tensors, Tensors, Tensors], Gradients] | None = None,
) -> type[Function]:
    """A differentiable layer ``P_i = ⊙_j f(A_i, B_j)`` from tile functions; no more than a tile of pairs is ever built.

    Every argument and result below is a tuple of tensors: ``a`` (there are ``avals``, rows first), ``b`` (``bvals``,
    columns first), ``p`` (a product per row, rows first), ``gp`` (its cotangent).

    - ``init(a, b) -> p``: the identity for every row. Its dtypes are the results' dtypes, and the backward sees the
      results so rounded: give 16-bit inputs a float32 normaliser.
    - ``islice(a)``, ``jslice(b)``: the tiles, as views; ``islice`` also cuts ``p``, ``gp`` and the gradients.
    - ``proj_fold(a, b) -> p``: map and fold one tile (corollary 2.1.1's ``P^ij``).
    - ``binary_reduce(p, p) -> p``: the monoid's ⊙, row by row.
    - ``proj_fold_bwd(a, b, p, gp) -> (ga, gb)``: one tile's gradients; None where there is none (an integer input).
    - ``D(p, p_local, gp) -> gp_local``: instead of ``proj_fold_bwd``, the local gradient ``D(P^i, P^ij)`` applied to
      ``gp``; ``proj_fold`` is then differentiated by ``torch.func.vjp``. With neither, the layer is forward only.

    The tile functions may all be ``@triton.jit`` functions, of blocks in registers: ``islice`` and ``jslice`` are then
    the rows and columns of a tile (powers of two), and arguments and results stand side by side:
    ``proj_fold(*a, *b, inside)``, ``binary_reduce(*p, *p)``, ``proj_fold_bwd(*a, *b, *p, *gp, inside)`` with a gradient
    for each floating input. ``inside`` tells the pairs of a tile that exist. See ``docs/tile-functions.md``.

    Results and gradients of 16-bit types are accumulated in float32 and rounded once. Use it through
    ``.apply(*a, *b)``, which returns ``p``. Raises :class:`ArgumentError` and :class:`ShapeError` where functions and
    tensors do not fit together, :class:`NoGradientError` for a gradient (or a second one) that does not exist.

    A two-layer perceptron, equal to ``torch.relu(x @ p.T) @ q``:

    >>> tiles = lambda parts: zip(*(part.split(2) for part in parts))
    >>> Mlp = MonoidReduce(
    ...     "Mlp", avals=1, bvals=2, islice=tiles, jslice=tiles,
    ...     init=lambda a, b: (a[0].new_zeros(len(a[0]), b[1].shape[1]),),
    ...     proj_fold=lambda a, b: (torch.relu(a[0] @ b[0].T) @ b[1],),
    ...     binary_reduce=lambda x, y: (x[0] + y[0],),
    ...     D=lambda p, p_local, gp: gp,
    ... )
    >>> x, p, q = torch.ones(3, 2), torch.ones(5, 2), torch.ones(5, 1, requires_grad=True)
    >>> (y,) = Mlp.apply(x, p, q); y.sum().backward()
    >>> y.flatten().tolist(), q.grad.flatten().tolist()
    ([10.0, 10.0, 10.0], [6.0, 6.0, 6.0, 6.0, 6.0])
    """
    if avals < 1 or bvals < 1:
        raise ArgumentError(detail=f"{name}: avals is {avals}, bvals {bvals}", fix="Give each side 1 tensor or more")
    if any(map(triton.user_kernels.is_kernel, (proj_fold, proj_fold_bwd, binary_reduce))):
        if D is not None:
            raise ArgumentError(detail=f"{name} has D and @triton.jit functions", fix="Give proj_fold_bwd instead of D")
        functions = (proj_fold, binary_reduce, proj_fold_bwd)
        kernels = triton.user_kernels.Layer(name, init, (avals, bvals), (islice, jslice), *functions)  # type: ignore[arg-type]
        return _make_function(kernels, f"MonoidReduce_{name}", module=init.__module__)
    for label, cut in (("islice", islice), ("jslice", jslice)):
        if not callable(cut):
            fix = "Give a function that yields tiles; a number goes with @triton.jit functions"
            raise ArgumentError(detail=f"{name}: {label} is {cut!r}", fix=fix)

    def walk(xs: Sequence[Tensors], ps: Sequence[Tensors]) -> Slices:
        rows = _tiles("islice", islice, [x[:avals] for x in xs] + list(ps))
        cols = _tiles("jslice", jslice, [x[avals:] for x in xs])
        for row in rows:
            for col in cols:
                yield [a + b for a, b in zip(row[: len(xs)], col, strict=True)], list(row[len(xs) :])

    def tile_grad(x: Tensors, p: Tensors, gp: Tensors) -> Gradients:
        ga, gb = _check_count("proj_fold_bwd", proj_fold_bwd(x[:avals], x[avals:], p, gp), 2)  # type: ignore[misc]
        return _check_count("proj_fold_bwd's ga", ga, avals) + _check_count("proj_fold_bwd's gb", gb, bvals)

    layer = _Layer(
        name=name,
        takes=(avals + bvals, f"{avals} row and {bvals} column tensors"),
        init=lambda x: init(x[:avals], x[avals:]),
        walk=walk,
        proj_fold=lambda x: proj_fold(x[:avals], x[avals:]),
        binary_reduce=binary_reduce,
        tile_grad=tile_grad if proj_fold_bwd else None,
        D=D,
    )
    return _make_function(layer, f"MonoidReduce_{name}", module=init.__module__)


def mk_GeMMMapReduce(
    name: str,
    *,
    init: Callable[..., Tensors],
    chunker: Callable[..., Iterable[tuple[Callable[[Tensors], Tensors], Callable[[Tensors], Tensors]]]],
    proj_fold: Callable[..., Tensors],
    proj_fold_bwd: Callable[..., Gradients] | None = None,
    binary_reduce: Callable[[Tensors, Tensors], Tensors],
    D: Callable[[Tensors, Tensors, Tensors], Gradients] | None = None,
    packed: bool | None = None,
) -> type[Function]:
    """The first form of :func:`MonoidReduce`: one tuple of inputs, cut by one ``chunker``.

    - ``init(*x) -> p``, ``proj_fold(*x) -> p``, ``binary_reduce(p, p) -> p``, ``D``: as there.
    - ``chunker(*x)``: yields, per tile, ``(aslice, xslice)``: functions that cut the product and the inputs to views.
    - ``proj_fold_bwd(*x, a, ga) -> gx``: one gradient per input, None where there is none.

    A function may take the inputs packed instead: ``init(x)``, ``chunker(x)``, ``proj_fold(x)`` and
    ``proj_fold_bwd(x, a, ga)`` with ``x`` a tuple. Each function's signature decides; where there is only one input
    tensor both forms look alike, and ``packed=True`` says that ``x`` is a tuple.

    >>> def chunker(x, w):
    ...     for start in range(0, len(w), 2):
    ...         yield lambda a: a, lambda parts: (parts[0], parts[1][start : start + 2])
    >>> Lse = mk_GeMMMapReduce(
    ...     "Lse", chunker=chunker,
    ...     init=lambda x, w: (x.new_full((len(x),), -torch.inf),),
    ...     proj_fold=lambda x, w: ((x @ w.T).logsumexp(1),),
    ...     binary_reduce=lambda a, b: (torch.logaddexp(a[0], b[0]),),
    ...     D=lambda p, p_local, gp: (gp[0] * torch.exp(p_local[0] - p[0]),),
    ... )
    >>> Lse.apply(torch.zeros(1, 3), torch.zeros(5, 3))[0].exp()
    tensor([5.])
    """

    def of_tuple(function: Callable[..., Any], more: int = 0) -> Callable[..., Any]:
        alike = packed is None and len(_required(function)) == 1 + more
        return lambda x, *rest: function(x, *rest) if packed or (alike and len(x) > 1) else function(*x, *rest)

    chunks, local_grad = of_tuple(chunker), proj_fold_bwd and of_tuple(proj_fold_bwd, more=2)

    def walk(xs: Sequence[Tensors], ps: Sequence[Tensors]) -> Slices:
        # Tiles are used as they come, never listed first: a chunker's lambdas may close over its loop variable.
        for aslice, xslice in chunks(xs[0]):
            yield (
                [_check_count("the chunker's xslice", xslice(x), len(x)) for x in xs],
                [_check_count("the chunker's aslice", aslice(p), len(p)) for p in ps],
            )

    inputs = _required(proj_fold)
    layer = _Layer(
        name=name,
        takes=(len(inputs), f"{len(inputs)} tensors ({', '.join(inputs)})") if len(inputs) > 1 else None,
        init=of_tuple(init),
        walk=walk,
        proj_fold=of_tuple(proj_fold),
        binary_reduce=binary_reduce,
        tile_grad=local_grad and (lambda x, p, gp: _check_count("proj_fold_bwd", local_grad(x, p, gp), len(x))),
        D=D,
    )
    return _make_function(layer, f"GeMMMapReduce_{name}", module=init.__module__)


@dataclass(frozen=True)
class _Layer:
    """What both factories boil down to. ``x`` is the flat tuple of a tile's inputs."""

    name: str
    takes: tuple[int, str] | None  # how many tensors, in numbers and words; None: any number
    init: Callable[[Tensors], Tensors]
    walk: Callable[[Sequence[Tensors], Sequence[Tensors]], Slices]
    proj_fold: Callable[[Tensors], Tensors]
    binary_reduce: Callable[[Tensors, Tensors], Tensors]
    tile_grad: Callable[[Tensors, Tensors, Tensors], Gradients] | None
    D: Callable[[Tensors, Tensors, Tensors], Gradients] | None

    def __post_init__(self) -> None:
        if self.tile_grad and self.D:
            raise ArgumentError(detail=f"{self.name} has both proj_fold_bwd and D", fix="Give one; D derives the other")

    def forward(self, inputs: Tensors) -> Tensors:
        count, words = self.takes or (len(inputs), "tensors")
        if len(inputs) != count or not all(isinstance(x, Tensor) for x in inputs):
            raise ArgumentError(detail=f".apply was given {len(inputs)} arguments", fix=f"{self.name} takes {words}")
        identity = _check_count("init", self.init(inputs), None)
        # A copy is ours to write on, even where init expands one number or hands back an input.
        product = tuple(p.to(_wide_dtype(p), copy=True, memory_format=torch.contiguous_format) for p in identity)
        for (x,), (views,) in self.walk([inputs], [product]):
            _check_views(views, product)
            local = _widen(_check_count("proj_fold", self.proj_fold(x), len(product)))
            new = _check_count("binary_reduce", self.binary_reduce(views, local), len(product))
            for view, value in zip(views, new, strict=True):
                view.copy_(check_shape("binary_reduce", value, view))
        return tuple(p.to(like.dtype) for p, like in zip(product, identity, strict=True))

    def backward(self, inputs: Tensors, product: Tensors, given: Gradients, needs: Sequence[bool]) -> Gradients:
        if not self.tile_grad and not self.D:
            fix = "Give proj_fold_bwd=, or D= to have the backward derived; or use the result under torch.no_grad()"
            raise NoGradientError(detail=f"{self.name} was made without a backward", fix=fix)
        cotangent = tuple(torch.zeros_like(p) if g is None else g for g, p in zip(given, product, strict=True))
        # Where no gradient is wanted stands a tensor of the right shape that takes no memory.
        totals = tuple(
            torch.zeros_like(x, dtype=_wide_dtype(x)) if need else x.new_zeros(()).expand(x.shape)
            for x, need in zip(inputs, needs, strict=True)
        )
        for (x, slots), (p, gp) in self.walk([inputs, totals], [product, cotangent]):
            _check_views(slots, totals)
            if self.tile_grad:
                grads = self.tile_grad(x, p, gp)
            elif self.D:
                p_local, pullback = vjp(self.proj_fold, x, needs)
                grads = pullback(_check_count("D", self.D(_widen(p), _widen(p_local), _widen(gp)), len(p)))
            for slot, grad, need in zip(slots, grads, needs, strict=True):
                if need and grad is not None:
                    slot.add_(check_shape("the backward", grad, slot))
        return tuple(g.to(x.dtype) if need else None for g, x, need in zip(totals, inputs, needs, strict=True))


def _make_function(layer: "_Layer | triton.user_kernels.Layer", title: str, module: str) -> type[Function]:
    class TileReduce(Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Tensors:
            with _report_errors(title, inputs):
                return layer.forward(inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.arity, ctx.autocast = len(inputs), _autocast_of(inputs[0])
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(p for p in output if not differentiable(p)))
            ctx.save_for_backward(*inputs, *output)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            inputs, product = ctx.saved_tensors[: ctx.arity], ctx.saved_tensors[ctx.arity :]
            with torch.no_grad(), ctx.autocast(), _report_errors(title, inputs):
                grads = layer.backward(inputs, product, cotangents, ctx.needs_input_grad)
            # With create_graph=True, an edge to all that the gradients depend on, so that a derivative of them raises.
            ended = (layer.name, len(grads), *grads, *inputs, *cotangents)
            return _EndOfGraph.apply(*ended) if torch.is_grad_enabled() else grads

    TileReduce.__name__ = TileReduce.__qualname__ = title
    TileReduce.__module__ = module
    return TileReduce


class _EndOfGraph(Function):
    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if g is None else g.view_as(g) for g in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        fix = "Write it with @mr.op, whose gradients are programs too, or drop create_graph=True"
        raise NoGradientError(detail=f"{ctx.name} can be differentiated once, not twice", fix=fix)


@contextmanager
def _report_errors(title: str, inputs: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except MonoidReduceError as error:
        error.at(f"in {title}.apply({', '.join(map(_describe, inputs))})")
        raise


def _autocast_of(x: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast that holds now, to recompute tiles in the backward as the forward computed them."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _widen(parts: Tensors) -> Tensors:
    return tuple(part.to(_wide_dtype(part)) for part in parts)


def _tiles(label: str, cut: Any, tuples: Sequence[Tensors]) -> list[tuple[Tensors, ...]]:
    """The tiles of several tuples of tensors, side by side."""
    columns = [[_check_count(label, part, len(parts)) for part in cut(parts)] for parts in tuples]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(str(len(column)) for column in columns)
        raise ArgumentError(detail=f"{label} cut its tensors into {counts} tiles", fix="Cut by the length alone")
    return list(zip(*columns, strict=True))


def _check_count(source: str, value: Any, count: int | None) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or count not in (None, len(value)):
        expected = "a tuple of tensors, as in `return (p,)`" if count is None else f"a tuple of {count}"
        raise ArgumentError(detail=f"{source} returned {_describe(value)}", fix=f"Return {expected}")
    return tuple(value)


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the positional parameters without a default; none where any number is taken."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return []
    return [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]


def _check_views(views: Tensors, wholes: Tensors) -> None:
    with suppress(NotImplementedError):  # tensors wrapped by torch.func hide their storage
        ours, theirs = ([x.untyped_storage().data_ptr() for x in parts] for parts in (wholes, views))
        if ours != theirs:
            raise ArgumentError(detail="a tile is a copy: what is written there is lost", fix="Cut tiles with slices")


def _describe(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}{size}"


# The definition of a layer and of its gradient, pair by pair in two loops: what every faster path must agree with.
#
# Also the pullback of one tile function.

# The pullback of a function of tensors: autograd's own graph where nothing watches, ``torch.func.vjp`` inside its
# transforms.
#
# torch.func.vjp leaves a cycle of references behind, so what it made stays until the garbage is next collected: with
# one call for every tile, that is all the pairs. The plain graph goes when its last user does.

Pull = Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...]]


def _pullback_of(function: Callable[..., tuple[tuple[Tensor, ...], Any]], *leaves: Tensor) -> tuple[Pull, Any]:
    """``function`` gives (roots, anything else); its pullback from the roots to ``leaves``, and what else it gave.

    >>> pull, twice = _pullback_of(lambda x: ((x * x,), 2 * x), torch.tensor(3.0))
    >>> pull((torch.tensor(1.0),)), twice
    ((tensor(6.),), tensor(6.))
    """
    if not is_untraced():
        _, pull, rest = torch.func.vjp(function, *leaves, has_aux=True)  # type: ignore[misc]
        return pull, rest
    fresh = tuple(x.detach().requires_grad_() for x in leaves)
    with torch.enable_grad():
        roots, rest = function(*fresh)

    def back(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        pairs = [(root, g) for root, g in zip(roots, cotangents, strict=True) if root.requires_grad]
        if not pairs or not fresh:
            return (None,) * len(fresh)
        return torch.autograd.grad([r for r, _ in pairs], fresh, [g for _, g in pairs], allow_unused=True)

    return back, pytree.tree_map_only(Tensor, Tensor.detach, rest)


def elementwise_fold(monoid_id: Any, combine: Callable, f: Callable, rows: Tensors, cols: Tensors) -> list[Any]:
    """The definition, not speed: ``P_i = ⊙_j f(A_i, B_j)`` in two loops, as a list with one T-value per row.

    ``rows`` and ``cols`` are tuples of tensors; ``f`` gets the tuples of their i-th and j-th slices. A T-value is what
    ``f`` returns: a tensor, or a tuple or dict of tensors.

    >>> elementwise_fold(0.0, lambda x, y: x + y, lambda a, b: a[0] * b[0], (torch.ones(2),), (torch.arange(4.0),))
    [tensor(6.), tensor(6.)]
    """
    products = []
    for a in zip(*rows, strict=True):
        product = monoid_id
        for b in zip(*cols, strict=True):
            product = combine(product, f(a, b))
        products.append(product)
    return products


def elementwise_grad(
    D: Callable, f: Callable, rows: Tensors, cols: Tensors, products: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Gradients, Gradients]:
    """The definition of the gradient (corollary 2.1.1) in two loops: each pair sees its row's product, no other pair.

    ``D(product, h, g)`` is the cotangent of ``h = f(A_i, B_j)`` where ``g`` is that of the product. Answers the
    gradients of ``rows`` and of ``cols``, None for tensors that are not floating.

    >>> rows, cols, plus = (torch.ones(2),), (torch.arange(4.0),), lambda c, h, g: g
    >>> elementwise_grad(plus, lambda a, b: a[0] * b[0], rows, cols, [6.0, 6.0], [torch.tensor(1.0)] * 2)
    ((tensor([6., 6.]),), (tensor([2., 2., 2., 2.]),))
    """
    split = len(rows)
    needs = [differentiable(x) for x in rows + cols]
    grads = [torch.zeros_like(x) if need else None for x, need in zip(rows + cols, needs, strict=True)]
    for i, a in enumerate(zip(*rows, strict=True)):
        for j, b in enumerate(zip(*cols, strict=True)):
            h, pullback = vjp(lambda x: f(x[:split], x[split:]), a + b, needs)
            for k, local in enumerate(pullback(D(products[i], h, cotangents[i]))):
                if local is not None:
                    grads[k][i if k < split else j] += local  # type: ignore[index]
    return tuple(grads[:split]), tuple(grads[split:])


def vjp(f: Callable[[Tensors], Any], x: Tensors, needs: Sequence[bool]) -> tuple[Any, Callable[[Any], Gradients]]:
    """``f(x)`` and its pullback; ``x`` and ``f(x)`` may hold integers, which torch.func.vjp does not take."""

    def floating(*leaves: Tensor) -> tuple[Tensors, Any]:
        fresh = iter(leaves)
        h = f(tuple(next(fresh) if need else part for part, need in zip(x, needs, strict=True)))
        return tuple(part for part in pytree.tree_leaves(h) if differentiable(part)), h

    leaves = (part for part, need in zip(x, needs, strict=True) if need)
    pull, h = _pullback_of(floating, *leaves)

    def pullback(gh: Any) -> Gradients:
        pairs = zip(pytree.tree_leaves(gh), pytree.tree_leaves(h), strict=True)
        full = ((torch.zeros_like(h) if g is None else g, h) for g, h in pairs if differentiable(h))
        pulled = iter(pull(tuple(check_shape("D", g, h).to(h.dtype) for g, h in full)))
        return tuple(next(pulled) if need else None for need in needs)

    return h, pullback


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def check_shape(source: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:  # never broadcast in silence
        problem = f"{source} returned shape {list(value.shape)} for a tile of shape {list(like.shape)}"
        raise ShapeError(detail=problem, fix="Return each tensor in its tile's shape")
    return value
