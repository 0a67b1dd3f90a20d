"""A CUDA driver without a GPU: records what is compiled and launched, and in which thread; runs nothing.

``python -m tests.support.fake_cuda_driver LAYER ...`` calls each layer twice with its backward, as on an H200
(``benchmarks/pretend.py``), and prints a JSON line: what each call compiled and launched. Only the compiler proper is
left out: Triton's own caches say what has to be compiled. It needs a process of its own, where Triton does not
interpret.
"""

import contextlib
import json
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

import monoidreduce as mr
from benchmarks import pretend
from monoidreduce import ops
from monoidreduce.engines.triton.launch import driver
from tests.support import internals

HEARD: list[tuple[str, str, str]] = []  # what was done, to which kernel, in which thread


def hear(what, name):
    HEARD.append((what, name, threading.current_thread().name.strip("_").split("_")[0]))


class Compiled:
    """A kernel that was compiled."""

    packed_metadata = function = None
    metadata = SimpleNamespace(shared=0)
    launched = False  # by Triton or, where a recording compiled it without running it, by its own launcher

    def __init__(self, name):
        self.name = name

    @property
    def run(self):
        hear("load", self.name)
        return self.launch

    def launch(self, *given):
        self.launched = True
        hear("launch", self.name)

    def launch_again(self, *given):
        if not self.launched:
            self.launch()

    def launch_metadata(self, *given):
        return None


class Driver:
    """Of an H200 that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    @property
    def utils(self):
        hear("start", "driver")


def compiler(broken):
    """Compiles nothing; ``broken``: the kernel that cannot be compiled."""

    def compile(src, *given, **named):
        hear("compile", src.name)
        if src.name == broken:
            raise ValueError(f"{src.name} is broken")
        return Compiled(src.name)

    return compile


def _given(*shapes):
    return [torch.zeros(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]


def _loss(x, w):
    return ops.cross_entropy(x, w, torch.arange(len(x)))


LAYERS = {
    "attention": (ops.attention, lambda: _given(*((2, 8, 1024, 64),) * 3)),  # many pairs, step by step
    "head": (_loss, lambda: _given((1024, 1024), (32000, 1024))),
}


def called(layer, broken=None, together=True):
    """What two calls did, one after the other."""
    op, make = LAYERS[layer]
    with (
        mock.patch.object(driver, "skip_launches", contextlib.nullcontext),
        mock.patch.object(triton.compiler, "compile", compiler(broken)),
        pretend.h200(),
        pytest.MonkeyPatch.context() as patch,
        mr.use(engine="auto"),
    ):
        patch.setattr(driver, "make_relauncher", lambda compiled, *given: compiled and compiled.launch_again)
        internals.compile_in_parallel(patch, together)
        found = []
        for _ in range(2):
            HEARD.clear()
            args = make()
            out = op(*args)
            torch.autograd.grad(out, args, torch.ones_like(out))
            found.append(list(HEARD))
    return found


def main():
    knobs.propagate_env = False  # the variable stays as it is: it lets tensors on the CPU through
    knobs.runtime.interpret = False
    triton.runtime.driver.set_active(Driver())
    for asked in sys.argv[1:]:
        layer, how = asked.split(":")
        broken = None if how in ("together", "apart") else how
        try:
            found = called(layer, broken, how != "apart")
        except ValueError as error:
            found = [list(HEARD), str(error)]
        print(json.dumps([asked, *found]), flush=True)


if __name__ == "__main__":
    main()
