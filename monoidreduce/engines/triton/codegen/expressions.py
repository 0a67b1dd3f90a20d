"""Expressions as lines of a kernel.

A number lives in a block that broadcasts to ``[KEPT, FOLDED]``: ``[KEPT, 1]`` where it varies along the kept axis,
``[1, FOLDED]`` where it varies along the folded axis. A vector is either a block ``[axis, features]``, for matrix
products, or is computed feature by feature (:meth:`ExpressionWriter.component`). What does not vary along the folded
axis is bound once, before the loop.

Products of vectors that are not one block times another stand behind the writer:

**K loop**: products of more features than a block holds, over some features of both operands at a time. This is a GEMM
with the fold as its epilogue: pairs exist in registers only. It serves folds to numbers (a logsumexp, an argmax, a
sample) of 16-bit vectors; sums of vectors would need as many registers as features, and use panels instead.

**Several vectors** (``program/several.py``): one matrix product for each; and extremes. The loop over the vectors is
inside the loop over tiles: a block of one of them is loaded for each product, which the compiler does ahead of it, and
the block that they are multiplied with stays for all of them.

**Close pairs**: their squared distances are computed again feature by feature: as norms and a product digits cancel.

**Packed vectors**, stored with scales for blocks of features or in 4 bits, are widened where a block is loaded. Bytes
of 4-bit numbers are loaded as they lie, and their halves interleaved. Scales of blocks are loaded once for each block
where blocks are powers of two, and repeated in registers; else once for each feature.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....program.constructors import apply
from ....program.expression import Expr, are_several, const, letters, topological, widest
from ....program.philox import DRAWS
from ....program.primitives import PRIMITIVES
from ....program.several import DOTS
from . import lookups, special_functions
from .kernel_spec import (
    BITS,
    EIGHT_BITS,
    K_LOOP_DEPTH,
    LAYER,
    LOG2E,
    TINY,
    WIDEST,
    IntegerBounds,
    Spec,
    Unsupported,
    factor_out,
    literal,
    name_descriptor,
    pad_width,
    read_across_layers,
    rounds_products,
    widen,
)

_TYPED = (  # need typed constants
    "minimum", "maximum", "remainder", "fmod", "floor_divide", "logaddexp", "pow", "xlogy", "atan2", "hypot",
    "copysign", *BITS,
)  # fmt: skip
_SMALL_POWERS = (3, 4, 5, 6, -2, -3, -4)  # written as products
# Functions with approximate forms (``quick_``, ``native_``) for 16-bit programs
_FAST = (name.removeprefix("quick_") for name in vars(special_functions) if name.startswith("quick_"))
_QUICK = re.compile(rf"(?<![\w.])(?:tl\.)?({'|'.join(_FAST)})\(")
_SCALES = ("neg", "mul", "div")  # merging their factor with log2(e) costs float32 no accuracy
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


class ExpressionWriter:
    """Writes expressions as lines: those before the loop (``before``) and those of the loop's body (``inside``).

    :meth:`number` returns the name (or literal) of a number, and appends the lines that it needs, once.
    Subclasses change where leaves come from: shared memory, one column per row, a whole row in one program instance.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.float = f"tl.{spec.compute}"
        self.integers = IntegerBounds(spec)
        self.before: list[str] = []  # lines before the loop
        self.inside: list[str] = []  # lines of the loop that is being written
        self.outer: dict[object, str] = {}  # names bound before the loop
        self.inner: dict[object, str] = {}  # names bound in the loop
        self.masked = False  # whether this loop sees tiles that the end of the folded axis cuts
        self.count = 0
        self.blocks: dict[Expr, None] = {}  # the leaves held as blocks, in order
        self.state_width = 0  # features of all accumulators that are blocks
        self.pair_features = 0  # features of all vectors that are held per pair
        self.pair_names: set[str] = set()  # names of floats per pair
        self.scalars = False  # inside a monoid's combine: plain literals only
        self.shifts: list[tuple[Expr, Expr]] = []  # of exponents, computed before the launch (``small_kernels.py``)
        self.layered: set[str] = set()  # features (or "": numbers) of deep expressions that are being bound
        self.delays_products = False  # a tile's last product may be issued with the next tile's arithmetic
        self.factors = {a for e in topological(spec.fold.reductions) if e.op in ("dot", "sqdist") for a in e.args}

    def loop(self, masked: bool) -> None:
        """Start the body of another loop; ``masked``: its tiles may reach beyond the folded axis."""
        self.inside, self.inner, self.masked = [], {}, masked

    def count_skipped(self) -> str:
        """How many folded indices lie in tiles that this program instance skips, of its split; empty where it skips
        none. The first of splits that share what is visited counts all."""
        size, split = "positions" if self.spec.listed else "folded_size", self.spec.split
        visited = "tl.maximum(tl.minimum({1} * FOLDED, " + size + ") - {0} * FOLDED, 0)"
        if self.spec.bounds:
            return f"{visited.format('begin', 'end') if split else size} - {visited.format('first', 'last')}"
        if not (self.spec.few_rows or self.spec.listed) or (self.spec.listed and not self.spec.listing.logical):
            return ""
        skipped = f"{size} - {visited.format('first', '(first + visited)')}"
        return f"tl.where(part == 0, {skipped}, 0)" if split else skipped

    def bind(self, key: object, text: str, folded: bool, name: str = "") -> str:
        """Bind ``text`` to a name, once per key; before the loop unless ``folded``. Returns the name."""
        found = self.outer.get(key) or self.inner.get(key)
        if found:
            return found
        if not name:
            name, self.count = f"v{self.count}", self.count + 1
            if folded and isinstance(key, Expr) and key.is_pair and key.dtype == "float":
                self.pair_names.add(name)
        (self.inside if folded else self.before).append(f"{name} = {text}")
        (self.inner if folded else self.outer)[key] = name
        return name

    def mask_columns(self, text: str, otherwise: str) -> str:
        """A block in which columns beyond the folded axis are replaced by ``otherwise``."""
        return f"tl.where(folded_in[None, :], {text}, {otherwise})" if self.masked else text

    def bind_masked(self, text: str, otherwise: str) -> str:
        """The same, bound to a name."""
        return self.bind((text, otherwise), self.mask_columns(text, otherwise), True) if self.masked else text

    # Numbers

    def number(self, e: Expr) -> str:
        """The text (a name or a literal) of a number."""
        found = self.outer.get(e) or self.inner.get(e)
        if found:
            return found
        if e.op in ("const", "nan"):
            value = float("nan") if e.op == "nan" else e.const
            if e.dtype == "float" and self.float == "tl.float64" and not self.scalars:
                return self.bind(e, f"tl.full([1, 1], {literal(value)}, tl.float64)", False)
            return literal(value)
        if e.depth > LAYER and "" not in self.layered:
            with self._binding_layers(""):
                for n in read_across_layers(e, lambda n: n in self.outer or n in self.inner):
                    if n.feature is None:
                        self.number(n)
        return self.bind(e, self._text(e), self.spec.folds(e), self._name(e))

    @contextmanager
    def _binding_layers(self, feature: str) -> Iterator[None]:
        self.layered.add(feature)
        yield
        self.layered.remove(feature)

    def full(self, e: Expr) -> str:
        """A number as a whole ``[KEPT, FOLDED]`` block."""
        text = self.number(e)
        kind = {"float": self.float, "int": "tl.int64", "bool": "tl.int1"}[e.dtype]
        return text if e.is_pair else self.bind((e, "full"), f"tl.zeros([KEPT, FOLDED], {kind}) + {text}", True)

    def own_place(self, target: Expr) -> str:
        """The folded index that a kept index names (a label), as a block ``[KEPT, 1]``."""
        return self.number(target)

    def divide_vectors(self, block: str, name: str) -> str:
        """Vectors divided by a number per kept index; one that is to be rounded to 16 bits is multiplied."""
        return f"{block} * (1.0 / {name})[:, None]" if self.spec.narrow else f"{block} / {name}[:, None]"

    def _name(self, e: Expr) -> str:
        return str(e.attrs[0]) if e.op == "leaf" and not self.spec.is_number(e) else ""

    def _text(self, e: Expr) -> str:
        if e.op == "leaf":
            return self._leaf(e)
        if e.op == "size":
            axis = e.attrs[0]
            if axis not in ("rows", "cols"):
                return self.spec.width_text(axis)
            return "folded_size" if axis == self.spec.over else "period" if self.spec.grouped else "kept_size"
        if e.op in ("row_index", "col_index"):
            kept = "kept_row[:, None]" if self.spec.grouped else "kept_at[:, None]"
            return "folded_at[None, :]" if self.spec.folds(e) else kept
        if e.op in ("dot", "sqdist", "fsum", "famax", "famin"):
            return self._over_features(e)
        if e.op == "cast" and e.is_pair and (distance := self._cast_distance(e)) is not None:
            return distance
        if e.op == "lookup":
            return lookups.write_lookup(self, *e.args)
        if e.op == "exp" and (self.spec.narrow or (self.spec.compute == "float32" and e.args[0].op in _SCALES)):
            return self.exp(e.args[0])
        if e.op == "mul" and self.spec.narrow and e.args[0].op == "exp" and e.args[1].op == "decay":
            return self.exp(e.args[0].args[0], e.args[1].args[0])
        if e in self.spec.vectors_of_distance:
            return write_distance(self, e)
        if e.op == "where" or (e.op == "mul" and any(a.op == "where" for a in e.args)):
            self.products(*e.args)  # before the condition: its mask would take registers during the products
        if e.op == "coin":
            return self.primitive(e, [*map(self.number, e.args[:2]), self.dropout_block(e.args[2])])
        if e.op in ("div", "tanh") and self.spec.narrow and e.is_pair:
            return self._divide_by_one_factor(e)
        return self.primitive(e, [self.argument(a, want) for a, want in zip(e.args, self._wants(e), strict=True)])

    def dropout_block(self, col: Expr) -> str:
        """Which block of 128 columns a column is in, for dropout: one number where a tile lies in one block."""
        if col.op != "col_index":
            return f"({self.number(col)} >> 7)"
        folded = self.spec.folds(col)
        first, size = ("start", "FOLDED") if folded else (self.spec.kept_start, "KEPT")
        return self.bind((col, "block"), f"block_of({first}, {self.number(col)}, {size})", folded)

    # Leaves: where they lie, and their numbers

    def base(self, e: Expr) -> str:
        """Pointer to the first element of a leaf's batch element."""
        name = str(e.attrs[0])
        batch = "".join(f" + b{k} * {self.stride(e, f'b{k}')}" for k in self.spec.kept_batch)
        return self.bind((e, "base"), f"{name}_ptr{batch}", False, f"{name}_base")

    def stride(self, e: Expr, which: str) -> str:
        """A stride of a leaf: of a batch dimension (``"b0"``), along its axis (``"s"``), of grouped rows (``"g"``)."""
        name = f"{e.attrs[0]}_{which}"
        if e not in self.spec.leaves_with_strides_of_eight:
            return name
        return self.bind((e, "stride", which), f"{name} // 8 * 8", False, f"{name}_eighths")

    def pointer(self, e: Expr) -> str:
        """Pointer to the first element of a leaf's tile, or of its batch element where it varies along no axis."""
        name, base = str(e.attrs[0]), self.base(e)
        if e.is_pair:
            kept, folded = self.pair_strides(e)
            text = f"{base} + tl.cast({self.spec.kept_start}, tl.int64) * {kept} + tl.cast(start, tl.int64) * {folded}"
            return self.bind((e, "at"), text, True, f"{name}_at")
        if self.spec.folds(e):
            group = self.spec.folded_batch_dim
            member = "" if group is None else f" + b{group} * {self.stride(e, f'b{group}')}"
            text = f"{base}{member} + tl.cast(start, tl.int64) * {self.stride(e, 's')}"
            return self.bind((e, "at"), text, True, f"{name}_at")
        if self.spec.keeps(e) and not self.spec.grouped:
            text = f"{base} + tl.cast({self.spec.kept_start}, tl.int64) * {self.stride(e, 's')}"
            return self.bind((e, "at"), text, False, f"{name}_at")
        return base

    def kept_offset(self, e: Expr, shape: str = "") -> str:
        """Where the kept indices of a tile lie from a leaf's pointer on; ``shape``: how the block is indexed."""
        if not self.spec.grouped:
            return f"kept_lane{shape} * {self.stride(e, 's')}"
        group, row = self.stride(e, "g"), self.stride(e, "s")
        return f"kept_group{shape}.to(INT) * {group} + kept_row{shape}.to(INT) * {row}"

    def pair_strides(self, e: Expr) -> tuple[str, str]:
        """The strides along the kept and the folded axis of a leaf per pair."""
        row, col = f"{e.attrs[0]}_r", f"{e.attrs[0]}_c"
        return (row, col) if self.spec.over == "cols" else (col, row)

    def _leaf(self, e: Expr) -> str:
        name, kind = str(e.attrs[0]), self.spec.type_of[e]
        if self.spec.is_number(e):
            text = f"{name}_number"
            return f"tl.cast({text}, INT)" if e.dtype == "int" else f"({text} != 0)" if e.dtype == "bool" else text
        if e.is_pair:
            kept, folded = self.pair_strides(e)
            mask = "kept_in[:, None]" + (" & folded_in[None, :]" if self.masked else "")
            place = f"{self.pointer(e)} + kept_lane[:, None] * {kept} + folded_lane[None, :] * {folded}"
            text = f"tl.load({place}, mask={mask}, other=0)"
        elif e in self.spec.descriptor_dims:
            text = f"{self.load_by_descriptor(e, 'start')}[None, :]"
        elif self.spec.folds(e):
            mask = ", mask=folded_in, other=0" if self.masked else ""
            text = f"tl.load({self.pointer(e)} + folded_lane * {name}_s{mask})[None, :]"
        elif self.spec.keeps(e):
            text = f"tl.load({self.pointer(e)} + {self.kept_offset(e)}, mask=kept_in, other=0)[:, None]"
        else:
            text = f"tl.load({self.pointer(e)})"
        return self.to_arithmetic_type(text, e, kind)

    def leaf_component(self, e: Expr, f: str) -> str:
        """Feature ``f`` of a leaf, loaded, in the type that arithmetic is done in."""
        if e.packing is not None:
            return write_component(self, e, f)
        return self.to_arithmetic_type(self.load_component(e, f), e, self.spec.type_of[e])

    def load_component(self, e: Expr, f: str) -> str:
        """Number ``f`` of each of a leaf's vectors, as it is stored."""
        name = str(e.attrs[0])
        at = f"{self.pointer(e)} + {f} * {name}_f"
        if self.spec.folds(e):
            at, shape = f"{at} + folded_lane * {name}_s", "[None, :]"
            mask = f", mask=folded_in, other={self.spec.zero(e)}" if self.masked else ""
        elif self.spec.keeps(e):
            at, shape = f"{at} + {self.kept_offset(e)}", "[:, None]"
            mask = f", mask=kept_in, other={self.spec.zero(e)}"
        else:
            shape = mask = ""
        return f"tl.load({at}{mask}){shape}"

    def axis_offset(self, e: Expr, side: str) -> str:
        """Where the vectors of a tile lie from a leaf's pointer on."""
        folded = f"folded_lane[:, None] * {self.stride(e, 's')}"
        return folded if side == "folded" else self.kept_offset(e, "[:, None]")

    def load_rows(self, e: Expr, first: str, lane: str, exists: str | None, zero: str) -> str:
        """A tile's rows of a leaf's vectors; ``first``: what is added to its pointer, ``exists``: the mask of its
        features ``lane``, ``zero``: what is read outside of masks."""
        folded = self.spec.folds(e)
        masks = [f"{'folded' if folded else 'kept'}_in[:, None]"] if not folded or self.masked else []
        masks += [f"{exists}[None, :]"] if exists else []
        mask = f", mask={' & '.join(masks)}, other={zero}" if masks else ""
        rows = self.axis_offset(e, "folded" if folded else "kept")
        return f"tl.load({self.pointer(e)}{first} + {rows} + {lane}[None, :] * {e.attrs[0]}_f{mask})"

    def to_arithmetic_type(self, text: str, e: Expr, kind: str) -> str:
        """A loaded value in the type that arithmetic is done in."""
        if e.dtype == "float":
            return text if kind == self.spec.compute else widen(text, kind, self.spec.compute)
        text = f"({text} != 0)" if e.dtype == "bool" and kind == "int32" else text
        return text if kind in ("bool", "int64", "int32") else f"{text}.to(tl.int64)"

    # Elementwise arithmetic

    def _wants(self, e: Expr) -> list[str]:
        """The number class in which a primitive takes each argument."""
        p = PRIMITIVES[e.op]
        if e.op == "where":
            return ["bool", e.dtype, e.dtype]
        if e.op in _COMPARE:
            return [widest(e.args)] * len(e.args)
        if e.op in ("cast", "detach", *DRAWS):
            return [a.dtype for a in e.args]
        if p.result == "bool":
            return ["float" if e.op in ("isnan", "isinf") else "bool"] * len(e.args)
        if e.dtype == "bool" and e.op != "mul":
            raise Unsupported(f"{e.op} of truth values")
        return [e.dtype] * len(e.args)

    def argument(self, a: Expr, want: str) -> str:
        """A number in the class (float, int, bool) that its reader wants."""
        if a.dtype == want:
            return self.number(a)
        return self.index_distance(a, want) or self.convert(self.number(a), a, want)

    def convert(self, text: str, a: Expr, want: str) -> str:
        """A number of one class as one of another."""
        if a.dtype == want:
            return text
        if a.op == "const":
            return self.number(const({"float": float, "int": int, "bool": bool}[want](a.const)))
        if want == "bool":
            return f"({text} != 0)"
        return f"{text}.to({self.float})" if want == "float" else f"{text}.to(tl.int{32 if a.dtype == 'bool' else 64})"

    def primitive(self, e: Expr, args: list[str]) -> str:
        """The text of a primitive on the texts of its arguments."""
        p = PRIMITIVES[e.op]
        if not p.triton or (e.op == "polygamma" and e.attrs[0] > 2):
            raise Unsupported(f"{e.op} has no Triton text")
        if e.op == "cast":
            return self.convert(args[0], e.args[0], e.attrs[0])
        if e.op == "nan_to_num":
            most = torch.finfo(getattr(torch, self.spec.compute)).max
            fill = [literal(d if v is None else v) for v, d in zip(e.attrs, (0.0, most, -most), strict=True)]
            return p.triton.format(args[0], **dict(zip(p.attributes, fill, strict=True)))
        if e.dtype == "int" and e.op in ("floor", "ceil", "round", "trunc"):
            return args[0]
        if e.op == "pow" and e.args[1].const in _SMALL_POWERS:
            product = " * ".join([args[0]] * abs(int(e.args[1].const)))
            return product if e.args[1].const > 0 else f"1.0 / ({product})"
        if e.op in _TYPED:
            args = [self._type_constant(t, a, e) for t, a in zip(args, e.args, strict=True)]
        args = self.integers.arguments(e, args)
        if e.op == "mul" and e.dtype == "bool":
            return f"{args[0]} & {args[1]}"
        if e.op in ("div", "reciprocal") and self._divides_exactly(e):
            return f"tl.div_rn({', '.join(args if e.op == 'div' else ('1.0', *args))})"
        if e.op in ("div", "reciprocal") and self.spec.narrow and e.dtype == "float" and e.args[-1].is_pair:
            form = "native" if self.spec.native else "quick"  # once for all that is divided by it
            over = self.bind((args[-1], "reciprocal"), f"{form}_reciprocal({args[-1]})", True)
            self.pair_names.add(over)
            return over if e.op == "reciprocal" else f"{args[0]} * {over}"
        if e.op == "uniform":
            return f"{p.triton.format(*args)}.to({self.float})"
        if e.op == "gumbel":
            args.append(self.float)
        attributes = {k: v if isinstance(v, str) else literal(v) for k, v in zip(p.attributes, e.attrs, strict=True)}
        text = p.triton.format(*args, **attributes)
        return _QUICK.sub(r"native_\1(" if self.spec.native else r"quick_\1(", text) if self.spec.narrow else text

    def _divides_exactly(self, e: Expr) -> bool:
        """True where a division is rounded correctly, as in torch. The GPU's own float32 division may be off by two
        units in the last place, which triples the error of the weights made from a logit. Not where all pairs share one
        divisor (a bandwidth)."""
        single = self.spec.compute == "float32" and not self.spec.narrow and all(a.dtype == "float" for a in e.args)
        return single and (e.args[-1].rows or e.args[-1].cols)

    def _type_constant(self, text: str, a: Expr, e: Expr) -> str:
        """A constant argument as a tensor of the result's type; other arguments as they are."""
        if a.op != "const" or (self.float == "tl.float64" and e.dtype == "float" and not self.scalars):
            return text
        kind = self.float if e.dtype == "float" else "tl.int32" if abs(a.const) < 2**31 else "tl.int64"
        return f"tl.full({'()' if self.scalars else '[1, 1]'}, {text}, {kind})"

    # Exponentials, as powers of two

    def exp(self, x: Expr, total: Expr | None = None) -> str:
        """``exp(x)`` as exp2: constant factors and log2(e) become one factor, one-sided terms are scaled once per row
        or column.

        Only with 16-bit products: a fused multiply-subtract of large logits costs float32 its last digits.
        ``total``: the logarithm of what the exponential is divided by; it is added to the one-sided term.
        """
        if total is not None:
            one_sided = x.op == "sub" and x.is_pair and not x.args[1].is_pair
            if not one_sided or self.spec.folds(x.args[1]) != self.spec.folds(total):
                return f"{self.exp(x)} * decay({self.number(total)})"
            core, factor = self.linear(x.args[0])
            pair = self.argument(core, "float")  # first: one-sided numbers are loaded while it is computed
            if self.spec.precomputed_shifts and self.spec.folds(total) and x.args[1].op == total.op == "leaf":
                return f"tl.exp2({pair} * {factor} - {self._shift(x.args[1], total)})"
            shift = f"({self.number(x.args[1])} + unseen({self.number(total)})) * {literal(LOG2E)}"
            shift = self.bind((x.args[1], total, "log2"), shift, self.spec.folds(total))
            return f"tl.exp2({pair} * {factor} - {shift})"
        if x.op in ("sub", "add") and (x.args[0].is_pair != x.args[1].is_pair) and x.is_pair:
            parts = []
            for a in x.args:
                core, factor = self.linear(a) if a.is_pair else (a, self.factor(LOG2E))
                text = f"{self.argument(core, 'float')} * {factor}"
                parts.append(text if a.is_pair else self.bind((a, "log2"), text, self.spec.folds(a)))
            return f"tl.exp2({parts[0]} {'-' if x.op == 'sub' else '+'} {parts[1]})"
        core, factor = self.linear(x)
        return f"tl.exp2({self.argument(core, 'float')} * {factor})"

    def _shift(self, number: Expr, total: Expr) -> str:
        """(number + the logarithm of a total) × log2(e), which the launch computed beforehand."""
        if (number, total) not in self.shifts:
            self.shifts.append((number, total))
        name = f"shift{self.shifts.index((number, total))}"
        if self.spec.shift_descriptors:
            batch = self.spec.batch_number()
            text = f"tl.reshape({name}_box.load([tl.cast({batch}, tl.int32), start]), [FOLDED])[None, :]"
            return self.bind(name, text, True, name)
        base = f"{name}_ptr + tl.cast({self.spec.batch_number()}, tl.int64) * folded_size"
        base = self.bind((name, "base"), base, self.spec.folded_batch_dim is not None, f"{name}_base")
        mask = ", mask=folded_in, other=0" if self.masked else ""
        return self.bind(name, f"tl.load({base} + start + folded_lane{mask})[None, :]", True, name)

    def linear(self, e: Expr, positive: bool = False, unit: float = LOG2E) -> tuple[Expr, str]:
        """``e * unit`` as ``(core, factor)``: the factor is known before the loop, so pairs multiply once.

        ``positive``: only factors above zero are taken out.
        """
        core, factor, numbers = factor_out(e, self.spec, positive)
        return core, self.factor(factor * unit, *numbers)

    def _divide_by_one_factor(self, e: Expr) -> str:
        """A quotient, or a tanh, of pairs: what pairs are divided by becomes one factor, computed before the loop."""
        whole = e if e.op == "div" else e.args[0]
        core, factor = self.linear(whole, unit=1.0)
        text = None if core is whole or factor == "1.0" else f"{self.argument(core, 'float')} * {factor}"
        if e.op == "div":
            return text or self.primitive(e, [self.argument(a, "float") for a in e.args])
        return self.primitive(e, [text or self.argument(whole, "float")])

    def factor(self, constant: float, *numbers: tuple[Expr, bool]) -> str:
        """A constant times (or divided by, where True) numbers, as a literal or a name bound before the loop."""
        if not numbers:
            return literal(constant)
        text = literal(constant) + "".join(f" {'/' if over else '*'} {self.number(k)}" for k, over in numbers)
        return self.bind(("factor", constant, numbers), text, False)

    # Distances of indices

    def index_distance(self, a: Expr, want: str) -> str | None:
        """``i - j`` or ``|i - j|`` of a kept and a folded index as float32; None for anything else.

        Both count from the tile's first index, which float32 holds exactly; beyond 2²⁴ a distance is rounded anyway."""
        if want != "float" or self.spec.narrow is None:
            return None
        if a.op == "abs":
            distance = self.index_distance(a.args[0], want)
            return distance and f"tl.abs({distance})"
        if a.op != "sub" or a.args[1].op not in ("row_index", "col_index"):
            return None
        at, index = a.args
        if not self.spec.folds(index) or not self.spec.keeps(at) or self.spec.folds(at):
            return None
        return self.bind((a, "gap"), self.index_gap(self.number(at)), True)

    def _cast_distance(self, e: Expr) -> str | None:
        """``(i - j).abs().float()`` or ``(i - j).float()`` as float32; None for anything else."""
        (a,) = e.args
        if e.dtype != "float" or (found := self.index_distance(a, "float")) is not None:
            return found if e.dtype == "float" else None
        if a.op == "abs" and a.args[0].op == "sub":  # the other way round
            return self.index_distance(apply("abs", apply("sub", *a.args[0].args[::-1])), "float")
        return None

    def index_gap(self, at: str) -> str:
        """Kept indices minus the folded indices of a tile, as float32."""
        return f"({at} - start).to(tl.float32) - folded_lane.to(tl.float32)[None, :]"

    # Vectors, feature by feature

    def component(self, e: Expr, f: str) -> str:
        """Feature ``f`` (a literal or a loop's name) of a vector, as a number."""
        if e.feature is None:
            return self.number(e)
        key = (e, f)
        found = self.outer.get(key) or self.inner.get(key)
        if found:
            return found
        folded = self.spec.folds(e) or not f.isdigit()
        if e.op == "spread":
            return self.number(e.args[0])
        if e.op == "leaf":
            return self.bind(key, self.leaf_component(e, f), folded, f"{e.attrs[0]}_{f}")
        if e.op == "einsum":
            return self.bind(key, write_products(self, e, f), True)
        if e.depth > LAYER and f not in self.layered:
            with self._binding_layers(f):
                for n in read_across_layers(
                    e, lambda n: n.feature is None or (n, f) in self.outer or (n, f) in self.inner
                ):
                    self.component(n, f)
        args = [self.convert(self.component(a, f), a, want) for a, want in zip(e.args, self._wants(e), strict=True)]
        return self.bind(key, self.primitive(e, args), folded)

    @contextmanager
    def walk(self, width: int) -> Iterator[str]:
        """The body of a loop over features; yields the feature's name. What it binds is dropped after it."""
        lines, names = self.inside, self.inner
        f, self.count = f"f{self.count}", self.count + 1
        self.inside, self.inner = [], dict(names)
        yield f
        lines += [f"for {f} in range(0, {width}):", *(f"    {line}" for line in self.inside)]
        self.inside, self.inner = lines, names

    def _walk_features(self, vector: Expr, part: Callable[[str], str], e: Expr) -> str:
        """The sum of ``part(f)`` over the features of a vector: unrolled where they are few, else by a loop."""
        width = self.spec.width(vector.feature)
        self.prepare_walk(vector)
        kind = self.float if e.dtype == "float" else "tl.int64"
        if e.op in ("famax", "famin"):
            return write_extreme(self, e, kind, width)
        if not width:  # a sum of no features
            return f"tl.zeros([KEPT, FOLDED], {kind})"
        if width <= TINY:
            return " + ".join(part(str(f)) for f in range(width))
        total = self.bind((e, "total"), f"tl.zeros([KEPT, FOLDED], {kind})", True)
        with self.walk(width) as f:
            self.inside.append(f"{total} += {part(f)}")
        return total

    def prepare_walk(self, vector: Expr) -> None:
        """Bind what a vector per pair is made of and what is the same for all its features, before a loop over them."""
        for n in topological([vector], stop=lambda n: n.feature is None):
            if n.feature is None:
                self.number(n)
            elif n.op == "einsum":
                for a in n.args:
                    if a.op == "leaf" and not are_several(a) and self.spec.width(a.feature) <= WIDEST:
                        self.block(a)

    def _over_features(self, e: Expr) -> str:
        """A number per pair made from vectors: by a matrix product where it is one, else feature by feature."""
        if e.op in ("fsum", "famax", "famin"):
            return self._walk_features(e.args[0], lambda f: self.component(e.args[0], f), e)
        x, y = e.args
        leaves = x.op == y.op == "leaf"
        if self.spec.width(x.feature) > TINY and e.dtype == "float" and leaves:
            if e.op == "dot":
                return self.product(x, y)
            norms = [self._norm(v) for v in (x, y)]
            square = f"tl.maximum({norms[0]} + {norms[1]} - 2.0 * {self.product(x, y)}, 0.0)"
            if self.spec.narrow:  # products of 16-bit numbers are exact: cancellation costs less than their rounding
                return square
            name = self.bind((e, "square"), square, True)
            if self.spec.exact:
                recompute(self, e, name, norms)
            return name

        def factors(f: str) -> tuple[str, str]:
            a, b = self.component(x, f), self.component(y, f)
            if e.op == "dot":
                return a, b
            gap = self.bind((e, f, "gap"), f"{a} - {b}", True)
            return gap, gap

        width = self.spec.width(x.feature)
        if e.dtype == "float" and 0 < width <= TINY and self.spec.compares_pairs:
            self.prepare_walk(x)
            text = " * ".join(factors("0"))
            for f in range(1, width):  # by now the compiler has nothing to decide on
                text = f"tl.fma({', '.join(factors(str(f)))}, {text})"
            return text
        return self._walk_features(x, lambda f: " * ".join(factors(f)), e)

    def _norm(self, v: Expr) -> str:
        """The squared norm of a leaf's vectors."""
        axis = "[None, :]" if self.spec.folds(v) else "[:, None]"
        block = self.block(v)
        text = f"tl.sum({block}.to({self.float}) * {block}.to({self.float}), 1){axis}"
        return self.bind((v, "norm"), text, self.spec.folds(v))

    # Vectors as blocks, and their matrix products

    def product(self, x: Expr, y: Expr) -> str:
        """⟨x_i, y_j⟩ as one matrix product, the kept axis on the left."""
        kept, folded = (y, x) if self.spec.folds(x) else (x, y)
        if self.spec.k_loop and self.spec.width(x.feature) > WIDEST:
            return write_product(self, kept, folded)
        if self.spec.pieces:
            across = {2: "halves_across", 3: "thirds_across"}[self.spec.pieces]
            return f"{across}({self.split_blocks(kept)}, {self.split_blocks(folded)})"
        text, kind = "", self.spec.multiplies_eight_bits(kept, folded)
        options = f", out_dtype=tl.{kind}" if kind else self.options()
        for at in self.spec.slices(x.feature):
            more = f", acc={text}" if text else ""
            blocks = [self.block(e, at=at, stored=bool(kind)) for e in (kept, folded)]
            text = f"tl.dot({blocks[0]}, tl.trans({blocks[1]}){more}{options})"
        if self.spec.multiplies_in_float16:
            return f"{text} * {load_kept(self, kept)[1]}[:, None]"
        return f"{text}.to(tl.float32)" if kind == "int32" else text

    def products(self, *roots: Expr) -> None:
        """Bind the matrix products of expressions first, before arithmetic that would hold registers meanwhile."""
        for n in topological(roots):
            if n.op == "dot" and self.spec.width(n.args[0].feature) > TINY:
                self.number(n)

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        """A block's feature indices, and the mask of those that may be read (None: all); ``room``: how many may, if
        more."""
        width = self.spec.width(feature)
        if width > WIDEST:
            raise Unsupported(f"vectors of {width} features, more than {WIDEST}")
        return self.slice_lane(pad_width(width), room or width)

    def slice_lane(self, size: int, width: int) -> tuple[str, str | None]:
        """The same of a block of ``size`` features, of which ``width`` may be read."""
        lane = self.bind(("lane", size), f"tl.arange(0, {size}).to(INT)", False, f"lane{size}")
        key = ("in", width) if size == pad_width(width) else ("in", width, size)  # slices may be wider than is padded
        name = f"in{width}" if size == pad_width(width) else f"in{width}_of_{size}"
        return lane, self.bind(key, f"{lane} < {width}", False, name) if width < size else None

    def block(self, e: Expr, piece: int | None = None, at: tuple[int, int] | None = None, stored: bool = False) -> str:
        """A leaf's vectors ``[axis, features]`` in the operand type, or as they are ``stored``.

        ``piece``: one 16-bit part of float32 vectors; ``at``: one slice of the features (``Spec.slices``)."""
        name, kind = str(e.attrs[0]), self.spec.type_of[e]
        name, folded = f"{name}_block" if piece is None else f"{name}_block_{piece}", self.spec.folds(e)
        name = f"{name}_stored" if stored else name
        self.blocks[e] = None
        width = self.spec.width(e.feature)
        whole, first = pad_width(width), (piece or 0) * pad_width(width)
        if at is None or at[1] == whole:
            lane, exists = self.lane(e.feature, self.spec.padded_width_of[e])
        else:
            first, size = at
            lane, exists = self.slice_lane(size, (self.spec.padded_width_of[e] or width) - first)
            name = f"{name}_{first}" if first else name
        key = (e, "stored block" if stored else "block", piece, first)
        wanted = self.operand_type() if piece is None and not stored else kind
        if folded and e in self.spec.descriptor_dims:
            text = self.load_by_descriptor(e, "start", str(first))
            text = widen_block(self.spec, e, text, kind, wanted) if kind in EIGHT_BITS and kind != wanted else text
            return self.bind(key, text, True, name)
        if e.packing is not None:
            size = whole if at is None else at[1]
            text = write_block(self, e, str(first), size, wanted)
            return self.bind(key, text, folded, name)
        if self.spec.multiplies_in_float16 and not folded:
            loaded, unit = load_kept(self, e)
            return self.bind(key, f"({loaded} / {unit}[:, None]).to(tl.float16)", False, name)
        stride = "" if piece is not None else f" * {e.attrs[0]}_f"  # parts of float32 vectors are contiguous
        text = self.load_rows(e, f" + {first}{stride}" if first else "", lane, exists, self.spec.zero(e))
        text = text if kind == wanted else widen_block(self.spec, e, text, kind, wanted)
        return self.bind(key, text, folded, name)

    def split_blocks(self, e: Expr) -> str:
        """The 16-bit parts of a leaf's split float32 vectors, as arguments."""
        return ", ".join(self.block(e, k) for k in range(self.spec.pieces))

    def load_by_descriptor(self, e: Expr, start: str, feature: str = "0") -> str:
        """A block of a leaf's vectors (from a feature on) or numbers, from index ``start``, by its descriptor."""
        dims = self.spec.descriptor_dims[e]
        group = "gone_group" if start == "gone" else f"b{self.spec.folded_batch_dim}"
        at = "".join(f"tl.cast({group if k == self.spec.folded_batch_dim else f'b{k}'}, tl.int32), " for k in dims)
        if e.feature is None:
            text = f"{e.attrs[0]}_box.load([{at}{start}])"
            return f"tl.reshape({text}, [FOLDED])" if dims else text
        width, slices = self.spec.width(e.feature), self.spec.descriptor_slices(e)
        place = next((k for k, (first, _) in enumerate(slices) if str(first) == feature), 0)
        text = f"{name_descriptor(str(e.attrs[0]), place)}.load([{at}{start}, {feature}])"
        size = K_LOOP_DEPTH if width > WIDEST else slices[place][1]
        shape = f"[{'FOLDED' if self.spec.folds(e) else 'KEPT'}, {size}]"
        return f"tl.reshape({text}, {shape})" if dims else text

    def add_product(self, total: str, weight: str, block: str) -> str:
        """A line that adds a tile's Σ_j weight_ij × vector_j to a running sum."""
        return f"{total} = tl.dot({weight}, {block}, acc={total}{self.options()})"

    def operand_type(self) -> str:
        """The type of matrix products' operands."""
        return "float16" if self.spec.multiplies_in_float16 else self.spec.narrow or self.spec.compute

    def options(self) -> str:
        """Further arguments of ``tl.dot``: precision or type of the accumulator."""
        kind = self.operand_type()
        return {"float64": ", out_dtype=tl.float64", "float32": ", input_precision=PRECISION"}.get(kind, "")


