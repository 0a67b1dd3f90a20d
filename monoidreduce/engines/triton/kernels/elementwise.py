"""One kernel for all arithmetic on one side between passes: a program instance takes some rows, and every feature.

The text is made of the same lines as a fold's (``expressions.py``): a number is a block ``[KEPT, 1]``, a vector
``[KEPT, features]``, and there is no folded axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr
from ....program.lower import Fold
from ...common import evaluate
from ...common.bounded_cache import BoundedCache
from ...common.evaluate import Allocator, Form, Sizes
from ...common.torch_code import Elementwise
from ..codegen import compiler
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, Unsupported, pad_width
from ..launch import driver
from ..launch.replay import Recipe
from ..schedules.kernel_plan import KernelPlan
from ..schedules.spec_from_tensors import describe_as_given
from . import fold_kernel

_WIDEST = 1024
_BLOCK = 4096  # elements of the widest vector's block
_SMALL = 2**31  # integers are passed in 32 bits below this
_TEXT = '''"""Arithmetic on one side."""

import triton
import triton.language as tl

{helpers}
@triton.jit(do_not_specialize={unspecialized!r})
def {name}({signature}):
{body}
'''


class _Lines(ExpressionWriter):
    """Vectors are blocks too; what lies beyond their features is zero where it is added up."""

    cast: tuple[int, ...] = ()  # outputs that are not written in the arithmetic's type

    def number(self, e: Expr) -> str:
        if e.op == "spread":
            return self.number(e.args[0])
        return super().number(e)

    def _text(self, e: Expr) -> str:
        if e.op == "leaf" and e.feature is not None:
            return self._vector(e)
        if e.op == "fsum":
            return f"tl.sum({self._whole(e.args[0], e.dtype)}, 1)[:, None]"
        return super()._text(e)

    def _whole(self, e: Expr, kind: str) -> str:
        """A vector as a block with all features, though they may be one number, and none beyond them."""
        _, exists = self.lanes(e)
        text = f"tl.broadcast_to({self.argument(e, kind)}, [KEPT, {pad_width(self.spec.width(e.feature))}])"
        return f"tl.where({exists}[None, :], {text}, 0)" if exists else text

    def _vector(self, e: Expr) -> str:
        name = str(e.attrs[0])
        lane, exists = self.lanes(e)
        masks = [*(["kept_in[:, None]"] if self.spec.keeps(e) else []), *([f"{exists}[None, :]"] if exists else [])]
        mask = f", mask={' & '.join(masks)}, other={self.spec.zero(e)}" if masks else ""
        rows = f" + kept_lane[:, None] * {name}_s" if self.spec.keeps(e) else ""
        text = f"tl.load({self.pointer(e)}{rows} + {lane}[None, :] * {name}_f{mask})"
        return self.to_arithmetic_type(text, e, self.spec.type_of[e])

    def lanes(self, e: Expr) -> tuple[str, str | None]:
        width = self.spec.width(e.feature)
        size = pad_width(width)
        lane = self.bind(("lane", size), f"tl.arange(0, {size}).to(INT)", False, f"lane{size}")
        return lane, self.bind(("in", width), f"{lane} < {width}", False, f"in{width}") if width != size else None

    def write_sum(self, k: int, e: Expr) -> str:
        text = f"tl.broadcast_to({self.number(e)}, [KEPT, 1])"
        return f"tl.store(out{k}, tl.sum(tl.where(kept_in[:, None], {text}, 0)))"

    def write_store(self, k: int, e: Expr) -> str:
        text = self.number(e)
        place = "(out_at + kept_lane)[:, None]"
        if e.feature is None:
            return f"tl.store(out{k} + {place}, {text}, mask=kept_in[:, None])"
        lane, exists = self.lanes(e)
        mask = "kept_in[:, None]" + (f" & {exists}[None, :]" if exists else "")
        text = f"({text}).to(out{k}.dtype.element_ty)" if k in self.cast else text
        if k in self.spec.strided:
            self.before.append(compiler.write_output_base(self.spec, k))
            return f"tl.store(out{k}_base + kept_lane[:, None] * out{k}_s + {lane}[None, :], {text}, mask={mask})"
        return f"tl.store(out{k} + {place} * {self.spec.width(e.feature)} + {lane}[None, :], {text}, mask={mask})"


@functools.lru_cache(maxsize=1024)
def _kernel(spec: Spec, outputs: tuple[Expr, ...], total: bool, cast: tuple[int, ...] = ()) -> compiler.Kernel:
    lines = _Lines(spec)
    lines.cast = cast
    stores = [(lines.write_sum if total else lines.write_store)(k, e) for k, e in enumerate(outputs)]
    names, unspecialized = compiler.list_arguments(spec, list(spec.fold.leaves), 0)
    names = [*(f"out{k}" for k in range(len(outputs))), *names]
    opening = [line for line in compiler.write_prologue(spec) if not line.startswith("folded_lane")]
    body = [*opening, *lines.before, "out_at = tl.cast(batch, tl.int64) * kept_size + tile * KEPT", *stores]
    text = "\n".join(f"    {line}" for line in body)
    helpers = "\n".join(compiler.copy_device_functions(text))
    constants = [f"{c}: tl.constexpr" for c in compiler.CONSTANTS]
    signature = ", ".join([*names, *constants])
    name = "total" if total else "side"
    whole = _TEXT.format(name=name, helpers=helpers, unspecialized=unspecialized, signature=signature, body=text)
    return compiler.Kernel(name, whole, spec.fold.leaves)


_compiled: BoundedCache[tuple, driver.Relaunch] = BoundedCache(1024)  # for sides of all lengths


class ElementwiseLaunch:
    """A side on leaves of given types, shapes, strides and alignment: its kernel, made once.

    ``total``: of its outputs, which are numbers, the sums: one program instance takes all rows, in a fixed order.
    ``types``: by their places, of vectors among the outputs that are not written in the arithmetic's type.
    ``contiguous``: outputs are, whatever the memory order of the leaves."""

    def __init__(
        self,
        side: Elementwise,
        leaves: Sequence[Any],
        sizes: Sizes,
        total: bool = False,
        types: Mapping[int, torch.dtype] | None = None,
        contiguous: bool = False,
    ):
        over = "cols" if side.axis == "rows" else "rows"
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        if any(not isinstance(v, Tensor) for v in leaves) and sizes.compute is torch.float64:
            raise Unsupported("a kernel's own numbers are float32")
        rank = len(sizes.batch)
        shape = functools.reduce(evaluate.broadcast_shapes, [tuple(v.shape[:rank]) for v in tensors] or [(1,) * rank])
        length, other = (sizes.rows, sizes.cols) if side.axis == "rows" else (sizes.cols, sizes.rows)
        forms = [((), sizes.compute) if total else self._form(e, tuple(shape), length, sizes) for e in side.outputs]
        cast = tuple(k for k, dtype in sorted((types or {}).items()) if dtype is not forms[k][1])
        forms = [(found, (types or {}).get(k, dtype)) for k, (found, dtype) in enumerate(forms)]
        strides = [
            None if total or contiguous else self._strides(e, side, leaves, form[0])
            for e, form in zip(side.outputs, forms, strict=True)
        ]
        laid = {k: found for k, found in enumerate(strides) if found is not None}
        batch, views, steps = evaluate.merge_batch_dims(
            tuple(shape), tensors, [found[:rank] for found in laid.values()]
        )
        spec = describe_as_given(Fold(side.leaves, ()), over, leaves, sizes, len(batch), strided=tuple(laid))
        widths = [pad_width(spec.width(e.feature)) for e in (*side.leaves, *side.outputs) if e.feature is not None]
        if max(widths, default=1) > _WIDEST:
            raise Unsupported("more features than a block holds")
        kept = pad_width(length) if total else max(1, _BLOCK // max([16, *widths]))
        tiles = -(-length // kept)
        self.grid = tiles * torch.Size(batch).numel()
        numbers = all(e.feature is None and e.dtype == "float" for e in side.outputs)
        alone = kept * max([1, *widths]) <= _BLOCK and torch.Size(sizes.batch).numel() == 1
        if total and not (numbers and alone):
            raise Unsupported("more rows than one program instance adds up, or other than numbers")
        self.kernel, self.plan = _kernel(spec, side.outputs, total, cast), KernelPlan(kept, 1, 4, 1)
        self.call_options: dict[str, Any] = dict(wide=True, precision="ieee", ragged=True, device=sizes.device)
        self.allocators = [Allocator(form, sizes.device, found) for form, found in zip(forms, strides, strict=True)]
        self.integers = tuple(k for k, v in enumerate(leaves) if isinstance(v, int))
        self.template = fold_kernel.ArgumentTemplate(
            [n for own, found in zip(steps, laid.values(), strict=True) for n in (*own, found[rank])]
        )
        given = iter(views)
        for k, v in enumerate(leaves):
            self.template.add_leaf(k, next(given) if isinstance(v, Tensor) else v)
        self.template.values += [length, other, tiles, *batch[1:]]
        self.relaunch: Callable[..., None] | None = None

    @staticmethod
    def _form(e: Expr, batch: tuple[int, ...], length: int, sizes: Sizes) -> Form:
        tail = () if e.feature is None else (sizes.of(str(e.feature)),)
        kind = torch.int32 if e.op in ("word", "mark") else evaluate.NUMBER_KINDS.get(e.dtype, sizes.compute)
        return (*batch, length, *tail), kind

    @staticmethod
    def _strides(e: Expr, side: Elementwise, leaves: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """A vector lies in memory as the first of the side's vectors that is given; None: contiguous."""
        given = [v for x, v in zip(side.leaves, leaves, strict=True) if x.feature is not None and isinstance(v, Tensor)]
        return None if e.feature is None or not (given and shape) else evaluate.find_strides(shape, given[0])

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        outputs = [allocate() for allocate in self.allocators]
        small = all([-_SMALL < leaves[k] < _SMALL for k in self.integers])
        relaunch = self.relaunch if small else None
        arguments = self.template.fill(leaves, by_address=relaunch is not None)
        if relaunch is not None:
            relaunch(*[t.data_ptr() for t in outputs], *arguments)
        elif self.grid:
            given = (*outputs, *arguments)
            key = (self.kernel.text, self.plan, self.call_options["device"], *driver.specialize(given))
            relaunch = driver.launch_on_grid(_compiled.get(key), self.grid, given)
            if relaunch is None:
                call = fold_kernel.KernelCall(self.kernel, self.plan, self.grid, given, **self.call_options)
                relaunch = fold_kernel.execute(call)
                if relaunch is not None:
                    _compiled.keep(key, relaunch)
            self.relaunch = relaunch if small else None
        return outputs

    def recipe(self) -> Recipe | None:
        """How it is launched again, with integers that fit in 32 bits."""
        if self.relaunch is None:
            return None
        arguments = self.template.list_recipe_arguments()
        strides = tuple(allocate.strides for allocate in self.allocators)
        return Recipe(self.relaunch, tuple(allocate.form for allocate in self.allocators), tuple(arguments), strides)
