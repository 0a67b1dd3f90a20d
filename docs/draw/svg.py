"""A drawing as text: the few shapes that the pictures need. The same calls give the same file, byte for byte.

A picture is light or dark as the page around it is: its style sheet replaces each colour of the light form by one of
DARK. Drawings use no colour that is not there.
"""

import re
from html import escape

_COLOUR = re.compile(r'(fill|stroke)="([^"]+)"')

INK, PALE, FAINT = "#1f2933", "#9aa5b1", "#e4e7eb"
ROW, COL, FOLD, GRADIENT = "#0b7285", "#d9480f", "#2b8a3e", "#862e9c"
DARK = {
    "white": "#1e2129", INK: "#e4e7eb", PALE: "#7b8794", FAINT: "#3e4c59",
    ROW: "#66d9e8", COL: "#ffa94d", FOLD: "#8ce99a", GRADIENT: "#e599f7",
    "#c5f6fa": "#0f4c58", "#e3fafc": "#12343c", "#d3f9d8": "#1c3d24", "#8ce99a": "#2f6b3b",
    "#ffe8cc": "#5a3410", "#fff4e6": "#33261a", "#f3d9fa": "#3f2248", "#f8f0fc": "#2c1d31", "#f8f9fa": "#262b33",
}  # fmt: skip


class Drawing:
    """Shapes in the order in which they were asked for, on a white ground."""

    def __init__(self, width: int, height: int, title: str):
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = "none", stroke: str = INK, **more: object
    ) -> None:
        self._add("rect", x=x, y=y, width=w, height=h, fill=fill, stroke=stroke, **more)

    def circle(self, x: float, y: float, r: float, fill: str = "white", stroke: str = INK) -> None:
        self._add("circle", cx=x, cy=y, r=r, fill=fill, stroke=stroke)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, **more: object) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, **more: object) -> None:
        """A line whose head lies at its end."""
        self.line(x1, y1, x2, y2, stroke, **more)
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        corners = [(x2, y2), (x2 - 9 * ux - 4 * uy, y2 - 9 * uy + 4 * ux), (x2 - 9 * ux + 4 * uy, y2 - 9 * uy - 4 * ux)]
        self._add(
            "polygon", points=" ".join(f"{_short(a)},{_short(b)}" for a, b in corners), fill=stroke, stroke=stroke
        )

    def path(self, points: list[tuple[float, float]], stroke: str = INK, **more: object) -> None:
        """Lines from point to point."""
        joined = " ".join(f"{_short(float(x))},{_short(float(y))}" for x, y in points)
        self._add("polyline", points=joined, fill="none", stroke=stroke, **more)

    def text(
        self, x: float, y: float, words: str, size: int = 14, fill: str = INK, at: str = "middle", **more: object
    ) -> None:
        attributes = {"x": x, "y": y, "font-size": size, "fill": fill, "text-anchor": at, **more}
        self.parts.append(f"  <text {_attributes(attributes)}>{escape(words)}</text>")

    def _add(self, tag: str, **attributes: object) -> None:
        self.parts.append(f"  <{tag} {_attributes(attributes)}/>")

    def __str__(self) -> str:
        w, h = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
            f'font-family="system-ui, sans-serif" stroke-width="1.5">'
        )
        ground = f'  <rect width="{w}" height="{h}" fill="white"/>'
        body = [ground, *self.parts]
        return "\n".join([head, f"  <title>{escape(self.title)}</title>", _dark_style(body), *body, "</svg>"]) + "\n"


def _dark_style(parts: list[str]) -> str:
    """The style sheet of the dark form, for the colours that the parts use."""
    used = sorted({(what, colour) for part in parts for what, colour in _COLOUR.findall(part) if colour != "none"})
    rules = " ".join(f'[{what}="{colour}"]{{{what}:{DARK[colour]}}}' for what, colour in used)
    return f"  <style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def _attributes(values: dict[str, object]) -> str:
    return " ".join(f'{k.replace("_", "-")}="{_short(v)}"' for k, v in values.items())


def _short(value: object) -> object:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