# K loops: products of more features than a block holds, over some features of both operands at a time


def product_key(kept: Expr, folded: Expr) -> tuple:
    """The key under which a product is bound in a loop's body."""
    return kept, folded, "K loop"


def write_product(v: ExpressionWriter, kept: Expr, folded: Expr) -> str:
    """Write the loop over a product's features; returns the name that holds the product."""
    found = v.inner.get(product_key(kept, folded))
    if found:
        return found
    kind = v.spec.multiplies_eight_bits(kept, folded)
    total = v.bind(product_key(kept, folded), f"tl.zeros([KEPT, FOLDED], tl.{kind or 'float32'})", True)
    if kept in v.spec.descriptor_dims and folded in v.spec.descriptor_dims:
        blocks = [v.load_by_descriptor(kept, "tile * KEPT", "d"), v.load_by_descriptor(folded, "start", "d")]
        v.inside += _write_loop(total, v.spec.width(kept.feature), blocks, kind)
    else:
        _by_pointers(v, kept, folded, total, kind)
    if kind == "int32":
        v.inside.append(f"{total} = {total}.to(tl.float32)")
    if rounds_products(v.spec):
        v.inside.append(write_rounding(total))
    return total


def write_rounding(total: str) -> str:
    return f"{total} = {total}.to(tl.bfloat16).to(tl.float32)  # as a panel would hold it"


