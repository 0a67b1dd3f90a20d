"""``op.explain`` and ``op.cost``: what a call would run, why, and what it costs, as text and as data.

Nothing is executed unless ``measure=True`` is given.
"""

from __future__ import annotations

import gc
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .engines import eager, triton
from .engines.common.block_gradients import describe_blocks, estimate_gradient
from .engines.common.evaluate import Sizes
from .errors import NoGradientError
from .plan import settings
from .plan.budget import format_ceil as _size
from .plan.candidates import Cost, DeviceRates, Part, ScheduleCost
from .program.constructors import LISTED
from .program.expression import Expr, topological
from .program.gradient import FoldGradient
from .program.lower import Fold, Lowered, Source, compile_program, run_passes
from .program.trace import TracedBody
from .reductions import kind_of
from .reductions.user import gradient_source
from .runtime import call_cost, dispatch
from .runtime.call_cost import ListedPairs
from .runtime.dispatch import choose_step_class
from .runtime.dry_run import LiveMemory
from .runtime.recorder import tensors_in

_ENGINES = {"eager": "flash", "triton": "flash", "panel": "panel"}  # the schedule of each engine that can be requested

_LISTED = ("flash", "shard rows")  # the schedules of listed pairs


class Explanation(str):
    """The text of an explanation; :meth:`as_dict` returns the same as data."""

    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain data, which JSON can hold."""
        return self.data


@dataclass(frozen=True)
class Measured:
    """What runs took: seconds (the median), and peak bytes beside the inputs."""

    seconds: float
    peak: int


@dataclass(frozen=True)
class Subject:
    """One call: the traced body, its inputs by name and their sizes."""

    name: str
    traced: TracedBody
    inputs: Mapping[str, Any]
    sizes: Sizes
    backward: bool
    listed: ListedPairs | None = None  # of a call over listed pairs; the program is then that of a call of their number

    @property
    def program(self) -> Lowered:
        return compile_program(self.traced.outputs)


def cost_of(subject: Subject, device: torch.device | str | None = None, ranks: int = 1) -> Cost:
    """The cost of a call by every schedule; see :meth:`monoidreduce.Op.cost`."""
    sizes = subject.sizes
    place = torch.device(device) if device is not None else sizes.device
    sizes = replace(sizes, device=torch.device("cpu") if place.type == "meta" else place)
    found = call_cost.estimate_program(subject.program, subject.inputs, sizes, subject.backward, ranks)
    if subject.listed is not None:
        return replace(found, schedules=tuple(s for s in found.schedules if s.schedule in _LISTED), own="flash")
    if not subject.backward:
        return found
    inputs = call_cost.require_gradients(subject.inputs)
    total = call_cost.estimate_total(subject.traced.outputs, inputs, sizes, choose_step_class("auto", sizes.device))
    return found if total is None else found.with_schedule(total)


def explain(subject: Subject, measured: Measured | None, passes: bool = False) -> Explanation:
    """A call explained; with ``passes`` also the program after each pass of the compiler."""
    engine = dispatch.engine()
    found = cost_of(subject)
    runs = _find_running(found, engine)
    data = _make_data(subject, found, runs, engine, measured)
    lines = list(_make_lines(subject, found, runs, engine, data))
    if passes:
        inputs = call_cost.require_gradients(subject.inputs) if subject.backward else {}
        wanted = [n for n, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad]
        stages = list(list_stages(subject.traced.outputs, wanted))
        data["passes"] = [asdict(s) for s in stages]
        lines += _describe_stages(stages)
    text = Explanation("\n".join(lines))
    text.data = data
    return text


def _find_running(found: Cost, engine: str) -> ScheduleCost | None:
    """The schedule that runs; None for the reference engine."""
    if engine == "reference":
        return None
    return found.get(_ENGINES.get(engine, ""), found.chosen)


# Data


def _make_data(
    subject: Subject, found: Cost, runs: ScheduleCost | None, engine: str, measured: Measured | None
) -> dict[str, Any]:
    sizes = subject.sizes
    return {
        "op": subject.name,
        "rows": sizes.rows,
        "cols": sizes.cols if subject.listed is None else subject.listed.cols,
        "listed": None if subject.listed is None else asdict(subject.listed),
        "batch": list(sizes.batch),
        "arithmetic": str(sizes.compute)[6:],
        "device": str(sizes.device),
        "engine": engine,
        "backward": subject.backward,
        "runs": "reference" if runs is None else runs.schedule,
        "why": _explain_choice(found, runs, engine, sizes),
        "folds": [] if runs is None else [_fold_data(p, found) for p in runs.parts],
        "schedules": [_describe_schedule(s, found) for s in found.schedules],
        "budget": settings.requested_budget(),
        "ceilings": found.ceilings.as_dict(),
        "measured": None if measured is None else asdict(measured),
        "sources": [] if runs is None else _list_sources(runs),
    }


def _fold_data(part: Part, found: Cost) -> dict[str, Any]:
    e, case = part.estimate, part.case
    ceiling = e.flops / found.ceilings.rate(case.dtype)
    return {
        "fold": ", ".join(f"{r.attrs[0]} over {r.attrs[1]}" for r in case.fold.reductions),
        "backward": part.backward,
        "choice": part.choice.as_dict(),
        "seconds": e.seconds,
        "flops": e.flops,
        "bytes": e.bytes,
        "held": e.held,
        "skipped": 1 - case.seen,
        "share_of_ceiling": ceiling / e.seconds if e.seconds else 0.0,
    }


def _describe_schedule(s: ScheduleCost, found: Cost) -> dict[str, Any]:
    plain = {n: getattr(s, n) for n in ("schedule", "flops", "bytes", "seconds", "held", "peak", "sent", "ranks")}
    return {**plain, "allowed": found.allows(s)}


def _list_sources(runs: ScheduleCost) -> list[str]:
    """The files of the generated kernels."""
    return [str(path) for p in runs.parts if p.case.kernels for path in triton.list_sources(p.case.fold)]


# Words


def _explain_choice(found: Cost, runs: ScheduleCost | None, engine: str, sizes: Sizes) -> str:
    if runs is None or engine != "auto":
        return f"the engine {engine} was asked for"
    if not found.schedules or not call_cost.count_matrix_bytes(sizes):
        return "there are no pairs"
    fastest = "predicted to be the fastest" + (f" within the budget of {_size(found.budget)}" if found.budget else "")
    dense = found.get("dense")
    others = [s for s in found.schedules if s.ranks == 1 and s.schedule not in ("dense", "total")]
    if runs is dense and others:
        gain = others[0].seconds / runs.seconds
        return (
            f"folding costs more than it saves: a matrix of pairs is {_size(runs.held)}, and run whole, with nothing "
            f"computed twice, the call is predicted {gain:.2f} times as fast as {others[0].schedule}"
        )
    if found.dense is None:  # never dense on a device with kernels
        return fastest
    if dense is not None and dense.seconds < runs.seconds and found.allows(dense):
        worth = f"but not so clearly that it were worth {_size(dense.peak)}"
        return f"dense would be faster, {_format_time(dense.seconds)}, {worth}"
    if dense is not None and dense.seconds < runs.seconds:
        room = f"the budget of {_size(found.budget)}" if found.budget else f"{_size(found.dense)} without a budget"
        return (
            f"the fastest that is allowed; dense would take {_format_time(dense.seconds)}, but hold "
            f"{_size(dense.peak)} with matrices of pairs of {_size(dense.held)}, above {room}"
        )
    return fastest


def _make_lines(
    subject: Subject, found: Cost, runs: ScheduleCost | None, engine: str, data: Mapping[str, Any]
) -> Iterator[str]:
    sizes, program = subject.sizes, subject.program
    batch = f" × {tuple(sizes.batch)}" if sizes.batch else ""
    yield (
        f"{subject.name}: {sizes.rows} rows × {data['cols']} columns{batch}, {sizes.compute} arithmetic, "
        f"engine {engine}"
    )
    if subject.listed is not None:
        yield str(subject.listed)
    walks = [any(not kind_of(r).gathers for r in p.fold.reductions) for p in program.passes]
    number = sum(walks)
    yield f"{number} pass{'es' if number != 1 else ''} over the pairs" + ("" if number else ": everything is one-sided")
    for k, (p, walked) in enumerate(zip(program.passes, walks, strict=True), 1):
        kinds = ", ".join(f"{r.attrs[0]} over {r.attrs[1]}" for r in p.fold.reductions)
        yield f"  {'pass' if walked else 'gather'} {k}: {kinds}; fed {', '.join(map(_name_feed, p.feeds))}"
    yield f"runs {data['runs']}: {data['why']}"
    if runs is None:
        return
    for part, fold in zip(runs.parts, data["folds"], strict=True):
        yield _fold_line(part, fold, _describe_tiles(part, subject))
    if subject.backward and runs.schedule != "dense":
        yield from _describe_derived(program, sizes, found.ceilings)
    if runs.schedule == "dense":
        cost = f"{_format_time(runs.seconds)}, {_size(runs.peak)} at once"
        yield f"  whole matrices of pairs, gradients by autograd; {cost}"
    yield f"predicted, {'forward and backward' if subject.backward else 'forward'} ({found.ceilings.name}):"
    yield from _make_table(found, runs)
    if data["measured"]:
        yield f"measured: {_format_time(data['measured']['seconds'])}, {_size(data['measured']['peak'])} at once"
    for path in data["sources"]:
        yield f"generated: {path}"


def _describe_derived(program: Lowered, sizes: Sizes, rates: DeviceRates) -> Iterator[str]:
    """Where the gradients of monoids come from that bring none."""
    for p in program.passes:
        for r in p.fold.reductions:
            source = gradient_source(r.attrs[2][0]) if r.attrs[0] == "user" else ""
            if source == "trace":
                yield f"  backward: {r.attrs[2][0].__name__}'s pullback is derived from the trace of its combine"
            elif source == "others":
                kept, folded, held = describe_blocks(r, sizes)
                cost = estimate_gradient(Fold(p.fold.leaves, (r,)), sizes, rates)
                again = "once" if folded >= (sizes.cols if r.attrs[1] == "cols" else sizes.rows) else "twice"
                yield (
                    f"  backward: {r.attrs[2][0].__name__} by combine with all other pairs, in torch: every pair is "
                    f"computed {again} more, in blocks of {kept} × {folded}, with about {_size(held)} held; "
                    f"{_format_time(cost.seconds)}; a pullback(c, a, g) of its own would be faster"
                )


def _describe_stages(stages: Sequence[Stage]) -> Iterator[str]:
    """The program after each compiler pass; one that changed nothing is named only."""
    before: Stage | None = None
    for stage in stages:
        same = before is not None and (before.program, before.text) == (stage.program, stage.text)
        yield f"{stage.program}, after {stage.compiler_pass}:" + (" unchanged" if same else "")
        if not same:
            yield textwrap.indent(stage.text, "  ")
        before = stage


def _describe_tiles(part: Part, subject: Subject) -> str:
    """What runs the tiles of a fold on a CPU."""
    sizes, listed = subject.sizes, subject.listed
    if sizes.device.type != "cpu" or part.choice.schedule != "flash":
        return ""
    numbers = frozenset(e for e in part.case.fold.leaves if not (e.rows or e.cols or e.feature is not None))
    worth = eager.cpp.WORTH_LISTED if listed is not None and listed.kind == "blocks" else eager.cpp.WORTH
    return f" in {eager.cpp.describe(part.case.fold, sizes, numbers, worth)}"


def _fold_line(part: Part, fold: Mapping[str, Any], tiles: str = "") -> str:
    where = "backward" if part.backward else "forward"
    skipped = f", {100 * fold['skipped']:.0f} % of the pairs skipped" if fold["skipped"] else ""
    share = f", {100 * fold['share_of_ceiling']:.0f} % of the products' ceiling" if fold["flops"] else ""
    return f"  {where}: {fold['fold']}: {part.choice}{tiles}; {_format_time(fold['seconds'])}{share}{skipped}"


def _make_table(found: Cost, runs: ScheduleCost) -> Iterator[str]:
    for s in found.schedules:
        mark = "runs" if s is runs else "not allowed" if not found.allows(s) else f"{s.seconds / runs.seconds:.2f} ×"
        mark = "by op.total" if s.schedule == "total" else mark
        sent = f", {_size(int(s.sent))} sent by each of {s.ranks} ranks" if s.ranks > 1 else ""
        yield (
            f"  {s.schedule:10} {_format_time(s.seconds):>10}, {s.flops / 1e9:.3g} GFLOP, {_size(int(s.bytes))} moved, "
            f"{_size(s.peak)} at once{sent}  ({mark})"
        )


def _name_feed(e: Expr) -> str:
    """What is fed to a pass: a short expression of inputs as it is, of any other what it is made of."""
    nodes = topological([e], stop=lambda n: n.op in ("result", *LISTED))
    if len(whole := repr(e)) <= _WIDEST and all(n.op not in ("result", *LISTED) for n in nodes):
        return whole
    found = [n.args[0].attrs[0] + _format_result_suffix(n.args[0], n.attrs[0]) for n in nodes if n.op == "result"]
    names = dict.fromkeys([str(n.attrs[0]) for n in nodes if n.op in ("input", "leaf")] + found)
    return names.popitem()[0] if e.op == "result" else f"(made of {' and '.join(names)})"


def _format_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# Measuring


def measure(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backward: bool) -> Measured:
    """Run a call a few times and measure it, with gradients if an argument requires one."""
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    wanted = [t for t in given if t.requires_grad] if backward else []

    def step() -> None:
        results = [v for v in tensors_in(call(*args, **kwargs)) if v.requires_grad]
        if wanted and results:
            ones = [torch.ones((), dtype=v.dtype, device=v.device).expand(v.shape) for v in results]
            torch.autograd.grad(results, wanted, ones, allow_unused=True)

    step()
    device = next((t.device for t in given), torch.device("cpu"))
    return Measured(sorted(_measure_seconds(step, device) for _ in range(5))[2], _measure_peak(step, given, device))


def _measure_seconds(step: Callable[[], None], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def _measure_peak(step: Callable[[], None], given: Sequence[Tensor], device: torch.device) -> int:
    if device.type != "cuda":
        with LiveMemory(given) as alive:
            step()
        return alive.peak
    gc.collect()  # what waits for the collector would end while the step runs
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# Programs after each pass of the compiler


@dataclass(frozen=True)
class Stage:
    """A program after one compiler pass, as text."""

    program: str  # "forward", or "backward of pass 1"
    compiler_pass: str
    text: str


def list_stages(outputs: tuple[Expr, ...], wanted: Sequence[str] = ()) -> Iterator[Stage]:
    """The text of a program after each compiler pass; then that of the gradient of each of its passes, last first.

    ``wanted``: the names of the inputs whose gradients are asked for; none of them, and there is no backward."""
    yield from _list_stages("forward", outputs)
    if not wanted:
        return
    program = compile_program(outputs)
    for number, p in reversed(list(enumerate(program.passes, 1))):
        asked = tuple(feed.dtype == "float" and _depends_on(feed, wanted) for feed in p.feeds)
        source = FoldGradient(p.fold, asked, (True,) * len(p.fold.outputs))
        try:
            yield from _list_stages(f"backward of pass {number}", source)
        except NoGradientError as error:
            yield Stage(f"backward of pass {number}", "gradient", str(error))


def _list_stages(program: str, source: Source) -> list[Stage]:
    found: list[Stage] = []

    def observe(name: str, result: Any) -> None:
        write = _FORMATS.get(name, format_outputs)
        found.append(Stage(program, name, write(result)))

    run_passes(source, observe)
    return found


def _depends_on(feed: Expr, names: Sequence[str]) -> bool:
    return any(e.op == "input" and e.attrs[0] in names for e in topological([feed]))


# Programs as text, for people: one line for each shared or long subexpression, then what is returned.
# ``t0 = q @ k  # per pair`` names a temporary; ``soft[cols](t0, v).mean1`` is a result of a reduction over columns;
# ``x0 <- q`` says what is fed to a leaf of a fold.


_WIDEST = 80  # characters of an expression, from which on it gets a line of its own
_ATOM = 9  # the precedence of names, numbers and calls, which need no parentheses
_INFIX = {  # sign and precedence, as in Python
    "eq": ("==", 1), "ne": ("!=", 1), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1),
    "logical_or": ("|", 2), "logical_xor": ("^", 3), "logical_and": ("&", 4), "bitwise_or": ("|", 2),
    "bitwise_xor": ("^", 3), "bitwise_and": ("&", 4), "add": ("+", 5), "sub": ("-", 5),
    "mul": ("*", 6), "div": ("/", 6), "dot": ("@", 6), "floor_divide": ("//", 6), "remainder": ("%", 6),
    "pow": ("**", 8),
}  # fmt: skip
_PREFIX = {"neg": ("-", 7), "logical_not": ("~", 7), "bitwise_not": ("~", 7)}


def format_outputs(outputs: Iterable[Expr | None], known: Mapping[Expr, str] | None = None) -> str:
    """Expressions, after the temporaries that they are made of; ``known``: the names that some of them already have."""
    roots = [e for e in outputs if e is not None]
    lines, texts = _format(roots, known or {})
    return "\n".join([*lines, f"return {', '.join(texts) or 'nothing'}"])


def format_groups(groups: Sequence[Sequence[Expr]]) -> str:
    """The reductions of each pass."""
    known = {e: f"pass{n}.r{k}" for n, group in enumerate(groups, 1) for k, e in enumerate(group)}
    lines = []
    for n, group in enumerate(groups, 1):
        mine = {e: name for e, name in known.items() if e not in group}
        made, texts = _format(group, mine)
        lines += [f"pass {n}:", *(f"    {line}" for line in made)]
        lines += [f"    {known[e]} = {text}" for e, text in zip(group, texts, strict=True)]
    return "\n".join(lines) or "no pass over the pairs"


def format_lowered(program: Lowered) -> str:
    """The passes, each with what is fed to its leaves, and the outputs that are made of their results."""
    known: dict[Expr, str] = {}
    lines = []
    for n, p in enumerate(program.passes, 1):
        made, texts = _format(p.feeds, known)
        fed = [f"{leaf} <- {text}" + _format_axes(leaf) for leaf, text in zip(p.fold.leaves, texts, strict=True)]
        inner, reductions = _format([e for pair in p.fold.scaled for e in pair], {})
        lines += [f"pass {n}:", *(f"    {line}" for line in (*made, *fed, *inner))]
        for k, (text, scale) in enumerate(zip(reductions[::2], reductions[1::2], strict=True)):
            lines.append(f"    pass{n}.r{k} = {text}" + ("" if scale == "1.0" else f" * {scale}"))
        places = {r: k for k, r in enumerate(p.fold.reductions)}
        for users, (r, k) in zip(p.results, p.fold.outputs, strict=True):
            known |= dict.fromkeys(users, f"pass{n}.r{places[r]}{_format_result_suffix(r, k)}")
    return "\n".join([*lines, format_outputs(program.outputs, known)])


def _format(roots: Sequence[Expr], known: Mapping[Expr, str]) -> tuple[list[str], list[str]]:
    """The lines of the temporaries, and the text of each root."""
    order = topological(roots, stop=known.__contains__)
    uses = Counter(a for e in order if e not in known for a in e.args)
    lines: list[str] = []
    texts: dict[Expr, tuple[str, int]] = {}  # the text of a node, and how strongly it binds
    for e in order:
        text, binds = (known[e], _ATOM) if e in known else _format_node(e, texts)
        if e.args and e not in known and (uses[e] > 1 or (uses[e] and len(text) > _WIDEST)):
            name = f"t{len(lines)}"
            lines.append(f"{name} = {text}{_format_axes(e)}")
            text, binds = name, _ATOM
        texts[e] = text, binds
    return lines, [texts[e][0] for e in roots]


def _format_node(e: Expr, texts: Mapping[Expr, tuple[str, int]]) -> tuple[str, int]:
    args = [texts[a] for a in e.args]
    if e.op in _INFIX:
        sign, binds = _INFIX[e.op]
        left, right = _in_parentheses(args[0], binds + (binds == 1)), _in_parentheses(args[1], binds + 1)
        return f"{left} {sign} {right}", binds
    if e.op in _PREFIX:
        sign, binds = _PREFIX[e.op]
        return f"{sign}{_in_parentheses(args[0], binds)}", binds
    if e.op in ("const", "input", "leaf"):
        return str(e.attrs[0]), _ATOM if not str(e.attrs[0]).startswith("-") else 7
    if e.op == "size":
        return f"num_{e.attrs[0]}", _ATOM
    if e.op == "result":
        return f"{args[0][0]}{_format_result_suffix(e.args[0], e.attrs[0])}", _ATOM
    inner = ", ".join(text for text, _ in args)
    if e.op == "reduce":
        kind, over, params = e.attrs
        extra = "".join(f", {getattr(p, '__name__', p)}" for p in params)
        return f"{kind}[{over}]({inner}{extra})", _ATOM
    attributes = "".join(f", {a}" for a in e.attrs if a is not None)
    return (f"{e.op}({inner}{attributes})" if e.args or e.attrs else e.op), _ATOM


def _format_result_suffix(reduction: Expr, k: int) -> str:
    """How the k-th result of a reduction is written: ``.index``; nothing where there is only one."""
    names = kind_of(reduction).result_names(reduction.args, reduction.attrs[2])
    return f".{names[k]}" if len(names) > 1 else ""


def _in_parentheses(arg: tuple[str, int], least: int) -> str:
    text, binds = arg
    return text if binds >= least else f"({text})"


def _format_axes(e: Expr) -> str:
    """A comment that says how many values an expression stands for."""
    place = "per pair" if e.is_pair else "per row" if e.rows else "per column" if e.cols else "one"
    return f"  # {place}" + ("" if e.feature is None else f', vector over "{e.feature}"')


_FORMATS: dict[str, Callable[[Any], str]] = {"group reductions": format_groups, "hoist one-sided": format_lowered}
