"""The interpreter that the other tests run in gives the numbers of Triton's own."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support.comparison import run
from tests.support.fast_interpreter import _by_shifts, quicken
from tests.support.layers import BY_NAME

PLAN = KernelPlan(16, 32, 4, 1)


def numbers(name):
    args = BY_NAME[name].args(17, 33, 0, torch.float32)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        return run(BY_NAME[name].op, args).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["alibi_attention", "dropout_attention", "moments", "nearest_neighbours"])
def test_the_numbers_are_those_of_the_interpreter_as_it_is(name, as_it_is):
    slow = numbers(name)
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        quick = numbers(name)
    assert all(torch.equal(quick[key], slow[key]) for key in slow)


@triton.jit
def _total(x):
    return tl.sum(x, 0)


@triton.jit
def _twice(out, given, SIZE: tl.constexpr):
    x = tl.load(given + tl.arange(0, SIZE))
    tl.store(out, _total(x) + _total(x))


def test_the_language_is_translated_once_a_launch_and_back_again(monkeypatch):
    seen, members = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *of: seen.append(of[0]) or members(*of))
    word, out = tl.load, torch.zeros(1)
    for _ in range(2):
        seen.clear()
        _twice[(3,)](out, torch.arange(8.0), SIZE=8)
        assert out == 56 and tl.load is word
        assert seen.count(tl) <= 2  # of the kernel's module and of the language's own functions, not of each call


@triton.jit
def _last_of_the_largest(a, at, b, bt):
    later = (b > a) | ((b == a) & (bt > at))
    return tl.where(later, b, a), tl.where(later, bt, at)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _reduced(out, places, given, ROWS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(given + at)
    best, place = tl.reduce((x, at), 1, _last_of_the_largest)
    tl.store(out + tl.arange(0, ROWS), best)
    tl.store(places + tl.arange(0, ROWS), place)
    tl.store(out + ROWS + tl.arange(0, SIZE)[None, :], tl.reduce(x, 0, _largest, keep_dims=True))
    tl.store(out + ROWS + SIZE, tl.reduce(x, None, _largest))
    tl.store(out + ROWS + SIZE + 1, tl.reduce(best, 0, _largest))


def test_reductions_by_a_function_are_the_interpreters(as_it_is):
    given, results = torch.randint(0, 5, (4, 16)).float(), []
    for quick in (False, True):
        out, places = torch.full((22,), -9.0), torch.full((4,), -9)
        with pytest.MonkeyPatch.context() as patch:
            if quick:
                quicken(patch)
            _reduced[(1,)](out, places, given, ROWS=4, SIZE=16)
        results.append((out, places))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0][:4], given.amax(1)) and (results[0][0][20:] == given.max()).all()


@pytest.mark.parametrize("down", [False, True], ids=["from bfloat16", "to bfloat16"])
def test_every_bfloat16_is_converted_as_by_the_interpreter(down, as_it_is):
    numbers = np.arange(2**16, dtype=np.uint16)
    if down:
        numbers = (numbers.astype(np.uint32) << 16) + np.arange(2**16, dtype=np.uint32)
    kinds = (tl.float32, tl.bfloat16) if down else (tl.bfloat16, tl.float32)
    data = numbers.view(np.float32) if down else numbers
    slow, quick = interpreter._convert_float, _by_shifts(interpreter._convert_float)
    for part in (data, data[0x100:0x7F00]):  # with denormal numbers, and without
        assert np.array_equal(quick(part, *kinds, None), slow(part, *kinds, None))