def _write_loop(total: str, width: int, blocks: list[str], eight: str = "") -> list[str]:
    return [f"for d in range(0, {width}, {K_LOOP_DEPTH}):", f"    {write_dot(total, blocks, eight)}"]


def write_dot(total: str, blocks: list[str], eight: str = "") -> str:
    """A line that adds the product of two blocks to a total.

    ``eight``: the type of sums of 8-bit products. Hopper adds FP8 products up in 22 bits; after each block they are
    added in float32."""
    options = {"int32": ", out_dtype=tl.int32", "float32": f", max_num_imprecise_acc={K_LOOP_DEPTH}"}.get(eight, "")
    return f"{total} = tl.dot({blocks[0]}, tl.trans({blocks[1]}), acc={total}{options})"


def _by_pointers(v: ExpressionWriter, kept: Expr, folded: Expr, total: str, eight: str) -> None:
    width = v.spec.width(kept.feature)
    lane = v.bind(("lane", K_LOOP_DEPTH), f"tl.arange(0, {K_LOOP_DEPTH}).to(INT)", False, f"lane{K_LOOP_DEPTH}")
    sides, whole = ((kept, "kept"), (folded, "folded")), width // K_LOOP_DEPTH * K_LOOP_DEPTH
    blocks = [_make_block_writer(v, e, side, lane, bool(eight)) for e, side in sides]
    v.inside += _write_loop(total, whole, [block("d", "") for block in blocks], eight)
    if width > whole:
        mask = f", mask=({lane} < {width - whole})[None, :], other="
        ends = [block(str(whole), mask + v.spec.zero(e)) for block, (e, _) in zip(blocks, sides, strict=True)]
        v.inside.append(write_dot(total, ends, eight))


