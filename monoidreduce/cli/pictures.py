"""Pictures as PNG files, by matplotlib: the same curves that the pages draw, for slides and issue threads.

The only file that imports matplotlib, which takes a second to load: inside the functions that draw.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

from . import figures
from .command import CommandError
from .memory import CATEGORIES, Profile

_COLOURS = {"gradients": "#8b9299", "kept": "#0d74ce", "temporary": "#f0a63a"}
_SPANS = 900
Curves = Mapping[str, Sequence[tuple[float, float]]]


def require() -> None:
    """Say what to install, before any work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError('pictures need matplotlib. Install it: pip install "monoidreduce[cli]"')


def timelines(title: str, profiles: Mapping[str, Profile]) -> bytes:
    """Memory over time, one panel for each profile, on one vertical scale."""
    figure = _figure(len(profiles), 1, title)
    top = figures.axis_top(*profiles.values()) / 1e6
    for axes, (who, profile) in zip(figure.axes, profiles.items(), strict=True):
        found = list(figures.spans(profile, _SPANS))
        times = [at * 1e3 for at, _ in found]
        layers = [[getattr(m, name) / 1e6 for _, m in found] for name in CATEGORIES]
        axes.stackplot(
            times, layers, labels=list(CATEGORIES.values()), colors=list(_COLOURS.values()), step="post", linewidth=0
        )
        axes.axvline(profile.forward_end * 1e3, color="black", linestyle=":", linewidth=1)
        axes.set(title=f"{who}: {profile.extra / 1e6:.3g} MB extra", xlabel="ms", ylim=(0, top), xlim=(0, times[-1]))
    figure.axes[0].set_ylabel("MB")
    figure.axes[-1].legend(loc="upper left", fontsize="small", frameon=False)
    return _png(figure)


def curves(title: str, panels: Mapping[str, tuple[str, Curves]]) -> bytes:
    """Curves over the number of pairs, both axes logarithmic: for each panel its title, the unit, and the curves."""
    columns = 2
    figure = _figure(columns, -(-len(panels) // columns), title)
    for axes, (name, (unit, lines)) in zip(figure.axes, panels.items(), strict=False):
        for who, points in lines.items():
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=4, label=who, linewidth=2.2 if who == "ours" else 1.2
            )
        axes.set(title=name, xlabel="pairs", ylabel=unit, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", frameon=False)
    return _png(figure)


def _figure(columns: int, rows: int, title: str) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no window

    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    figure.subplots(rows, columns)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
