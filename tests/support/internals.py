"""Changes to the package's internals that several tests make, each named here and nowhere else.

Every function takes a ``pytest.MonkeyPatch``: the test's own, or that of ``pytest.MonkeyPatch.context()``. The change
ends where the patch is undone. Targets are dotted names, so that importing this module imports no engine: Triton must
not be imported before its interpreter is asked for (``tests/interpret/conftest.py``).

``around`` is always a function that stands in for another one: it is called with the real function, then with that
one's own arguments.
"""

import pkgutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from monoidreduce.engines.common.bounded_cache import BoundedCache
from monoidreduce.engines.triton.launch import driver

Patch = pytest.MonkeyPatch
Around = Callable[..., Any]


def _set(patch: Patch, target: str, value: Any) -> None:
    """Set an attribute by its full name. Modules are imported: a function may have the name of a package beside it."""
    owner, _, name = target.rpartition(".")
    patch.setattr(pkgutil.resolve_name(owner), name, value)


def _wrap(patch: Patch, target: str, around: Around) -> None:
    real = pkgutil.resolve_name(target)
    _set(patch, target, lambda *args, **kwargs: around(real, *args, **kwargs))


def _collect(patch: Patch, target: str, of: Callable[..., Any]) -> list:
    """Calls of a function go on as before; what ``of`` makes of the arguments of each is added to the list."""
    found: list = []

    def around(real: Callable, *args: Any, **kwargs: Any) -> Any:
        found.append(of(*args, **kwargs))
        return real(*args, **kwargs)

    _wrap(patch, target, around)
    return found


# Caches: tests that count what happens start with empty ones


def forget_launches(patch: Patch) -> None:
    """No launch is prepared: each kernel is planned and launched as for the first time."""
    patch.setattr("monoidreduce.engines.triton.kernels.prepared_fold._PREPARED", {})


def forget_contractions(patch: Patch) -> None:
    """No contraction kernel is prepared."""
    patch.setattr("monoidreduce.engines.triton.panel.accumulators._PREPARED", BoundedCache(1024))


def forget_tile_ranges(patch: Patch) -> None:
    """No range of tiles is remembered that masks leave to compute."""
    patch.setattr("monoidreduce.engines.common.bounded_cache._cache", OrderedDict())


def forget_panel_recordings(patch: Patch) -> None:
    """No panel program is recorded, nor met once."""
    cache = pkgutil.resolve_name("monoidreduce.engines.common.bounded_cache.BoundedCache")
    patch.setattr("monoidreduce.engines.triton.panel.kernel_step._LOOPS", cache(32))
    patch.setattr("monoidreduce.engines.triton.panel.kernel_step._SEEN_ONCE", cache(256))


def forget_cache_warnings(patch: Patch) -> None:
    """No warning about the cache on disk was given yet."""
    patch.setattr("monoidreduce.plan.disk._warned", threading.Event())


# The device


def pretend_device(
    patch: Patch,
    *,
    descriptors: bool | None = None,
    epilogue: bool | None = None,
    warp_specialised: bool | None = None,
    float32_split: bool | None = None,
    tanh: bool | None = None,
    processors: int | None = None,
    family: Any = None,
) -> None:
    """Every device has, or has not, tensor descriptors, GEMMs with epilogues of our own, warp-specialised kernels,
    kernels for split float32 and a tanh instruction; so many streaming multiprocessors; and the default plans of a
    family of GPUs. None leaves a property as it is."""
    targets = {
        "monoidreduce.engines.triton.launch.driver.has_descriptors": descriptors,
        "monoidreduce.engines.triton.launch.driver.has_fast_epilogues": epilogue,
        "monoidreduce.engines.triton.launch.driver.runs_warp_specialized": warp_specialised,
        "monoidreduce.engines.triton.launch.driver.splits_float32": float32_split,
        "monoidreduce.engines.triton.launch.driver.has_tanh": tanh,
        "monoidreduce.engines.triton.launch.driver.count_processors": processors,
    }
    for target, value in targets.items():
        if value is not None:
            patch.setattr(target, lambda device, value=value: value)
    if family is not None:
        patch.setattr("monoidreduce.engines.triton.schedules.kernel_plan.FAMILY", family)


