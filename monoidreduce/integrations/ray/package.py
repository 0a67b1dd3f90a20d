"""The ``ray`` package, imported when it is first used; its absence is one error that names the extra."""

from __future__ import annotations

from typing import Any

from ...errors import StreamError


class _Ray:
    """Stands for the module ``ray``."""

    def __getattr__(self, name: str) -> Any:
        try:
            import ray
        except ImportError:
            raise StreamError(detail="ray is not installed", fix="pip install 'monoidreduce[ray]'") from None
        return getattr(ray, name)


ray: Any = _Ray()