def _place_vectors(v: ExpressionWriter, e: Expr, side: str, lane: str) -> tuple[str, str, str]:
    """Where the vectors of a tile begin (what lies beyond the end reads the last), their stride, their type."""
    name, outside = str(e.attrs[0]), side == "kept" or v.masked
    at = f"tl.minimum({side}_at, {side}_size - 1)" if outside else f"{side}_at"
    text = f"{v.base(e)} + {at}.to(tl.int64)[:, None] * {name}_s + {lane}[None, :] * {name}_f"
    return v.bind((e, "vectors"), text, side == "folded", f"{name}_vectors"), f"{name}_f", v.spec.type_of[e]


def _make_block_writer(v: ExpressionWriter, e: Expr, side: str, lane: str, stored: bool) -> Callable[[str, str], str]:
    """What writes a block of a tile's vectors, from a feature on and with a mask; ``stored``: as they are stored."""
    wanted = v.operand_type()
    if e.packing is not None:
        return lambda at, mask: write_block(v, e, at, K_LOOP_DEPTH, wanted)
    vectors, stride, kind = _place_vectors(v, e, side, lane)

    def write(at: str, mask: str) -> str:
        text = f"tl.load({vectors} + {at} * {stride}{mask})"
        return text if stored or kind == wanted else widen_block(v.spec, e, text, kind, wanted)

    return write