def keep_directions_apart(patch: Patch) -> None:
    """Sums over rows and over columns have a kernel each, also where one would make both."""
    target = "monoidreduce.engines.triton.kernels.prepared_fold.PreparedFold._join_directions"
    patch.setattr(target, lambda *given: None)


def pretend_triton_version(patch: Patch, version: tuple[int, int]) -> None:
    patch.setattr("monoidreduce.engines.triton.launch.driver.triton_version", lambda: version)


def pretend_free_memory(patch: Patch, size: float) -> None:
    """Every device has so many free bytes."""
    patch.setattr("monoidreduce.engines.common.matmul.free_memory", lambda device: size)


def pretend_host(patch: Patch, root: Path) -> None:
    """What the system says of memory stands in files under ``root``: meminfo, cgroup and groups/."""
    from monoidreduce.plan import budget

    patch.setattr(budget, "_MEMINFO", root / "meminfo")
    patch.setattr(budget, "_OWN_GROUPS", root / "cgroup")
    patch.setattr(budget, "_GROUPS", root / "groups")
    budget._find_groups.cache_clear()


def compile_in_parallel(patch: Patch, allowed: bool = True) -> None:
    """Kernels of one call are, or are not, compiled together, as on a GPU."""
    patch.setattr("monoidreduce.engines.triton.launch.driver._can_compile_ahead", lambda device: allowed)


def hide_labels(patch: Patch, hidden: bool = True) -> None:
    """Values of labels are not read, as on a GPU, where that would wait for the device; or are, as on a CPU."""
    patch.setattr("monoidreduce.ops.checks.can_inspect", lambda t: not hidden)


# Which kernels run


def set_pair_thresholds(
    patch: Patch,
    *,
    many: int | None = None,
    very_many: int | None = None,
    saved_row_gradients: int | None = None,
    float32_split: int | None = None,
) -> None:
    """From how many pairs on kernels for many, or very many, pairs run, row gradients are saved by a forward, and
    float32 is split. 0: always."""
    targets = {
        "monoidreduce.engines.triton.schedules.spec_from_tensors.MANY": many,
        "monoidreduce.engines.triton.schedules.spec_from_tensors.VERY_MANY": very_many,
        "monoidreduce.runtime.dispatch.MANY": saved_row_gradients,
        "monoidreduce.engines.triton.schedules.spec_from_tensors.MANY_FLOAT32": float32_split,
    }
    for target, value in targets.items():
        if value is not None:
            patch.setattr(target, value)


def guess_maximum_for(patch: Patch, *dtypes: Any) -> None:
    """Vectors of these types alone have kernels with a guessed maximum."""
    patch.setattr("monoidreduce.engines.triton.schedules.spec_from_tensors._GUESSED", dtypes)


def set_panel_sizes(patch: Patch, **sizes: int) -> None:
    """Constants of the panel layout by name (``NARROW``, ``MIN_ROWS``, ``MULTIPLE``, ...): small ones let small
    problems have many ragged panels."""
    for name, value in sizes.items():
        patch.setattr(f"monoidreduce.plan.panel_layout.{name}", value)


def replace_row_blocks(patch: Patch, around: Around) -> None:
    """Another choice of the blocks of rows of a panel program."""
    _wrap(patch, "monoidreduce.plan.panel_layout.plan_row_blocks", around)


def use_epilogue_plans(patch: Patch, plans: dict) -> None:
    """GEMMs with epilogues stand in for the vendor's on every device, with these tiles."""
    pretend_device(patch, epilogue=True)
    patch.setattr("monoidreduce.engines.triton.panel.epilogue.PLANS", plans)
    patch.setattr("monoidreduce.engines.triton.panel.epilogue.SHALLOW", {})


def use_row_kernel_plans(patch: Patch, plans: dict) -> None:
    """Kernels over the rows of a panel have these tiles."""
    patch.setattr("monoidreduce.engines.triton.panel.row_kernel.PLANS", plans)


