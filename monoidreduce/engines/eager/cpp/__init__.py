"""Folds on a CPU as generated C++: all arithmetic of a pair in one loop, products by torch's own BLAS.

:func:`run` is asked first by the eager engine. It answers None, and tiles of torch calls run, where a fold has no C++
form, is too small for a compilation to pay, or no compiler is there. Whether C++ runs depends on the fold, its sizes
and the machine alone, never on what is in the cache: repeated calls have equal bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ....plan import settings
from ....plan.settings import EnvironmentVariable
from ....program.constructors import contractions
from ....program.expression import Expr, size, topological
from ....program.lower import Fold
from ....reductions import FastForm, all_have, kind_of
from ...common import matmul, skip_small_tiles
from ...common.bounded_cache import BoundedCache
from ...common.evaluate import Sizes
from ...common.subproblem import ChosenBlocks
from ..tile_code import WALKED
from ..tile_walk import FoldCode, compile_fold
from . import compiler
from .compiled_fold import BLOCK, FOLDED, KINDS, NUMBER_TYPES, PAIR_KINDS, CompiledFold, write_form
from .kernel_text import Form
from .primitive_text import Unsupported
from .variants import compile_tiles, list_reducers, reads_data

_SETTING = EnvironmentVariable("MONOIDREDUCE_CPP")  # "never": tiles of torch calls; "always": at any size
WORTH = 2**27  # pairs times operations from which a compilation of a second pays: about 20 ms in torch
WORTH_PANEL = 2**25  # the same of a panel of wide products, which take far longer
WORTH_LISTED = 2**24  # the same of listed blocks, whose vectors torch gathers
_WALKED = 4  # operations of a feature of a vector per pair, in torch a pass over a tile
_calls: BoundedCache[tuple, tuple[Fold, CompiledFold | None]] = BoundedCache(1024)
_facts: BoundedCache[tuple[int, frozenset[int]], tuple[Fold, _Facts]] = BoundedCache(1024)


@dataclass(frozen=True)
class _Facts:
    """What the key of a fold's calls depends on: its code, the numbers that conditions read, by their places, and
    whether they read data."""

    code: FoldCode
    named: tuple[int, ...]
    reads_data: bool


def run(
    fold: Fold,
    leaves: Sequence[Any],
    sizes: Sizes,
    panel: slice | None = None,
    totals: Mapping[Expr, Tensor] | None = None,
    chosen: ChosenBlocks | None = None,
    worth: int | None = None,
) -> list[Tensor] | None:
    """Run a fold as C++; None if tiles of torch calls should.

    With ``panel`` the leaves hold these rows alone. ``totals``: sums over rows that are added to, not begun, and memory
    in which numbers per pair are written. ``chosen``: the blocks of pairs that are folded, all if left out. ``worth``:
    operations from which C++ runs, if not the usual number."""
    part, totals = sizes if panel is None else replace(sizes, rows=panel.stop - panel.start), totals or {}
    worth = worth or (WORTH if chosen is None else math.ceil(WORTH_LISTED / chosen.share))
    if not _may_run(sizes) or not is_worthwhile(fold, part, worth):
        return None
    if any(isinstance(v, Tensor) and not _is_plain(v) for v in leaves):
        return None
    begin, given = 0 if panel is None else panel.start, (*leaves, *totals.values())
    numbers = [k for k, v in enumerate(leaves) if not isinstance(v, Tensor)]
    facts = _find_facts(fold, numbers)
    if facts.reads_data:
        call = _make_call(facts.code, leaves, part, sizes, begin, totals, worth, chosen)
    else:
        key = _key(facts, given, part, sizes, begin, tuple(map(id, totals)))
        calls = _calls if chosen is None else chosen.calls
        known = calls.find(key)
        if known is None:
            made = _make_call(facts.code, leaves, part, sizes, begin, totals, worth, chosen)
            known = calls.keep(key, (facts.code.fold, made))  # the fold is held: its id is in the key
        call = known[1]
    if call is None:
        return None
    if torch._C._is_torch_function_mode_enabled():
        # A recorder (runtime/recorder.py) writes the call down; as a method, what is chosen for lists is not replayed.
        func = call if chosen is None else call.__call__
        return handle_torch_function(func, [v for v in given if isinstance(v, Tensor)], *given)
    return call(*given)


def _find_facts(fold: Fold, numbers: Sequence[int]) -> _Facts:
    key = id(fold), frozenset(numbers)
    known = _facts.find(key)
    if known is None or known[0] is not fold:
        code = compile_tiles(fold, frozenset(fold.leaves[k] for k in numbers))
        named = tuple(k for k in numbers if fold.leaves[k] in code.ranged)
        known = _facts.keep(key, (fold, _Facts(code, named, reads_data(code, code.scalars))))
    return known[1]


def _key(facts: _Facts, given: Sequence[Any], part: Sizes, whole: Sizes, begin: int, totals: tuple[int, ...]) -> tuple:
    """What decides a call of a fold, besides the addresses of tensors and numbers that are read in every call."""
    kinds = [(v.dtype, v.shape, v.stride(), v.is_neg()) if isinstance(v, Tensor) else None for v in given]
    own = (id(facts.code.fold), part.rows, part.batch, part.compute, *part.letters.values(), part.repeats)
    over = (whole.rows, whole.cols, begin) if facts.code.conditions or begin else (whole.rows, whole.cols)
    named = [given[k] for k in facts.named]
    said = _SETTING.read(), settings.now().budget, torch.get_num_threads()
    return (own, over, totals, *said, *named, *map(type, named), *kinds)


def _make_call(
    code: FoldCode,
    leaves: Sequence[Any],
    part: Sizes,
    whole: Sizes,
    begin: int,
    totals: Mapping[Expr, Tensor],
    worth: int,
    chosen: ChosenBlocks | None,
) -> CompiledFold | None:
    if not applies(code.fold, leaves, part, worth) or compiler.gemm_addresses() is None:
        return None
    try:
        return CompiledFold(code, leaves, part, whole, begin, totals, max(1, torch.get_num_threads()), chosen)
    except Unsupported:
        return None


def _may_run(sizes: Sizes) -> bool:
    """Whether a fold of these sizes is one that C++ may run, in this block of settings."""
    return (
        _SETTING.read() != "never"
        and sizes.device.type == "cpu"
        and sizes.compute in (torch.float32, torch.float64)
        and matmul.dry_run_sizes.get() is None
        and skip_small_tiles.active() is None
        and settings.current.get().shrink <= 1
    )


def applies(fold: Fold, leaves: Sequence[Any], sizes: Sizes, worth: int = WORTH) -> bool:
    """Whether C++ may run a fold of at least ``worth`` operations, as far as can be said without writing it."""
    if not _may_run(sizes):
        return False
    if not (sizes.rows and sizes.cols and torch.Size(sizes.batch).numel() and all(map(sizes.of, fold.letters))):
        return False  # BLAS takes no matrix without columns
    if not is_worthwhile(fold, sizes, worth):
        return False
    if not _has_form(fold):
        return False
    given = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)}
    if any(not given[e].shape[-1] for e in fold.tables):
        return False
    return all(_is_readable(e, v, e in fold.tables) for e, v in given.items())


def describe(fold: Fold, sizes: Sizes, numbers: frozenset[Expr], worth: int = WORTH) -> str:
    """What runs a fold of these sizes on a CPU: ``"C++"`` or ``"torch"``. Writes the code, compiles nothing."""
    if not is_worthwhile(fold, sizes, worth) or not all(map(sizes.of, fold.letters)):
        return "torch"
    if _SETTING.read() == "never" or sizes.compute not in (torch.float32, torch.float64):
        return "torch"
    if not _has_form(fold):
        return "torch"
    if compiler.current_compiler() is None or compiler.gemm_addresses() is None:
        return "torch"
    code = compile_fold(fold, numbers).variant({})
    named = (*numbers, *(size(axis) for axis in ("rows", "cols", *sizes.letters)))
    pairs = tuple((e, NUMBER_TYPES[e.dtype], 1) for e in fold.leaves if e.is_pair)
    swapped = all(r.attrs[1] == "rows" for r in fold.reductions)
    letters = tuple((letter, sizes.of(letter)) for letter in fold.letters)
    try:
        if code is not None:
            kind = KINDS[sizes.compute]
            form = Form(sizes.compute is torch.float32, letters, (BLOCK, FOLDED), named, pairs, swapped, (kind,))
            write_form(fold, (list_reducers(code),), form)
    except Unsupported:
        return "torch"
    return "C++"


def is_worthwhile(fold: Fold, sizes: Sizes, worth: int = WORTH) -> bool:
    """Whether a fold has at least ``worth`` operations, or C++ is to run all."""
    return _SETTING.read() == "always" or count_work(fold, sizes) >= worth


def count_work(fold: Fold, sizes: Sizes) -> int:
    """Pairs times a rough number of operations of each."""
    per_pair = 16 + sum(sizes.of(letter) for letter in fold.letters)
    per_pair += sum(_WALKED * sizes.of(letter) for letter in _list_walked(fold))
    return torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols * per_pair * sizes.repeats


@functools.lru_cache(maxsize=1024)
def _list_walked(fold: Fold) -> tuple[str, ...]:
    """The letter of every vector per pair that is computed feature by feature."""
    roots = [e.args[0] for e in topological(fold.reductions) if e.op in WALKED and e.is_pair]
    for r in fold.reductions:
        sums = (c for value in kind_of(r).summed(r.args) for c in contractions(value, r.attrs[1]))
        roots += [c.weight for c in sums if c.walk]
    inside = topological(roots, stop=lambda e: e.feature is None)
    return tuple(str(e.feature) for e in inside if e.is_pair and e.feature is not None)


def _has_form(fold: Fold) -> bool:
    """Whether all reductions are of kinds that have a C++ form, and walk over the pairs. What is compared with results
    must have the same bits as in the forward, which for monoids of users is never C++."""
    return (
        not fold.compares_results
        and all_have(FastForm.CPP, fold.reductions)
        and all(kind_of(r).walks(r, fold.reductions) for r in fold.reductions)
    )


def _is_plain(v: Tensor) -> bool:
    """Whether a leaf is a tensor in memory."""
    return type(v) in (Tensor, torch.nn.Parameter) and v.device.type == "cpu" and v.layout is torch.strided


def _is_readable(e: Expr, v: Tensor, table: bool) -> bool:
    """Whether C++ reads a leaf: a plain tensor; 16-bit vectors only where torch would widen them too."""
    if not _is_plain(v):
        return False
    if e.is_pair:
        return v.dtype in PAIR_KINDS and not v.is_conj()
    if e.feature is None or table:
        return True
    narrow = v.dtype in matmul.SIXTEEN and not matmul.needs_float32(v.device, v.dtype)
    return v.dtype in KINDS and not narrow
