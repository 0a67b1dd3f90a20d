"""The cache of everything that is remembered from call to call: bounded, and cleared by one function.

Plans of calls, traced programs, recorded launches and compiled launchers are all kept in a :class:`BoundedCache`, by
keys of what they depend on. (Pure functions of symbolic values use ``functools.lru_cache``.)
"""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...domains.base import outside_inference_mode

K = TypeVar("K")
V = TypeVar("V")

_caches: weakref.WeakValueDictionary[int, BoundedCache] = weakref.WeakValueDictionary()


class BoundedCache(dict[K, V]):
    """A dict of at most ``size`` entries: the least recently used is dropped for a new one.

    >>> cache = BoundedCache(2)
    >>> for name in ("a", "b"):
    ...     _ = cache.keep(name, name.upper())
    >>> cache.find("a"), cache.keep("c", "C"), cache.find("b"), cache.find("a")
    ('A', 'C', None, 'A')
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self._lock = threading.Lock()
        _caches[id(self)] = self

    def find(self, key: K, default: Any = None) -> Any:
        """The value of a key, or ``default``."""
        value = self.get(key, default)
        if 2 * len(self) > self.size:  # while it is not even half full, nothing is about to be dropped
            with self._lock:
                if key in self:
                    self[key] = self.pop(key)
        return value

    def keep(self, key: K, value: V) -> V:
        """Store a value, as the most recently used, and return it."""
        with self._lock:
            self.pop(key, None)
            while self and len(self) >= self.size:
                del self[next(iter(self))]
            self[key] = value
        return value


def clear_caches() -> None:
    """Forget all that was remembered of earlier calls: the next call of any kind is a first call."""
    for cache in list(_caches.values()):
        cache.clear()


# A cache of values computed from tensors that have not changed since, such as tile ranges of document numbers.
#
# A tensor is identified by its storage (which must still be alive), its offset, shape and strides, and its version,
# which torch increments on every in-place change. Nothing is cached during CUDA graph capture, since a replay may read
# other numbers at the same address, nor for inference tensors, which have no version.
#
# A compiler that captures graphs (``torch.compile(mode="reduce-overhead")``) runs our operator once before, with a
# memory pool for all that its thread allocates, in which nothing may stay allocated. So values cached from inside the
# operator are computed in another thread (:func:`allocate_in_own_thread`).

_MAX_ENTRIES = 1024
_cache: OrderedDict[tuple, tuple[list[StorageWeakRef], Any]] = OrderedDict()
_of_tensors: dict[tuple, None] = {}  # the keys of values that depend on tensors, and end with them
_in_own_thread: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


class allocate_in_own_thread:  # a class takes a third of the time of a generator
    """Inside the block, cached values are computed in another thread, outside this thread's memory pool."""

    __slots__ = ("token",)

    def __enter__(self) -> None:
        self.token = _in_own_thread.set(True)

    def __exit__(self, *error: Any) -> None:
        _in_own_thread.reset(self.token)


def _make_key(given: Sequence[Any]) -> tuple | None:
    found: list[Any] = []
    for value in given:
        if isinstance(value, Tensor):
            if value.is_inference() or is_capturing(value):
                return None
            at = value.untyped_storage()._cdata
            found += [at, value._version, value.dtype, value.shape, value.stride(), value.storage_offset()]
        else:
            found.append(value)
    return tuple(found)


def compute_once(given: Sequence[Any], make: Callable[[], Any], device: torch.device) -> Any:
    """The cached result of ``make`` for these inputs if no tensor among them has changed; else call it and cache it."""
    key = _make_key(given)
    if key is None:
        return make()
    found = _cache.get(key)
    if found is None or any(ref.expired() for ref in found[0]):
        made = _run_in_thread(make, device) if _in_own_thread.get() else outside_inference_mode(make)
        found = [StorageWeakRef(p.untyped_storage()) for p in given if isinstance(p, Tensor)], made
        for old in tuple(_of_tensors):
            if old not in _cache or any(ref.expired() for ref in _cache[old][0]):
                _cache.pop(old, None)
                _of_tensors.pop(old, None)
        _cache[key] = found
        if found[0]:
            _of_tensors[key] = None
        while len(_cache) > _MAX_ENTRIES:
            _of_tensors.pop(_cache.popitem(last=False)[0], None)
    return found[1]


class LastComputed:
    """``make(*given)``, remembered for the last tensors and numbers while calls come with the same ones, and nobody has
    changed them: less to ask than :func:`compute_once` does, for what is called again and again."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make
        self.last: tuple[tuple[tuple[Any, Any], ...], Any] = ((), None)

    def __call__(self, *given: Any) -> Any:
        known, found = self.last
        if not known:
            return self._compute(given)
        for v, (version, ref) in zip(given, known, strict=True):
            if (v is not ref) if version is None else (ref() is not v or v._version != version):
                return self._compute(given)
        return self._compute(given) if True in map(is_capturing, given) else found

    def _compute(self, given: tuple) -> Any:
        found = outside_inference_mode(functools.partial(self.make, *given))
        tensors = [v for v in given if isinstance(v, Tensor)]
        plain = all(type(v) is Tensor and not v.is_inference() for v in tensors)
        if plain and not any(map(is_capturing, given)):
            pairs = ((v._version, weakref.ref(v)) if isinstance(v, Tensor) else (None, v) for v in given)
            self.last = tuple(pairs), found
        else:
            self.last = (), None
        return found


def is_capturing(t: Any) -> bool:
    """Whether a CUDA graph is captured where a tensor is: a replay may read other numbers at the same address, and
    what is allocated meanwhile is the graph's."""
    return isinstance(t, Tensor) and t.is_cuda and torch.cuda.is_current_stream_capturing()


def _run_in_thread(make: Callable[[], Any], device: torch.device) -> Any:
    """Call ``make`` in another thread, on this thread's CUDA stream."""
    here = contextvars.copy_context()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Any:
        with torch.no_grad(), torch.cuda.stream(stream):
            return here.run(make)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