def use_vendor_gradients(patch: Patch) -> None:
    """Gradients that were predicted to fuse into an epilogue go by the vendor's GEMM."""
    fuses = lambda real, plan: not plan.loop.exact and real(plan)
    _wrap(patch, "monoidreduce.engines.triton.panel.arena.MemoryPlan.has_epilogue", fuses)


def set_topk_strip(patch: Patch, columns: int) -> None:
    """So many columns are one strip of the two-level top-k."""
    _set(patch, "monoidreduce.engines.triton.kernels.topk._STRIP", columns)


# Launches


def replace_launch(patch: Patch, around: Around) -> None:
    """``around(launch, call)`` is called for each first launch of a kernel."""
    _wrap(patch, "monoidreduce.engines.triton.kernels.fold_kernel.execute", around)


def watch_launches(patch: Patch, of: Callable[[Any], Any] = lambda call: call) -> list:
    """What ``of`` makes of each first launch of a kernel, as a list that grows; not of those collected to compile."""
    found: list = []

    def around(launch: Callable, call: Any) -> Any:
        if not driver.is_collecting():
            found.append(of(call))
        return launch(call)

    replace_launch(patch, around)
    return found


def collect_launches(patch: Patch) -> list:
    """Launches are collected and not made: no kernel runs, nor does a GEMM of the vendor's."""
    found: list = []
    nothing = lambda *given: None
    replace_launch(patch, lambda launch, call: found.append(call))
    patch.setattr("monoidreduce.engines.triton.launch.driver.load_module", lambda *text: mock.MagicMock())
    patch.setattr("monoidreduce.engines.common.matmul.multiply_into_panel", nothing)
    patch.setattr("monoidreduce.engines.triton.panel.accumulators.contract_into", nothing)
    return found


def watch_prepared(patch: Patch, of: Callable[[Any], Any]) -> list:
    """What ``of`` makes of each launch once it is prepared."""
    found: list = []

    def prepare(real: Callable, launch: Any, *given: Any) -> None:
        real(launch, *given)
        found.append(of(launch))

    _wrap(patch, "monoidreduce.engines.triton.kernels.fold_kernel.FoldLaunch.prepare", prepare)
    return found


def watch_generated_kernels(patch: Patch) -> list:
    """The generated kernels, as a list that grows."""
    found: list = []

    def kernel(real: Callable, spec: Any) -> Any:
        found.append(real(spec))
        return found[-1]

    _wrap(patch, "monoidreduce.engines.triton.codegen.compiler.compile_fold", kernel)
    return found


def watch_epilogue_kernels(patch: Patch) -> list[str]:
    """The names of the launched GEMMs with epilogues and of the kernels around them."""
    return _collect(
        patch, "monoidreduce.engines.triton.panel.epilogue.PreparedGemm.launch", lambda ready, name, *given: name
    )


def replace_fixed_kernel_launch(patch: Patch, around: Around) -> None:
    """``around(launch, kernels, name, grid, arguments, *constants)`` for first launches of kernels that no program
    generates."""
    _wrap(patch, "monoidreduce.engines.triton.launch.driver.Kernels._first", around)


def relaunch_on_any_device(patch: Patch) -> None:
    """Launches are prepared once and made again by address on every device, as on a GPU."""
    patch.setattr("monoidreduce.engines.triton.launch.driver.can_relaunch", lambda device: True)


def watch_tile_ranges(patch: Patch, around: Around) -> None:
    """Stands in for what finds the ranges of tiles that masks leave to compute."""
    _wrap(patch, "monoidreduce.engines.triton.codegen.tile_ranges.compute_tile_ranges", around)


# Panels


def replace_panel_begin(patch: Patch, around: Around, kernels: bool = True) -> None:
    """``around(begin, step, panel)`` begins each panel program, by kernels or in torch."""
    step = (
        "monoidreduce.engines.triton.panel.kernel_step.KernelStep"
        if kernels
        else "monoidreduce.engines.panel.TorchStep"
    )
    _wrap(patch, f"{step}.begin", around)


