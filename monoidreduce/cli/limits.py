"""How large a problem fits in a given memory, ours and in plain torch: the demo's first question.

Each side is really run, forward and backward, at growing sizes until a run needs more memory than allowed, or the next
run would take too long. Memory is the peak of everything alive: inputs, gradients, results and temporaries.

Legend: M rows, N columns, D features. The torch form is the most frugal one that torch has for the layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..engines.common.oom_retry import is_out_of_memory
from .layers import SEED
from .measure import profile_memory

WINDOW = 1024  # keys that a token attends to
STOPPED_BY_MEMORY, STOPPED_BY_TIME = "memory", "time"  # why no larger size was tried
_CLOSE = 1.08  # a size that fits and one that does not are this close at the end; so is its memory to the limit
_LEAST_STEP = 1.3  # growing by less is not worth a run
_COLD = 0.5  # seconds from which a run that took too long is made again
_PATIENCE = 3.0  # times the seconds allowed, compiling included
_MOST_STEP = 4.0  # a larger step would trust a guess from small sizes too far
_BEYOND = 2.0  # times the other side's largest size that are tried, however long it takes


@dataclass(frozen=True)
class Question:
    """A problem that is made larger: ``inputs(size, device)`` are the arguments, then the cotangent of the result."""

    key: str
    title: str
    unit: str
    what: str
    torch_code: str
    ours: Callable[..., Tensor]
    dense: Callable[..., Tensor]
    inputs: Callable[[int, torch.device], tuple[Tensor, ...]]
    start: int
    multiple: int  # sizes are multiples of this


@dataclass(frozen=True)
class Run:
    """One real run: its size, the peak of its memory in bytes (None: the device ran out), and its time."""

    size: int
    peak: int | None
    seconds: float


@dataclass(frozen=True)
class Growth:
    """The runs of one side, in the order they were made, and why they ended."""

    runs: tuple[Run, ...]
    limit: int
    stopped: str

    @property
    def largest(self) -> Run | None:
        """The largest run within the limit; None if not even the first one was."""
        return max((r for r in self.runs if fits(r, self.limit)), key=lambda r: r.size, default=None)

    def to_data(self) -> dict[str, Any]:
        found = self.largest
        runs = [{"size": r.size, "peak_bytes": r.peak, "seconds": r.seconds} for r in self.runs]
        return {"largest": found and found.size, "stopped_by": self.stopped, "runs": runs}


@dataclass(frozen=True)
class Limit:
    """The answer to a question."""

    question: Question
    ours: Growth
    dense: Growth

    @property
    def gain(self) -> float:
        """How many times larger ours may be; infinite if torch's did not fit. 0 if ours did not, or if torch's search
        ended by time: then nobody knows."""
        ours, dense = self.ours.largest, self.dense.largest
        if dense is not None and self.dense.stopped != STOPPED_BY_MEMORY:
            return 0.0
        return 0.0 if ours is None else float("inf") if dense is None else ours.size / dense.size

    def to_data(self) -> dict[str, Any]:
        sides = {"ours": self.ours.to_data(), "torch": self.dense.to_data()}
        return {"name": self.question.key, "unit": self.question.unit, "memory_bytes": self.ours.limit, **sides}


# Growing ----------------------------------------------------------------------------------------------------------


def fits(run: Run, limit: int) -> bool:
    return run.peak is not None and run.peak <= limit


def grow(
    measure: Callable[[int], Run], start: int, limit: int, seconds: float, multiple: int = 1, beside: int = 0
) -> Growth:
    """Run growing sizes from ``start`` on, until one exceeds ``limit`` bytes or the next would exceed ``seconds``.

    The next size is guessed from the runs so far; what is reported was run. A run that is slower than its size explains
    is made once more and judged by the faster one: a new size may compile a kernel. Time that compiling took does not
    count, unless the whole takes ``_PATIENCE`` times ``seconds``.

    ``beside`` is the largest size that was found for another side. It is the second size that is run, and time ends
    the growth only beyond it: a busy machine must not decide which of the two is larger.

    >>> grow(lambda n: Run(n, 12 * n * n, 0.0), 100, 10**6, 1.0).largest.size
    286
    """
    start_time, spent = time.perf_counter(), 0.0
    runs = [measure(start)]
    if beside > start and fits(runs[0], limit):
        spent += runs[0].seconds
        runs.append(_measure_warm(measure, beside, runs[0]))
    while True:
        spent += runs[-1].seconds
        inside = sorted((r for r in runs if fits(r, limit)), key=lambda r: r.size)
        outside = min((r.size for r in runs if not fits(r, limit)), default=0)
        if not inside or (outside and outside <= max(inside[-1].size * _CLOSE, inside[-1].size + multiple)):
            return Growth(tuple(runs), limit, STOPPED_BY_MEMORY)
        size = _guess_size(inside, limit, outside)
        late = time.perf_counter() - start_time > _PATIENCE * seconds
        affordable = 0.0 if late else _guess_affordable(inside, seconds - spent)
        if inside[-1].size <= beside:
            affordable = max(affordable, _BEYOND * beside)
        if affordable < size and (affordable < _LEAST_STEP * inside[-1].size or outside):
            full = (inside[-1].peak or 0) * _CLOSE > limit  # memory grows at least as the size does
            return Growth(tuple(runs), limit, STOPPED_BY_MEMORY if full else STOPPED_BY_TIME)
        size = max(int(min(size, affordable)) // multiple * multiple, inside[-1].size + multiple)
        runs.append(_measure_warm(measure, min(size, outside - 1) if outside else size, inside[-1]))


def _measure_warm(measure: Callable[[int], Run], size: int, last: Run) -> Run:
    """A run, made again where it is slower than the last one explains: the higher peak, and the shorter time."""
    run = measure(size)
    if run.peak is None or run.seconds <= max(_COLD, 2 * last.seconds * (size / last.size) ** 2):
        return run
    again = measure(size)
    return Run(size, max(run.peak, again.peak or 0), min(run.seconds, again.seconds))


def _guess_size(inside: Sequence[Run], limit: int, outside: int) -> float:
    """A size whose memory should be just inside the limit; just outside, once the largest run is close to it."""
    largest = inside[-1]
    used = (largest.peak or 1) / limit
    target = 0.985 if used < 0.95 else 1.03
    size = largest.size * min((target / used) ** (1 / _slope(inside, lambda r: r.peak or 1)), _MOST_STEP)
    return size if not outside else min(size, (largest.size * outside) ** 0.5)


def _guess_affordable(inside: Sequence[Run], seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    return inside[-1].size * (seconds / max(inside[-1].seconds, 1e-9)) ** (1 / _slope(inside, lambda r: r.seconds))


def _slope(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    """The power of the size that a quantity grows with, from the last two runs, at least 1; 2 after a single one."""
    if len(runs) < 2:
        return 2.0
    one, two = runs[-2:]
    ratio = torch.tensor([of(two) / max(of(one), 1e-9), two.size / one.size], dtype=torch.float64).log()
    return min(max((ratio[0] / ratio[1]).item(), 1.0), 2.5)


def measure_run(call: Callable[..., Tensor], inputs: Callable[[int], tuple[Tensor, ...]], device: torch.device) -> Any:
    """A function of a size that runs ``call`` there, forward and backward, and measures it."""

    def measure(size: int) -> Run:
        start = time.perf_counter()
        try:
            *args, cotangent = inputs(size)
            start = time.perf_counter()
            if device.type == "cuda":
                return Run(size, _peak_on_gpu(call, args, cotangent, device), time.perf_counter() - start)
            learned = [a for a in args if a.requires_grad]
            profile = profile_memory(
                lambda: (call(*args),),
                lambda results: torch.autograd.grad(results[0], learned, cotangent),
                [*args, cotangent],
            )
            return Run(size, profile.peak.total, time.perf_counter() - start)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return Run(size, None, time.perf_counter() - start)

    return measure


def _peak_on_gpu(call: Callable[..., Tensor], args: list[Tensor], cotangent: Tensor, device: torch.device) -> int:
    """The peak of one run's tensors on a GPU, its arguments included."""
    own = sum(t.nbytes for t in (*args, cotangent))
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.autograd.grad(call(*args), [a for a in args if a.requires_grad], cotangent)
    torch.cuda.synchronize(device)
    return own + torch.cuda.max_memory_allocated(device) - before


