"""Parts that all warp-specialised (Gluon) kernels share: filling templates, ring buffers, tile order, partitions.

A template is plain text with named holes. ``fill`` puts strings into a line and lists of lines in place of a line that
is nothing but a hole, at that line's indentation. What both families have in common is
here once:

- imports, layouts and index lanes of a consumer warp group;
- a **ring buffer**: blocks in shared memory that a producer warp fills by TMA, with ``full`` barriers (a block came)
  and ``empty`` barriers (all consumers are done with it), whose phase is the parity of the round;
- which tile of the folded axis a step of the loop computes;
- the partitions of a kernel: consumer warp groups of four warps each, and one producer warp;
- the last step: helpers copied in front of the kernel, and the check that Gluon has all the words.

``tl`` is Gluon's language in these kernels, so that the arithmetic of pairs is the same text as in any other kernel.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ....program.expression import Expr
from ..codegen import compiler, listed
from ..codegen.kernel_spec import Slices, Spec, name_descriptor

IMPORTS = """import triton.experimental.gluon.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""
STORE_IMPORTS = f"""{IMPORTS}write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""
SHARED_BYTES = 227 * 1024  # of shared memory, which an instance on Hopper may have
SPARE_BYTES = 1024  # of these, what barriers and the arguments of partitions take at most
GROUP_ROWS = 64  # kept indices of a consumer warp group: the rows of one wgmma
CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in compiler.CONSTANTS)

# Keeps two 16-bit weights in one register from one step to the next; the compiler would take them apart and join them
# again in every step.
PACK_PAIRS = """
@gluon.jit
def pack_pairs(weights):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=True, pack=2)
"""


# Text


def fill(template: str, **holes: str | int | Sequence[str]) -> str:
    """The template with its holes filled.

    A line that is nothing but ``{hole}`` becomes the lines of a list, indented as it is (no line for an empty list). In
    any other line a hole is a string or a number, and ``{{`` is a brace."""
    found = []
    for line in template.split("\n"):
        name = line.strip()[1:-1]
        block = holes.get(name) if line.strip() == f"{{{name}}}" else None
        if block is None or isinstance(block, (str, int)):
            found.append(line.format(**holes))
        else:
            indent = line[: len(line) - len(line.lstrip())]
            found += [f"{indent}{each}" if each else "" for text in block for each in text.split("\n")]
    return "\n".join(found)


def wrap_names(names: Sequence[str]) -> list[str]:
    """Arguments of a function, comma after each, in lines of readable length."""
    return textwrap.wrap(f"{', '.join(names)},", 110)


def indent(lines: Iterable[str]) -> list[str]:
    """The lines of an ``if`` or a loop."""
    return [f"    {line}" for line in lines]


def leaf_name(e: Expr) -> str:
    """The name of a leaf in a kernel."""
    return str(e.attrs[0])


# Layouts and lanes of a consumer warp group, and rows of vectors


def suffix(k: int) -> str:
    """What the names of the ``k``-th slice of a vector's features end with.

    >>> f"ring{suffix(0)}", f"ring{suffix(1)}"
    ('ring', 'ring1')
    """
    return str(k or "")


def layouts(sums: Slices, other: str = "", packed: int = 2) -> list[str]:
    """How four warps hold scores, accumulators of each slice of features, and weights as an operand of their MMA.

    ``other``: what tells the names from those of sums of another width; ``packed``: weights in a register."""
    mma = f"tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {{}}, {8 * packed}])".format
    lines = [f"SCORES: tl.constexpr = {mma('FOLDED')}"]
    for k, (_, size) in enumerate(sums):
        name = f"{other}{suffix(k)}"
        lines.append(f"SUMS{name}: tl.constexpr = {mma(size)}")
        lines.append(f"WEIGHTS{name}: tl.constexpr = tl.DotOperandLayout(0, SUMS{name}, {packed})")
    return lines


def lanes(order: str = "{}") -> list[str]:
    """The indices of a warp group's tile. ``order``: a permutation of the kept ones, as a call with a hole."""
    kept = order.format("tl.arange(0, KEPT, tl.SliceLayout(1, SCORES))")
    return [
        f"kept_lane = {kept}.to(INT)",
        f"kept_at = tile * KEPT + {kept}",
        "kept_in = kept_at < kept_size",
        "folded_lane = tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES)).to(INT)",
        "out_at = tl.cast(batch, tl.int64) * kept_size + tile * KEPT",
    ]


@dataclass(frozen=True)
class VectorRows:
    """How four warps load and store whole rows of vectors: one layout for every size of the blocks that hold them."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, slices: Iterable[Slices]) -> VectorRows:
        return cls(tuple(dict.fromkeys(size for each in slices for _, size in each)))

    def name(self, what: str, size: int) -> str:
        return what if len(self.sizes) == 1 else f"{what}_{size}"

    def layouts(self) -> list[str]:
        form = "tl.BlockedLayout([1, 8], [{}, {}], [4, 1], [1, 0])".format
        return [f"{self.name('WIDE', n)}: tl.constexpr = {form(256 // n, n // 8)}" for n in self.sizes]

    def lanes(self, order: str = "{}") -> list[str]:
        """The kept indices and features of such rows. ``order``: as in :func:`lanes`."""
        lines = []
        for n in self.sizes:
            row, layout = self.name("wide_row", n), self.name("WIDE", n)
            kept = order.format(f"tl.arange(0, KEPT, tl.SliceLayout(1, {layout}))")
            lines += [
                f"{row} = {kept}.to(INT)",
                f"{self.name('wide_lane', n)} = tl.arange(0, {n}, tl.SliceLayout(0, {layout})).to(INT)",
                f"{self.name('wide_in', n)} = tile * KEPT + {row} < kept_size",
            ]
        return lines

    def load(
        self, pointer: str, e: Expr, width: int, slices: Slices, smem: Sequence[str], zero: str = "0"
    ) -> list[str]:
        """Load a kept tile of vectors into shared memory, where it stays."""
        x, lines = leaf_name(e), []
        for (first, size), block in zip(slices, smem, strict=True):
            row, lane = (self.name(what, size) for what in ("wide_row", "wide_lane"))
            base = f"{pointer} + {first} * {x}_f" if first else pointer
            place = f"{base} + {row}[:, None] * {x}_s + {lane}[None, :] * {x}_f"
            inside = self._inside(size, width - first)
            lines.append(f"{block}.store(tl.load({place}, mask={inside}, other={zero}))")
        return lines

    def store(
        self, spec: Spec, out: int, width: int, slices: Slices, smem: Sequence[str], totals: Sequence[str]
    ) -> list[str]:
        """Store accumulators through shared memory, so that rows are written whole."""
        lines = [compiler.write_output_base(spec, out)] if out in spec.strided else []
        for (first, size), block, total in zip(slices, smem, totals, strict=True):
            row, lane, layout = (self.name(what, size) for what in ("wide_row", "wide_lane", "WIDE"))
            place = f"out{out} + (out_at + {row}[:, None]) * {width}"
            if out in spec.strided:
                place = f"out{out}_base + {row}[:, None] * out{out}_s"
            place = f"{place} + {first}" if first else place
            inside = self._inside(size, width - first)
            lines.append(f"{block}.store(({total}).to(tl.{spec.narrow}))")
            lines.append(f"tl.store({place} + {lane}[None, :], {block}.load({layout}), mask={inside})")
        return lines

    def _inside(self, size: int, left: int) -> str:
        """The mask of a block, of whose features so many are left."""
        rows = f"{self.name('wide_in', size)}[:, None]"
        return f"{rows} & ({self.name('wide_lane', size)} < {left})[None, :]" if left < size else rows


# Ring buffers and barriers


def allocate(name: str, dtype: str, shape: str, layout: str) -> str:
    """Shared memory under a name."""
    return f"{name} = tl.allocate_shared_memory({dtype}, {shape}, {layout})"


def allocate_barriers(name: str, count: int | str) -> str:
    """So many ``mbarrier``\\ s under a name."""
    return allocate(name, "tl.int64", f"[{count}, 1]", "mbarrier.MBarrierLayout()")


def allocate_numbers(name: str, dtype: str, depth: int, size: str | int) -> str:
    """A ring of one number per folded index of a tile."""
    return allocate(f"{name}_ring", f"tl.{dtype}", f"[{depth}, {size}]", "tl.SwizzledSharedLayout(1, 1, 1, [0])")


@dataclass(frozen=True)
class Ring:
    """The ring buffer of one leaf's blocks: ``{name}_ring`` and its barriers ``{name}_full`` and ``{name}_empty``.

    A block is filled by one copy of a tensor descriptor, ``{name}_box``; of vectors in several slices, each slice has a
    ring and a descriptor of its own, and all share the barriers. ``corner`` are the coordinates before the folded
    index. ``consumers``: how many warp groups arrive when they are done with it. ``transposed``: features are the first
    dimension of a block."""

    name: str
    depth: int
    consumers: int
    corner: str
    slices: Slices
    transposed: bool = False

    @classmethod
    def of(cls, e: Expr, spec: Spec, depth: int, consumers: int, transposed: bool = False) -> Ring:
        corner = "".join(f"tl.cast(b{d}, tl.int32), " for d in spec.descriptor_dims[e])
        return cls(leaf_name(e), depth, consumers, corner, spec.descriptor_slices(e), transposed)

    @property
    def rings(self) -> list[str]:
        """The names of the rings, one for each slice."""
        return [f"{self.name}_ring{suffix(k)}" for k in range(len(self.slices))]

    def allocate_blocks(self, narrow: str) -> list[str]:
        names = [name_descriptor(self.name, k) for k in range(len(self.slices))]
        return [
            allocate(ring, narrow, f"[{self.depth}] + {name}.block_type.shape", f"{name}.layout")
            for ring, name in zip(self.rings, names, strict=True)
        ]

    def allocate_barriers(self) -> list[str]:
        return [allocate_barriers(f"{self.name}_{state}", self.depth) for state in ("full", "empty")]

    def init_full(self) -> str:
        return f"mbarrier.init({self.name}_full.index(k), count=1)"

    def init_empty(self) -> str:
        return f"mbarrier.init({self.name}_empty.index(k), count={self.consumers})"

    @property
    def bytes(self) -> str:
        """The bytes of a step's blocks."""
        return " + ".join(f"{name_descriptor(self.name, k)}.block_type.nbytes" for k in range(len(self.slices)))

    def copy(self, start: str, barrier: str, slot: str) -> list[str]:
        """Begin to copy the blocks at a folded index into a slot; ``barrier`` counts their bytes."""
        return [f"mbarrier.expect({barrier}, {self.bytes})", *self.copy_counted(start, barrier, slot)]

    def copy_counted(self, start: str, barrier: str, slot: str) -> list[str]:
        """The same where the barrier knows how many bytes to expect."""
        lines = []
        for k, (ring, (first, _)) in enumerate(zip(self.rings, self.slices, strict=True)):
            at = f"[{self.corner}{first}, {start}]" if self.transposed else f"[{self.corner}{start}, {first}]"
            lines.append(f"copy({name_descriptor(self.name, k)}, {at}, {barrier}, {ring}.index({slot}))")
        return lines

    def produce(self, phase: str, depth: int = 0) -> list[str]:
        """In the producer: wait until ``slot`` is empty (the ``phase`` before this round's), and begin to fill it.

        ``depth``: of most rings, which ``slot`` and ``phase`` are of; this one may have another."""
        slot = "slot" if depth in (0, self.depth) else f"step % {self.depth}"
        phase = phase if slot == "slot" else f"((step // {self.depth}) & 1) ^ 1"
        wait = f"mbarrier.wait({self.name}_empty.index({slot}), {phase})"
        return [wait, *self.copy("start", f"{self.name}_full.index({slot})", slot)]

    def wait(self, step: str = "step") -> str:
        """In a consumer: wait for the block of a step."""
        return f"mbarrier.wait({self.name}_full.index({step} % {self.depth}), ({step} // {self.depth}) & 1)"

    def release(self, step: str = "step") -> str:
        """In a consumer: the block of a step may be overwritten."""
        return f"mbarrier.arrive({self.name}_empty.index({step} % {self.depth}))"

    def blocks(self, step: str = "step", folded: str = "FOLDED") -> list[str]:
        """The blocks of a step, each ``[FOLDED, size]``."""
        return self.blocks_in(f"{step} % {self.depth}", folded)

    def blocks_in(self, slot: str, folded: str = "FOLDED") -> list[str]:
        """The same of a slot."""
        shape = "[{1}, {0}]).permute((1, 0)" if self.transposed else "[{0}, {1}]"
        return [
            f"{ring}.index({slot}).reshape({shape.format(folded, size)})"
            for ring, (_, size) in zip(self.rings, self.slices, strict=True)
        ]


def start_score(name: str, residents: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Start the MMAs of a score: the resident tile times a step's blocks, summed over the slices of features."""
    lines, total = [], "zeros, use_acc=False"
    for resident, block in zip(residents, blocks, strict=True):
        lines.append(f"{name} = warpgroup_mma({resident}, {block}.permute((1, 0)), {total}, is_async=True)")
        total = name
    return lines


def start_sum(totals: Sequence[str], weights: str, blocks: Sequence[str], layout: str = "WEIGHTS") -> list[str]:
    """Start the MMAs that add weights times a step's blocks to accumulators, one for each slice of features."""
    lines = []
    for k, (total, block) in enumerate(zip(totals, blocks, strict=True)):
        operand = f"tl.convert_layout({weights}, {layout}{suffix(k)})" if k else weights
        lines.append(f"{total} = warpgroup_mma({operand}, {block}, {total}, is_async=True)")
    return lines


def load_ahead(spec: Spec, leaves: Sequence[Expr], each: int, shifts: int = 0) -> list[str]:
    """In the producer: load one number per folded index of a tile, ``each`` lane as many. They are stored into their
    rings after the blocks were waited for, so that the loads are in flight meanwhile. ``shifts``: how many shifts of
    exponents there are, which were computed before the launch."""
    lane = f"folded_at = start + tl.arange(0, FOLDED, tl.BlockedLayout([{each}], [32], [1], [0]))"
    lines = [lane, "folded_in = folded_at < folded_size"] if leaves or shifts else []
    for k in range(shifts):
        base = f"shift{k}_ptr + tl.cast({spec.batch_number()}, tl.int64) * folded_size"
        lines.append(f"shift{k} = tl.load({base} + folded_at.to(tl.int64), mask=folded_in, other=0)")
    for x in map(leaf_name, leaves):
        base = f"{x}_ptr" + "".join(f" + b{k} * {x}_b{k}" for k in range(spec.rank))
        lines.append(f"{x} = tl.load({base} + folded_at.to(tl.int64) * {x}_s, mask=folded_in, other=0)")
    return lines


# Which tiles


def scalar_opening(spec: Spec) -> list[str]:
    """How any kernel begins, without the lines that need a layout or a warp group's own tile."""
    blocks = ("KEPT", "FOLDED", "kept_in")
    return [line for line in compiler.write_prologue(spec) if not any(name in line for name in blocks)]


@dataclass(frozen=True)
class TileOrder:
    """The order in which a kernel computes tiles: whole ones first, then those that a condition or the end cuts.

    ``opening_lines`` that say how many: ``whole_steps`` of ``steps``. ``sloped`` kernels (ALiBi) begin at the
    whole tile ``nearest`` to the kept indices, whose maximum is guessed from it; the others follow in order, so that
    many program instances read the same blocks at the same time."""

    spec: Spec
    sloped: int = 0  # kept indices of an instance, where the nearest tile comes first
    kept: int = 0  # kept indices of an instance, where limits of a list are found from them
    backwards: bool = False  # whole tiles from the last to the first

    @property
    def opening_lines(self) -> list[str]:
        if self.spec.listed:
            lines = listed.write_steps(self.spec, self.kept)
        elif not self.spec.bounds:
            lines = ["whole_steps = folded_size // FOLDED", "steps = tl.cdiv(folded_size, FOLDED)"]
        else:
            lines = [*compiler.write_tile_range(self.spec), "whole_steps = whole + again"]
            lines.append("steps = tl.maximum(whole_steps + before + between + last - again_last, 1)")
        if self.sloped:
            away = f"tile * {self.sloped} // FOLDED"
            if self.spec.bounds:
                lines.append(f"away = {away} - whole_first")
                away = "away - tl.where(away < whole, 0, between)"
            lines.append(f"nearest = tl.maximum(tl.minimum({away}, whole_steps - 1), 0)")
        if self.backwards:
            lines.append("last_whole = whole_steps - 1")
        if self.spec.folded_batch_dim is not None:  # a step for each element of the batch dimension that is folded too
            lines += [
                f"whole_steps = whole_steps * {self.spec.folded_batch_text}",
                f"steps = steps * {self.spec.folded_batch_text}",
            ]
        return lines

    def whole(self, step: str = "step") -> str:
        """The tile of a later step, where it is whole."""
        if self.spec.listed:
            return listed.tile_of_step(self.spec, step)
        if self.spec.folded_batch_dim is not None:
            step = f"({step} // {self.spec.folded_batch_text})"
        return self._whole(_skip_nearest(step) if self.sloped else step)

    def cut(self, step: str = "step") -> str:
        """The tile of a step, where it is not."""
        if self.spec.listed:
            return listed.tile_of_step(self.spec, step)
        if not self.spec.bounds:
            return step if self.spec.folded_batch_dim is None else f"({step} // {self.spec.folded_batch_text})"
        at = f"({step} - whole_steps)"
        at = at if self.spec.folded_batch_dim is None else f"({at} // {self.spec.folded_batch_text})"
        return f"first + {at} + tl.where({at} < before, 0, whole) + tl.where({at} < before + between, 0, again)"

    def any(self, step: str = "step") -> str:
        """The tile of a step, where it may be either."""
        if self.spec.listed:
            return listed.tile_of_step(self.spec, step)
        if not self.sloped and not self.spec.bounds and self.spec.folded_batch_dim is None:
            return f"tl.where({step} < whole_steps, {self.whole(step)}, {step})" if self.backwards else step
        if self.spec.folded_batch_dim is not None:
            if not self.spec.bounds and not self.backwards:
                return self.whole(step)
            return f"tl.where({step} < whole_steps, {self.whole(step)}, {self.cut(step)})"
        whole = self._whole(f"tl.where({step} > 0, {_skip_nearest(step)}, nearest)" if self.sloped else step)
        return f"tl.where({step} < whole_steps, {whole}, {self.cut(step)})"

    def enter(self, tile: str, mask: bool = True) -> list[str]:
        """The folded indices of a tile: its place along the axis or, of positions along a list, along that."""
        if not self.spec.listed or not self.spec.listed.logical:
            return enter_tile(tile, mask)
        lines = [f"start = ({tile}) * FOLDED"]
        lines.append("folded_at = step * FOLDED + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))")
        return [*lines, "folded_in = folded_at < positions"] if mask else lines

    def enter_group(self, step: str = "step") -> list[str]:
        """A line that says which element of the batch dimension that is folded too a step computes, if there is one."""
        if self.spec.folded_batch_dim is None:
            return []
        return [f"b{self.spec.folded_batch_dim} = tl.cast({step} % {self.spec.folded_batch_text}, tl.int64)"]

    def _whole(self, step: str) -> str:
        step = f"(last_whole - {step})" if self.backwards else step
        return f"whole_first + {step} + tl.where({step} < whole, 0, between)" if self.spec.bounds else step


def _skip_nearest(step: str) -> str:
    """Steps after the first skip the tile that it computed."""
    return f"({step} - tl.where({step} > nearest, 0, 1))"


def enter_tile(tile: str, mask: bool = True) -> list[str]:
    """The folded indices of a tile."""
    lines = [f"start = ({tile}) * FOLDED", "folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))"]
    return [*lines, "folded_in = folded_at < folded_size"] if mask else lines


# Partitions


PRODUCER = """

@gluon.jit
def producer(
    {parameters}
):
    # the producer warp fills the ring buffers, step by step
    {opening}
    for step in range(0, steps):
        start = ({tile}) * FOLDED
        slot = step % {depth}
        phase = {phase}
        {produce}
"""
ENTRY = """

@gluon.jit(do_not_specialize={unspecialized})
def {name}(
    {arguments}
):
    {allocate}
    for k in tl.static_range({depth}):
        {init}
    {init_others}
    fence_async_shared()
    {specialize}
"""


@dataclass(frozen=True)
class Partitions:
    """The functions that run beside one another, all with the same parameters: kernel arguments and shared memory.

    Arguments are passed one by one: through a tuple the compiler learns neither which of them are constants nor what
    divides them."""

    arguments: Sequence[str]
    buffers: Sequence[str]

    def entry(self) -> list[str]:
        """The parameters of the kernel."""
        return [*wrap_names(self.arguments), f"{CONSTANTS},"]

    def parameters(self) -> list[str]:
        """The parameters of each function."""
        return [*wrap_names(self.arguments), *wrap_names(self.buffers), f"GROUP: tl.constexpr, {CONSTANTS},"]

    def specialize(self, runs: Sequence[tuple[str, int, str]], registers: str, single: int = 1) -> list[str]:
        """Call every function, with its GROUP and its own KEPT: consumers of four warps, then ``single`` ones of one.

        The first consumer is the default partition: ``registers`` says how many a thread of each other one has."""
        lines = ["tl.warp_specialize(["]
        for function, group, kept in runs:
            given = [*wrap_names(self.arguments), *wrap_names(self.buffers)]
            last = f"{group}, {kept}, FOLDED, INT, PRECISION, RAGGED,"
            lines += indent([f"({function}, (", *indent([*given, last]), ")),"])
        warps = ", ".join(["4"] * (len(runs) - 1 - single) + ["1"] * single)
        return [*lines, f"], [{warps}], [{registers}])"]


# Kernels


# Triton calls that Gluon does not have, or has only with a layout.
_UNSUPPORTED = re.compile(
    r"tl\.(philox|PropagateNan|dot|trans)\b|tl\.(zeros|full|arange)\((?!.*(Layout|ROWS|PAIRS|SCORES|SUMS|WIDE))"
)


def assemble(
    spec: Spec,
    plain: compiler.Kernel,
    imports: str,
    body: str,
    generated: Iterable[str],
    consumers: int,
    functions: str = "",
) -> compiler.Kernel | None:
    """The kernel of a body in place of another rendering (``plain``), with the same arguments.

    ``generated``: the lines of it that come from code generation; ``consumers``: its consumer warp groups, where it has
    a producer; ``functions``: device functions that call no helpers. None when generated lines, or the helpers they
    call, use what Gluon does not have."""
    helpers = compiler.copy_device_functions(body)
    if _UNSUPPORTED.search("\n".join([*generated, *helpers])):
        return None
    header = compiler.write_header(spec, list(plain.leaves), imports)
    text = "\n".join([header, *in_gluon(helpers), functions + body])
    return replace(plain, text=text, hand_scheduled=True, consumers=consumers)


def in_gluon(helpers: Iterable[str]) -> list[str]:
    """Helpers of any kernel, compiled by Gluon."""
    return [text.replace("@triton.jit", "@gluon.jit") for text in helpers]