def watch_panels(patch: Patch, of: Callable[..., Any] = lambda step, panel: panel, kernels: bool = True) -> list:
    """What ``of(step, panel)`` makes of each panel program that begins, by kernels or in torch."""
    step = (
        "monoidreduce.engines.triton.panel.kernel_step.KernelStep"
        if kernels
        else "monoidreduce.engines.panel.TorchStep"
    )
    return _collect(patch, f"{step}.begin", of)


def replace_panel_replay(patch: Patch, repeated: Callable = lambda run, *given: run(*given)) -> None:
    """``repeated(run, *given)`` stands in for recording and replaying a panel program; by default it is run."""
    patch.setattr("monoidreduce.engines.triton.panel.kernel_step.replay_walk", repeated)


def watch_panel_replays(patch: Patch, around: Around) -> None:
    """``around(run, recording, *given)`` replays each recorded panel program."""
    recording = pkgutil.resolve_name("monoidreduce.engines.triton.launch.replay.Replay")

    class Watched(recording):
        def __init__(self, *how: Any, **options: Any) -> None:
            super().__init__(*how, **options)
            run = self.run
            self.run = lambda *given: around(run, self, *given)

    patch.setattr("monoidreduce.engines.triton.launch.replay.Replay", Watched)


# Engines and the planner


def replace_eager_engine(patch: Patch, run: Callable) -> None:
    """``run(fold, leaves, sizes)`` stands in for the eager engine."""
    run_engines(patch)
    patch.setitem(pkgutil.resolve_name("monoidreduce.runtime.dispatch.FOLDERS"), "eager", run)


def run_engines(patch: Patch) -> None:
    """Engines run in every call: no torch calls are recorded, or replayed from before something was replaced."""
    patch.setattr("monoidreduce.runtime.torch_replay.FoldReplay.__call__", lambda self, values: self.run(values))


def set_tiles(patch: Patch, *, choose: Callable | None = None, pairs: int | None = None) -> None:
    """Another choice of the eager engine's tiles, and of how many pairs one holds at most."""
    run_engines(patch)
    if choose is not None:
        patch.setattr("monoidreduce.plan.schedule.choose_tiles", choose)
    if pairs is not None:
        patch.setattr("monoidreduce.plan.schedule.ELEMENTS", pairs)


def replace_planned_run(patch: Patch, run: Callable) -> None:
    """``run(choice, fold, leaves, sizes)`` stands in for running a fold as planned."""
    run_engines(patch)
    patch.setattr("monoidreduce.engines.auto.run_choice", run)


def plan_panels(patch: Patch) -> None:
    """The planner chooses panels by kernels, as on a GPU."""
    run_engines(patch)
    choice = pkgutil.resolve_name("monoidreduce.plan.schedule.Choice")("panel")
    patch.setattr("monoidreduce.engines.auto._has_kernels", lambda device: True)
    patch.setattr("monoidreduce.engines.auto._choose", lambda *call: (choice, choice))


def set_dense_limit(patch: Patch, pairs: int) -> None:
    """Calls of more pairs are never run dense."""
    patch.setattr("monoidreduce.runtime.call_cost.DENSE_LIMIT", pairs)


def replace_dense_form(patch: Patch, whole: Callable) -> None:
    """``whole(program, numbers)`` builds the dense form of a call."""
    patch.setattr("monoidreduce.engines.dense.write_dense", whole)


def set_candidates(patch: Patch, candidates: Callable) -> None:
    """``candidates(case, over=None)``: what the tuner tries beside the safe plan."""
    patch.setattr("monoidreduce.plan.candidates.rank_candidates", candidates)


def replace_saved_row_gradients(patch: Patch, form: Callable) -> None:
    """``form(fold, leaves, sizes, engine)``: how a pass saves its row gradients, or None."""
    patch.setattr("monoidreduce.runtime.dispatch.find_saving_fold", form)
    patch.setattr("monoidreduce.runtime.autograd.PassContext.may_save", True)
