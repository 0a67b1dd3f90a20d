"""The cache of everything that is remembered from call to call: bounded, and cleared by one function.

Plans of calls, traced programs, recorded launches and compiled launchers are all kept in a :class:`BoundedCache`, by
keys of what they depend on. (Pure functions of symbolic values use ``functools.lru_cache``.)
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeVar

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
