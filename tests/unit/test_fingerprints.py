"""Fingerprints see what a kernel does, and not what anything is called."""

from types import SimpleNamespace

from tests.fingerprints.identity import identity
from tests.fingerprints.ptx import normalise

PTX = """
.version 8.7
.target sm_90a
.file 1 "/a/folder/k123.py"
.visible .entry fold_rows(
    .param .u64 fold_rows_param_0 // a pointer
)
.reqntid 128
{
$L__func_begin0:
    .loc 1 7 3
    ld.param.b64 %rd1, [fold_rows_param_0];
$L__BB0_3:
    /* begin inline asm */ add.s32 %r1, %r1, 1;
    @%p1 bra $L__BB0_3;
    bra $L__BB0_1;
$L__tmp4:
$L__BB0_1:
    ret;
}
.section .debug_abbrev
{
.b8 1
}
"""


def test_ptx_has_no_names():
    other = PTX.replace("fold_rows", "reduce").replace("/a/folder/k123", "b").replace(".loc 1 7 3", ".loc 1 9 1")
    other = other.replace("BB0_3", "BB1_30").replace("BB0_1", "BB1_7").replace("a pointer", "the output")
    assert normalise(other) == normalise(PTX)
    assert "fold_rows" not in normalise(PTX) and "debug" not in normalise(PTX)
    assert normalise(PTX.replace("%r1, 1;", "%r1, 2;")) != normalise(PTX)
    assert normalise(PTX.replace("bra $L__BB0_1;", "bra $L__BB0_3;")) != normalise(PTX)


def _helper(x, scale):
    return x * scale


def _other_helper(value, factor):
    """The same by other names."""
    return value * factor


def _third_helper(value, factor):
    return value + factor


helper, other_helper, third_helper = (SimpleNamespace(fn=f) for f in (_helper, _other_helper, _third_helper))


def _kernel(out, x, size):
    total = helper(x, scale=size)  # as a kernel calls another
    return out + total


def _renamed(destination, values, count):
    state = other_helper(values, factor=count)
    return destination + state


def _changed(destination, values, count):
    state = third_helper(values, factor=count)
    return destination + state


def _swapped(destination, values, count):
    state = other_helper(count, factor=values)
    return destination + state


def test_a_kernel_is_known_by_what_it_does():
    assert identity(_kernel) == identity(_renamed)
    assert len({identity(f) for f in (_kernel, _changed, _swapped)}) == 3
