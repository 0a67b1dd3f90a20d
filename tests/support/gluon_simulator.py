"""Runs warp-specialised Gluon kernels on the CPU: partitions are threads, barriers block, MMAs are lazy.

It knows the words that such kernels use, and no layouts. A product is computed as late as its wait allows, so that a
block that was given back too early shows as a wrong result; a wait that nobody ends raises.
"""

import math
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import torch

from tests.support import internals

PATIENCE = 20.0  # seconds that a partition waits for another


class Pointer:
    """Elements of a tensor's storage."""

    def __init__(self, storage, at):
        self.storage, self.at = storage, at

    @classmethod
    def to(cls, tensor):
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        return cls(flat, tensor.storage_offset())

    def __add__(self, offset):
        return Pointer(self.storage, self.at + offset)


class Barrier:
    """Ends a phase when everybody arrived and every byte that is expected came."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def arrived(self, arrivals, data):
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + data
            assert self.missing >= 0, "more arrivals than a barrier counts"
            if not self.missing and not self.bytes:
                self.missing, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != parity, PATIENCE), "a wait that nobody ends"


class Shared:
    """A block in shared memory, or a view of one."""

    def __init__(self, block):
        self.block = block

    def index(self, k):
        return self.block[k] if isinstance(self.block, list) else Shared(self.block[k])

    def reshape(self, shape):
        return Shared(self.block.view(shape))

    def slice(self, start, length, dim):
        return Shared(self.block.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.block.permute(order))

    def store(self, values):
        assert values.dtype == self.block.dtype and values.shape == self.block.shape
        self.block.copy_(values)

    def load(self, layout):
        return self.block.clone()


class Padded:
    """Shared memory with gaps: ``gap`` unused elements after every ``interval``, in the order of ``bases``."""

    def __init__(self, kind, shape, layout):
        (((self.interval, self.gap),), bases, _, of) = layout
        assert list(shape) == list(of)
        place = torch.zeros(shape, dtype=torch.long)
        row, col = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
        for k, (r, c) in enumerate(bases):
            place += ((row & r) if r else (col & c)).bool() * 2**k
        self.place = place + place // self.interval * self.gap
        self.flat = torch.full((int(self.place.max()) + 1,), math.nan, dtype=kind)

    def store(self, values):
        self.flat[self.place] = values

    def _reinterpret(self, kind, shape, layout):
        return Shared(self.flat[: math.prod(shape)].view(shape))


class Box:
    """A tensor descriptor."""

    def __init__(self, made):
        shape = list(made.block_shape)
        self.made, self.layout = made, None
        self.block_type = SimpleNamespace(shape=shape, nbytes=math.prod(shape) * made.base.element_size())

    def places(self, at):
        """What of a block lies inside the tensor: there, and in the block."""
        made = self.made
        inside = [max(0, min(b, n - a)) for a, b, n in zip(at, made.block_shape, made.shape, strict=True)]
        whole = made.base.detach().as_strided(made.shape, made.strides, made.base.storage_offset())
        there = whole[tuple(slice(a, a + n) for a, n in zip(at, inside, strict=True))]
        return there, tuple(slice(0, n) for n in inside)

    def copied(self, at):
        block = torch.zeros(self.block_type.shape, dtype=self.made.base.dtype)
        there, inside = self.places(at)
        block[inside] = there
        return block

    def written(self, at, block):
        there, inside = self.places(at)
        there.copy_(block.block[inside])

    def added(self, at, block):
        there, inside = self.places(at)
        there += block.block[inside]


class Product:
    """A product that was begun."""

    def __init__(self, left, right, total):
        self.parts, self.value = (left, right, total), None

    def finish(self):
        left, right, total = self.parts
        left = left.block if isinstance(left, Shared) else left
        self.value = left.float() @ right.block.float() + (total.value if isinstance(total, Product) else total)


class Machine:
    """What a kernel's text finds in place of Gluon's modules."""

    def __init__(self):
        self.program, self.programs, self.local = 0, 1, threading.local()

    def names(self):
        nothing = lambda *args, **kwargs: None

        def allocate(kind, shape, layout):
            if isinstance(layout, tuple):
                return Padded(kind, shape, layout)
            made = [Barrier() for _ in range(shape[0])] if layout is Barrier else None
            return Shared(torch.full(shape, _unset(kind), dtype=kind) if made is None else made)

        tl = SimpleNamespace(
            bfloat16=torch.bfloat16,
            float16=torch.float16,
            float8e4nv=torch.float8_e4m3fn,
            float8e5=torch.float8_e5m2,
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
            constexpr=None,
            abs=abs,
            exp=torch.exp,
            exp2=torch.exp2,
            log=torch.log,
            reshape=torch.reshape,
            permute=torch.permute,
            split=lambda x: x.unbind(-1),
            static_range=range,
            NVMMADistributedLayout=nothing,
            NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
            DotOperandLayout=nothing,
            BlockedLayout=nothing,
            SliceLayout=nothing,
            SwizzledSharedLayout=nothing,
            SharedLinearLayout=nothing,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            cdiv=lambda a, b: -(-a // b),
            cast=lambda x, kind, bitcast=False: x.view(kind) if bitcast else x,
            arange=lambda a, b, layout: torch.arange(a, b, dtype=torch.int32),
            full=lambda shape, value, kind, layout=None: torch.full(shape, value, dtype=kind),
            zeros=lambda shape, kind, layout: torch.zeros(shape, dtype=kind),
            where=lambda c, a, b: torch.where(c, a, b) if isinstance(c, torch.Tensor) else a if c else b,
            maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else max(a, b),
            minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else min(a, b),
            sum=lambda x, axis: x.sum(axis),
            max=lambda x, axis=None: x.max().item() if axis is None else x.amax(axis),
            min=lambda x, axis: x.amin(axis),
            convert_layout=lambda x, layout: x,
            load=self.load,
            store=self.store,
            PaddedSharedLayout=lambda *given: given,
            allocate_shared_memory=allocate,
            warp_specialize=self.warp_specialize,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: Barrier,
            init=lambda bar, count: bar.__dict__.update(count=count, missing=count),
            wait=lambda bar, phase: bar.wait(phase),
            arrive=lambda bar, pred=True: bar.arrived(1, 0) if pred else None,
            expect=lambda bar, size: bar.arrived(1, size),
        )
        jit = lambda f=None, **options: f or (lambda g: g)
        return {
            "tl": tl,
            "builtin": lambda f: f,
            "gluon": SimpleNamespace(jit=jit),
            "mbarrier": mbarrier,
            "copy": self.copy,
            "write": lambda box, at, block: box.written(at, block),
            "tma": SimpleNamespace(store_wait=nothing),
            "fence_async_shared": nothing,
            "warpgroup_mma": self.product,
            "warpgroup_mma_init": lambda total: total,
            "warpgroup_mma_wait": self.wait,
        }

    @staticmethod
    def load(place, mask=None, other=0):
        if not isinstance(place.at, torch.Tensor):
            found = place.storage[place.at]
            return found if found.is_floating_point() else found.item()
        seen = torch.ones((), dtype=torch.bool) if mask is None else mask
        at = torch.where(seen, place.at, 0).long()
        if place.storage.element_size() == 1 and place.storage.is_floating_point():  # torch cannot choose among these
            return torch.where(seen, place.storage.view(torch.int8)[at], 0).view(place.storage.dtype)
        found = place.storage[at]
        return torch.where(seen, found, torch.tensor(other, dtype=found.dtype))

    @staticmethod
    def store(place, values, mask=None):
        mask = torch.ones((), dtype=torch.bool) if mask is None else mask
        mask = mask.expand(place.at.shape)
        place.storage[place.at[mask].long()] = values.expand(place.at.shape)[mask].to(place.storage.dtype)

    @staticmethod
    def copy(box, at, barrier, block):
        block.block.copy_(box.copied(at))
        barrier.arrived(0, -box.block_type.nbytes)

    def product(self, left, right, total, use_acc=True, is_async=False):
        begun = Product(left, right, total if use_acc else 0.0)
        self.begun.append(begun)
        return begun if is_async else self.wait(0, deps=[begun])

    @property
    def begun(self):
        return self.local.__dict__.setdefault("begun", [])

    def wait(self, outstanding, deps):
        while len(self.begun) > outstanding:
            self.begun.pop(0).finish()
        found = [d.value if isinstance(d, Product) and d.value is not None else d for d in deps]
        return found[0] if len(found) == 1 else found

    @staticmethod
    def warp_specialize(partitions, warps, registers):
        errors = []

        def run(function, arguments):
            try:
                with torch.no_grad():  # which a thread does not inherit
                    function(*arguments)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=p) for p in partitions]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise errors[0]


def _unset(kind):
    """What nobody may read."""
    return math.nan if kind.is_floating_point else 12345


def assembled(text):
    """What the parts of a text do that are written for the assembler, or for layouts."""
    least = re.search(r"mov.b32 l, (\d+);", text)

    def drop_pairs(weight, row, mark):
        two = (row.long() * mark.long()[..., 1::2]).unsqueeze(-1)  # columns two by two: a product at the odd ones
        coins = (torch.cat([two, two >> 16], -1) & 0x7FFF).flatten(-2)
        return torch.where(coins >= int(least[1]) & 0xFFFF, weight, 0.0)

    def thrown(weight, pair, less, row, mark):
        return weight * drop_pairs(pair, row, mark) + weight * less

    def spared(weight, row, mark):
        sixteen = lambda x: x.unflatten(0, (-1, 2, 8))  # of sixteen columns the first eight are even
        two = row.long() * sixteen(mark.long())[:, 1:]
        coins = torch.cat([two, two >> 16], 1).flatten(0, 2) & 0x7FFF
        return torch.where(coins >= int(least[1]) & 0xFFFF, weight, 0.0)

    def blended(row, block):
        word = row.long() & 0xFFFFFFFF
        return word + (word << 16 | word >> 16) * block * 2

    def coin(row, mark, block):
        return (blended(row, block) * mark >> 17) & 0x7FFF

    def index_distance(at, start, like):
        return (at - start).float()[:, None] - torch.arange(like.shape[1])[None, :]

    def alibi_line(base, slope, like):
        return base[:, None] + slope * torch.arange(like.shape[1])[None, :]

    def join_bytes(weights):
        sixteen = weights.unflatten(1, (-1, 2, 4, 2)).permute(0, 1, 3, 2, 4)
        return sixteen.flatten(1).clamp(max=448).to(torch.float8_e4m3fn)

    def look_up_band(base, at, half, sign, like):
        return Machine.load(base + (at[:, None] + sign * torch.arange(like.shape[1])))

    def sum_antidiagonals(tile):
        found = torch.zeros(4, 128, dtype=tile.dtype)
        for i in range(64):
            found[i // 16, i % 16 : i % 16 + 64] += tile[i]
        # [warp, h, e, c, r] -> row 16 warp + 8 h + r, column 2 c + e
        return found.view(4, 2, 2, 4, 8).permute(0, 1, 4, 3, 2).reshape(64, 8)

    def read_count(place):
        assert place.storage[place.at] >= 0, "a counter that nobody set"
        return place.storage[place.at].item()

    def count_when_added(place, count):
        assert place.storage[place.at] == count - 1, "a column tile that added out of turn"
        place.storage[place.at] = count

    same = lambda block, *_: block
    return {
        "order_before_wait": same,
        "pack_pairs": same,
        "join_words": same,
        "split_words": same,
        "join_bytes": join_bytes,
        "split_bytes": same,
        "drop_pairs": drop_pairs,
        "thrown": thrown,
        "spared": spared,
        "blended": blended,
        "coin": coin,
        "index_distance": index_distance,
        "alibi_line": alibi_line,
        "look_up_band": look_up_band,
        "sum_antidiagonals": sum_antidiagonals,
        "add_block": lambda box, at, block: box.added(at, block),
        "read_count": read_count,
        "count_when_added": count_when_added,
        "late": lambda block, like: torch.full_like(like, torch.nan),  # nobody may look at what is added
    }


def execute(call):
    """Run a staged launch: every program, one after another."""
    machine = Machine()
    names = machine.names()
    text = re.sub(r"(?m)^(import|from|copy =|write =) .*$", "", call.kernel.text)
    exec(compile(text, "kernel", "exec"), names)
    names |= assembled(text)
    constants = call.constants(SimpleNamespace(tl=names["tl"])).values()
    arguments = [
        Pointer.to(a) if isinstance(a, torch.Tensor) else Box(a) if hasattr(a, "block_shape") else a
        for a in call.arguments
    ]
    machine.programs = call.grid
    for machine.program in range(call.grid):
        names[call.kernel.name](*arguments, *constants)


def simulate(patch):
    """Pretend a GPU that has warp-specialised kernels, and run their launches here; the list of these launches."""
    seen = []

    def run(launch, call):
        if not call.kernel.hand_scheduled:
            return launch(call)
        seen.append(call)
        return execute(call)

    internals.pretend_device(patch, warp_specialised=True)
    internals.forget_launches(patch)
    internals.replace_launch(patch, run)
    return seen


def change_kernels(patch, pattern, instead, where=lambda call: True, patience=PATIENCE):
    """Replace what matches in the text of kernels before they run, of the launches ``where`` says: tests see that a
    broken kernel fails. ``patience``: seconds after which a wait that nobody ends raises."""
    real = execute

    def changed(call):
        if where(call):
            text, count = re.subn(pattern, instead, call.kernel.text)
            assert count, f"nothing matches {pattern}"
            call = replace(call, kernel=replace(call.kernel, text=text))
        return real(call)

    patch.setattr(sys.modules[__name__], "execute", changed)
    patch.setattr(sys.modules[__name__], "PATIENCE", patience)