# Several vectors: one matrix product for each


def write_products(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Number ``f`` of the products of several vectors with one, or with as many, for all pairs of a tile."""
    if e.attrs[0] not in DOTS or any(a.op != "leaf" for a in e.args):
        raise Unsupported("products of several vectors that are computed in the tile")
    if v.spec.listed:
        raise Unsupported("products of several vectors over lists of columns")
    kept, folded = e.args[::-1] if v.spec.folds(e.args[0]) else e.args
    return f"tl.dot({load_one_vector(v, kept, f)}, tl.trans({load_one_vector(v, folded, f)}){v.options()})"


def load_one_vector(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Vector ``f`` of several, as a block ``[axis, features]``; of one vector, its block."""
    if not are_several(e):
        return v.block(e)
    width, name = v.spec.width(letters(e.feature)[1]), str(e.attrs[0])
    if width > WIDEST:
        raise Unsupported(f"vectors of {width} features, more than {WIDEST}")
    v.blocks[e] = None
    lane, exists = v.slice_lane(pad_width(width), width)
    text = v.load_rows(e, f" + {f} * {width} * {name}_f", lane, exists, "0")
    text = text if v.spec.type_of[e] == v.operand_type() else f"{text}.to(tl.{v.operand_type()})"
    return v.bind((e, "one of", f), text, True)


def write_extreme(v: ExpressionWriter, e: Expr, kind: str, width: int) -> str:
    """The largest or the smallest feature of a vector per pair; NaN where one is."""
    (vector,) = e.args
    if e.dtype == "bool":
        raise Unsupported("extremes of truth values")
    join = PRIMITIVES["maximum" if e.op == "famax" else "minimum"].triton
    if width <= TINY:
        text = v.component(vector, "0")
        for k in range(1, width):
            text = join.format(text, v.component(vector, str(k)))
        return text
    sign = -1 if e.op == "famax" else 1
    first = literal(sign * math.inf) if e.dtype == "float" else str(sign * (2**63 - 1))
    best = v.bind((e, "best"), f"tl.full([KEPT, FOLDED], {first}, {kind})", True)
    with v.walk(width) as f:
        v.inside.append(f"{best} = {join.format(best, v.component(vector, f))}")
    return best


# Squared distances of close pairs, computed again feature by feature: as norms and a product their digits cancel.

CLOSE = 0.05  # a squared distance below this share of the squared norms has lost more than a digit to cancellation


def recompute(v: ExpressionWriter, e: Expr, square: str, norms: list[str]) -> None:
    """Recompute a tile's squared distances feature by feature where a pair is so close that digits cancelled."""
    close = f"tl.max(tl.where({square} < {CLOSE} * ({norms[0]} + {norms[1]}), 1, 0))"
    lines, v.inside = v.inside, []
    names = dict(v.inner)
    v.inside.append(f"{square} = tl.zeros([KEPT, FOLDED], {v.float})")
    with v.walk(v.spec.width(e.args[0].feature)) as f:
        gap = v.bind((e, f, "gap"), " - ".join(v.component(a, f) for a in e.args), True)
        v.inside.append(f"{square} += {gap} * {gap}")
    lines += [f"if {close} > 0:", *(f"    {line}" for line in v.inside)]
    v.inside, v.inner = lines, names


def write_distance(v: ExpressionWriter, e: Expr) -> str:
    """A squared distance from norms and a split product (``spec_from_tensors.py``); close pairs are recomputed from
    whole vectors."""
    pair, norms = v.spec.vectors_of_distance[e], v.number(e.args[0].args[0])
    text = v.primitive(e, [v.argument(a, "float") for a in e.args])
    name = v.bind((e, "square"), text, True)
    lines, names, v.inside = v.inside, dict(v.inner), []
    total = v.bind((e, "near"), f"tl.zeros([KEPT, FOLDED], {v.float})", True)
    with v.walk(v.spec.width(pair[0].feature)) as f:
        gap = v.bind((e, f, "gap"), " - ".join(v.component(a, f) for a in pair), True)
        v.inside.append(f"{total} += {gap} * {gap}")
    v.inside.append(f"{name} = tl.where({name} < {CLOSE} * {norms}, {total}, {name})")
    lines += [f"if tl.min({name} - {CLOSE} * {norms}) < 0:", *(f"    {line}" for line in v.inside)]
    v.inside, v.inner = lines, names
    return name


# Stored vectors, widened where a block is loaded


def widen_block(spec: Spec, e: Expr, text: str, kind: str, wanted: str) -> str:
    """A loaded block in the operand type. From 8 bits to 16 four numbers are converted at once, by a function that the
    compiler does not move behind the change of layout: single bytes would be read from shared memory."""
    known = wanted in ("bfloat16", "float16") and (kind == "int8" or kind in EIGHT_BITS)
    fast = spec.native and spec.eight_bit_mma and known and e not in spec.widened_in_registers
    return f"{wanted}_of_{kind}({text})" if fast else widen(text, kind, wanted)


def load_kept(v: ExpressionWriter, e: Expr) -> tuple[str, str]:
    """The names of kept bfloat16 vectors as they are loaded, and of the power of two by which each is divided, so that
    float16 holds it."""
    name, (lane, exists) = e.attrs[0], v.lane(e.feature, v.spec.padded_width_of[e])
    loaded = v.bind((e, "loaded"), v.load_rows(e, "", lane, exists, v.spec.zero(e)), False, f"{name}_loaded")
    return loaded, v.bind((e, "unit"), f"float16_unit({loaded})", False, f"{name}_unit")


def write_block(v: ExpressionWriter, e: Expr, first: str, size: int, wanted: str) -> str:
    """``size`` features, from ``first`` on, of a tile's vectors, times their scales, in the type ``wanted``."""
    bits, block = e.packing or (8, 0)
    kind, width = v.spec.type_of[e], v.spec.width(e.feature)
    if bits == 4 and kind == "int32":  # beside float64 products, which fail to compile with a shorter type: one by one
        lane = v.bind(("lane", size), f"tl.arange(0, {size}).to(INT)", False, f"lane{size}")
        text = _load(v, e, first, size, width, share=1, repeat=2)
        text = f"((({text} >> ({lane} % 2 * 4)[None, :]) & 15) - 8)"
    else:
        text = _load(v, e, first, size * bits // 8, width * bits // 8, share=8 // bits)
        text, kind = (f"both_halves({text})", "int8") if bits == 4 else (text, kind)
    float_type = "float64" if v.spec.compute == "float64" else "float32"
    text = widen(text, kind, float_type)
    text = f"{text} * {_load_scales(v, e, first, size, block, float_type)}" if block else text
    return f"({text})" if wanted == float_type else f"({text}).to(tl.{wanted})"


def _load_scales(v: ExpressionWriter, e: Expr, first: str, size: int, block: int, float_type: str) -> str:
    """The scales of a block of features, one for each."""
    (scale,) = e.args
    blocks, length = v.spec.width(scale.feature), "FOLDED" if v.spec.folds(e) else "KEPT"
    whole = block & (block - 1) == 0 and (not first.isdigit() or int(first) % min(block, size) == 0)
    if not whole:  # feature by feature
        text = _load(v, scale, first, size, v.spec.width(e.feature), share=1, repeat=block)
    elif block >= size:
        text = _load(v, scale, first, 1, blocks, share=block)
    else:
        count = size // block
        text = _load(v, scale, first, count, blocks, share=block)
        text = f"tl.broadcast_to({text}[:, :, None], [{length}, {count}, {block}])"
        text = f"tl.reshape({text}, [{length}, {size}])"
    return text if v.spec.type_of[scale] == float_type else f"{text}.to(tl.{float_type})"


def _load(v: ExpressionWriter, e: Expr, first: str, count: int, known: int, share: int, repeat: int = 1) -> str:
    """``count`` numbers of each of a tile's vectors, from number ``first // share`` on. ``known``: how many there are;
    ``repeat``: how often each is loaded, where ``count`` and ``known`` count all of them."""
    name, side = str(e.attrs[0]), "folded" if v.spec.folds(e) else "kept"
    rows = v.axis_offset(e, side)
    start = str(int(first) // share) if first.isdigit() else f"({first}) // {share}" if share > 1 else first
    lane = v.bind(("lane", count), f"tl.arange(0, {count}).to(INT)", False, f"lane{count}")
    at = lane if start == "0" else f"({start} + {lane})"
    place = f"{at} // {repeat}" if repeat > 1 else at
    masks = [f"{side}_in[:, None]"] if side == "kept" or v.masked else []
    whole = first.isdigit() and int(start) + count <= known
    masks += [] if whole else [f"({at} < {known})[None, :]"]
    mask = f", mask={' & '.join(masks)}, other={v.spec.zero(e)}" if masks else ""
    return f"tl.load({v.pointer(e)} + {rows} + ({place})[None, :] * {name}_f{mask})"


def write_component(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Feature ``f`` of stored vectors, times its scale."""
    bits, block = e.packing or (8, 0)
    if bits == 4:
        place, half = (str(int(f) // 2), str(int(f) % 2 * 4)) if f.isdigit() else (f"({f} // 2)", f"({f} % 2 * 4)")
        short = "" if v.spec.type_of[e] == "int32" else ".to(tl.int8)"
        number = f"(({v.load_component(e, place)} >> {half}) & 15){short} - 8"
        text = f"({number}).to({v.float})"
    else:
        text = widen(v.load_component(e, f), v.spec.type_of[e], v.spec.compute)
    if not block:
        return text
    place = str(int(f) // block) if f.isdigit() else f"({f} // {block})"
    return f"{text} * {v.load_component(e.args[0], place)}.to({v.float})"
