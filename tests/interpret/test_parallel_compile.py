"""Kernels are compiled together, in threads: the same ones, once each, and launched as if nothing had been done."""

import contextvars
import functools
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.launch.driver import LaunchCache
from tests.support import internals

CPU = torch.device("cpu")
SHOWN = contextvars.ContextVar("shown", default="nothing")


@functools.cache
def heard(*asked):
    """What each did in a process without a GPU (``fake_cuda_driver.py``): of both calls, or of a failed one and why."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.support.fake_cuda_driver", *asked]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    return {name: found for name, *found in map(json.loads, said.stdout.splitlines())}


LAYERS = ("head", "attention")


def together(layer):
    return heard(*(f"{name}:together" for name in LAYERS))[f"{layer}:together"]


def apart(layer):
    return heard(*(f"{name}:apart" for name in LAYERS))[f"{layer}:apart"]


def done(what, events, thread=None):
    return [name for did, name, where in events if did == what and where == (thread or where)]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_kernel_is_compiled_once_and_launched_in_its_order(layer):
    (first, second), (plainly, _) = together(layer), apart(layer)
    assert done("launch", first) == done("launch", first, "MainThread") == done("launch", plainly)
    assert sorted(done("compile", first)) == sorted(done("compile", plainly)) == sorted(done("launch", plainly))
    assert done("compile", plainly) == done("compile", plainly, "MainThread")
    assert not done("compile", second)


def test_the_kernels_around_a_product_are_compiled_in_threads_and_loaded_there():
    first, _ = together("head")
    assert set(done("compile", first, "compiling")) == {
        "guess_maxima",
        "write_guessed",
        "gather_label_logits",
        "finish_rows",
        "recompute_rows",
        "scale_rows",
        "complete_rows",
        "contract_rows",
        "add_labels",
    }


def test_the_kernels_of_a_backward_are_compiled_in_threads_before_the_first_is_waited_for():
    first, _ = together("attention")
    assert sorted(done("compile", first, "compiling")) == ["fold_over_cols", "fold_over_rows", "side"]
    assert done("compile", first, "MainThread") == ["fold_over_cols"]  # the forward's, alone


def test_the_driver_starts_in_a_thread_once_before_anything_is_compiled():
    found = heard(*(f"{name}:together" for name in LAYERS))
    first, *others = (call for name in LAYERS for call in found[f"{name}:together"])
    assert first[0] == ["start", "driver", "start"]
    assert not any(done("start", call) for call in (first[1:], *others))


def test_a_kernel_that_cannot_be_compiled_is_met_by_its_launch():
    events, error = heard("head:recompute_rows")["head:recompute_rows"]
    assert error == "recompute_rows is broken"
    assert [where for did, name, where in events if (did, name) == ("compile", "recompute_rows")] == [
        "compiling",
        "MainThread",
    ]


class Kernel:
    """Says what is asked of it."""

    def __init__(self, said, name, broken=False):
        self.said, self.name, self.broken = said, name, broken

    def __getitem__(self, grid):
        return lambda *given, **named: self.said.append(("launch", self.name, grid, given, named))

    def warmup(self, *given, grid, **named):
        self.said.append(("compile", self.name, grid, given, named, threading.current_thread().name, SHOWN.get()))
        if self.broken:
            raise ValueError(self.name)
        return self

    @property
    def run(self):
        self.said.append(("load", self.name))


@pytest.fixture
def waits(monkeypatch):
    """As on a GPU, of which nothing was asked yet."""
    internals.compile_in_parallel(monkeypatch)
    monkeypatch.setattr(driver, "_launched", set())


def launches(*kernels):
    for k, kernel in enumerate(kernels):
        driver.launch(kernel, (k,), ("x", k), {"WIDTH": 64})


def test_threads_compile_with_what_a_launch_is_given_and_where_it_is_asked(waits):
    said = []
    a, b = Kernel(said, "a"), Kernel(said, "b")
    SHOWN.set("something")
    driver.compile_ahead(CPU, lambda: launches(a, b))
    assert sorted(s[1] for s in said if s[0] == "load") == ["a", "b"]
    for k, name in enumerate("ab"):
        (asked,) = [s for s in said if s[:2] == ("compile", name)]
        assert asked[2:5] == ((k,), ("x", k), {"WIDTH": 64})
        assert asked[5].startswith("compiling") and asked[6] == "something"
    launches(a)
    assert said[-1] == ("launch", "a", (0,), ("x", 0), {"WIDTH": 64})


def test_one_kernel_compiles_where_it_is_launched(waits):
    said = []
    a, b = Kernel(said, "a"), Kernel(said, "b")
    launches(b)
    driver.compile_ahead(CPU, lambda: launches(a, b, a))  # b was launched before
    assert [s[0] for s in said] == ["launch"]


def test_what_is_kept_is_not_launched_where_launches_are_looked_at(waits):
    """It would run on what nobody made yet."""
    said = []
    kept, a, b = LaunchCache(), Kernel(said, "a"), Kernel(said, "b")
    again = lambda *arguments: said.append(("again", *arguments))
    first = lambda kernel: lambda: driver.launch(kernel, (1,), ("x",), {}) or again

    def steps():
        kept(("a",), first(a), ["x"])
        kept(("b",), first(b), ["x"])

    kept(("a",), first(a), ["x"])
    said.clear()
    driver.compile_ahead(CPU, steps)
    assert not [s for s in said if s[0] in ("launch", "again")]
    steps()
    assert [s[:2] for s in said if s[0] in ("launch", "again")] == [("again", "x"), ("launch", "b")]


def test_mistakes_are_left_to_the_launch(waits):
    said = []
    driver.compile_ahead(CPU, lambda: launches(Kernel(said, "a", broken=True), Kernel(said, "b")))
    assert sorted(s[:2] for s in said) == [("compile", "a"), ("compile", "b"), ("load", "b")]

    def stops():
        launches(Kernel(said, "c"))
        raise ValueError

    said.clear()
    driver.compile_ahead(CPU, stops)
    assert not said and driver._collected.get() is None


def test_nothing_is_looked_at_in_the_interpreter_at_rest_or_where_torch_is_watched():
    asked = []
    driver.compile_ahead(CPU, lambda: asked.append("interpreter"))
    with driver.skip_launches():
        driver.compile_ahead(torch.device("cuda"), lambda: asked.append("rest"))
    with torch._subclasses.FakeTensorMode():
        driver.compile_ahead(torch.device("cuda"), lambda: asked.append("watched"))
    assert not asked