SIDES = ("torch", "ours")  # the order in which they grow


def answer(
    question: Question,
    limit: int,
    seconds: float,
    device: torch.device,
    tell: Callable[[str], None] = lambda side: None,
) -> Limit:
    """Grow torch's side, then ours, each for about ``seconds``. A first small run of each compiles and fills caches.

    ``tell`` is called with each of the SIDES as it begins.
    """

    def find(side: str, call: Callable[..., Tensor], beside: int = 0) -> Growth:
        tell(side)
        measure = measure_run(call, lambda size: question.inputs(size, device), device)
        measure(question.start)
        growth = grow(measure, question.start, limit, seconds, question.multiple, beside)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return growth

    dense = find(SIDES[0], question.dense)
    return Limit(question, find(SIDES[1], question.ours, dense.largest.size if dense.largest else 0), dense)


# The questions ----------------------------------------------------------------------------------------------------


def _draw(shape: tuple[int, ...], device: torch.device, learned: bool = True, scale: float = 0.35) -> Tensor:
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale).requires_grad_(learned)


def _window_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, causal=True, window=WINDOW - 1)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril_().triu_(1 - WINDOW)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


def _context_inputs(size: int, device: torch.device) -> tuple[Tensor, ...]:
    shape = (1, 1, size, 128 if device.type == "cuda" else 64)
    return *(_draw(shape, device) for _ in range(3)), _draw(shape, device, learned=False)


def _vocabulary_inputs(size: int, device: torch.device) -> tuple[Tensor, ...]:
    rows, features = (8192, 256) if device.type == "cuda" else (2048, 128)
    target = torch.arange(rows, device=device) % size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = torch.ones((), device=device, dtype=dtype)
    return _draw((rows, features), device), _draw((size, features), device), target, one


def _batch_inputs(size: int, device: torch.device) -> tuple[Tensor, ...]:
    x, y = (_draw((size, 128), device, scale=0.1) for _ in range(2))
    return x, y, torch.ones((), device=device, dtype=x.dtype)


def _dense_head(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.T, target)


def _dense_contrastive(x: Tensor, y: Tensor) -> Tensor:
    s, own = x @ y.T, torch.arange(len(x), device=x.device)
    return (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2


QUESTIONS: tuple[Question, ...] = (
    Question(
        "context", "Longest context", "tokens",
        f"attention to the last {WINDOW} tokens, one head",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=near)",
        _window_attention, _masked_attention, _context_inputs, 512, 256,
    ),
    Question(
        "vocabulary", "Largest vocabulary", "words",
        "cross-entropy of a linear head",
        "F.cross_entropy(x @ w.T, target)",
        lambda x, w, target: ops.linear_cross_entropy(x, w, target), _dense_head, _vocabulary_inputs, 512, 64,
    ),
    Question(
        "batch", "Largest batch", "examples",
        "contrastive loss of images and texts, both ways",
        "s = x @ y.T; (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2",
        ops.contrastive_loss, _dense_contrastive, _batch_inputs, 512, 64,
    ),
)  # fmt: skip
