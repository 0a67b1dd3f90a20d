"""Compiles the kernels that no program generates for a GPU that is not here; prints the assembler's report as JSON.

``python -m tests.support.aot_fixed_kernels cuda:90``. Run it in its own process: Triton decides at import whether it
interprets.
"""

import contextlib
import io
import json
import os
import sys
from unittest import mock

from monoidreduce.engines.triton.kernels import pick, point_search, small_kernels, topk
from monoidreduce.engines.triton.launch import driver
from monoidreduce.reductions.base import split_blocks
from tests.support.aot_compile import _assembled, _counted

STRIPS = dict.fromkeys(("stride", "strips", "k", "whole", "width"), "i32") | {"maxima": "*fp32", "spare": "*i32"}
SOFT = dict.fromkeys(("z_out", "log_out", "peak_out", "mean", "log", "peak"), "*fp32") | {"mean_out": "*bf16"}
SINGLE = {"out": "*bf16", "rest": "*fp32", "key": "*i32", "order": "*i64", "weight": "*fp32"}
SINGLE |= {"near": "*bf16", "far": "*bf16"} | dict.fromkeys(("side", "other", "matches", "entries", "beyond"), "i32")
SINGLE |= {f"{x}_{axis}": "i32" for x in "nf" for axis in "bsf"}
BEST = {"value_out": "*fp32", "place_out": "*i64", "value": "*fp32", "place": "*i64", "parts": "i32", "rows": "i32"}
NEAREST = {"found": "*i64", "order": "*i64"} | dict.fromkeys(("queries", "sorted", "boxes"), "*fp32")
NEAREST |= dict.fromkeys(("total", "count", "level", "blocks", "k", "first_own"), "i32")

SELECT = dict.fromkeys(("stride", "cols", "strips", "k", "size"), "i32")
SELECT |= dict.fromkeys(("chosen", "places", "counts"), "*i32")


def selected(name, kind, key, largest=True, **constants):
    """A step of the k best of long rows: of a matrix of this type, and of integers ordered like its numbers."""
    read, written = ("*" + key, "*i32") if constants.get("COLLECTED") else (kind, kind)
    signature = {**SELECT, "x": read, "at": written, "counts": "*i32", "keys": "*" + key, "least": "*" + key}
    signature |= {"maxima": "*" + key, "out": "*i32" if name == "choose_strips" else "*" + key}
    signature |= {"values": kind, "indices": "*i64", "order": "*i64"}
    bits = 16 if kind == "*bf16" else 0
    constants = {"LARGEST": largest, "TOP": int(key[1:]) - 1 - bits, "BITS": bits, **constants}
    known = ("LARGEST",) if name == "choose_strips" else ()
    constants = {k: v for k, v in constants.items() if k not in (*known, *(("BITS",) if known else ()))}
    return topk._large_kernels.text, name, signature, constants, 4 if name in ("collect", "strip_maxima") else 16


def listed(kind, strips, width, slots, bits):
    """The k best: of a matrix of this type, so many strips, numbers looked at closely, and best."""
    signature = {"values": kind, "places": "*i64", "x": kind, **STRIPS}
    constants = {"STRIP": 64, "STRIPS": strips, "WIDTH": width, "SLOTS": slots, "BITS": bits}
    return "best_listed", signature, constants, 8


CASES = [
    (topk._kernels.text, *listed("*bf16", 2048, 4096, 64, 16)),
    (topk._kernels.text, *listed("*fp32", 8192, 8192, 128, 0)),
    (pick._kernels.text, "run_sums", SINGLE, {"WHICH": 0, "WIDTH": 128, "LANES": 128, "ENTRIES": 16}, 1),
    (small_kernels._kernels.text, "unite_best", BEST, {"LARGEST": True, "PARTS": 128, "ROWS": 16}, 4),
    (
        small_kernels._kernels.text,
        "unite_softmax",
        {**SOFT, "parts": "i32", "rows": "i32"},
        dict(WIDTH=128, LANES=128, ROWS=1, NUMBERS=True, ALL=128, SOME=64, WAIT=False),
        8,
    ),
    (
        small_kernels._kernels.text,
        "unite_sum",
        {"out": "*bf16", "x": "*fp32", "parts": "i32", "rows": "i32"},
        split_blocks(1024),
        4,
    ),
    (
        small_kernels._shift_kernels.text,
        "shift",
        {**dict.fromkeys(("out", "number", "total"), "*fp32"), "size": "i32"},
        {"LANES": 1024},
        4,
    ),
    selected("strip_maxima", "*bf16", "i32", STRIP=64, MANY=32),
    selected("choose_strips", "*fp64", "i64", STRIPS=8192),
    selected("collect", "*fp32", "i32", STRIP=64, LANES=2048, ROOM=4096),
    selected("choose", "*fp32", "i32", COLLECTED=True, WIDTH=8192),
    (point_search._kernels.text, "nearest", NEAREST, {"D": 3, "SLOTS": 16, "POINTS": 128, "BOXES": 512}, 4),
]


def compiled(text, name, signature, constants, warps, capability):
    """The registers of a thread, the bytes that it spills, and the lines that the assembler reads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants = getattr(driver.load_module(text), name), dict(constants)
    signature = {n: signature.get(n, "constexpr") for n in function.arg_names}
    ast, said = ASTSource(function, signature, constants), io.StringIO()
    with mock.patch.dict(os.environ, TRITON_DUMP_PTXAS_LOG="1"), contextlib.redirect_stdout(said):
        made = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    registers, spills = _counted(said.getvalue()) or _counted(_assembled(made.asm["ptx"], capability))
    return registers, spills, made.asm["ptx"].count("\n")


if __name__ == "__main__":
    for case in CASES:
        found = compiled(*case, int(sys.argv[1].removeprefix("cuda:")))
        print(
            json.dumps({"kernel": case[1], **dict(zip(("registers", "spills", "lines"), found, strict=True))}),
            flush=True,
        )
