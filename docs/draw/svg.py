"""A drawing as text: the few shapes that the pictures need. The same calls give the same file, byte for byte."""

from html import escape

INK, PALE, FAINT = "#1f2933", "#9aa5b1", "#e4e7eb"
ROW, COL, FOLD, GRADIENT = "#0b7285", "#d9480f", "#2b8a3e", "#862e9c"


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
        return "\n".join([head, f"  <title>{escape(self.title)}</title>", ground, *self.parts, "</svg>"]) + "\n"


def _attributes(values: dict[str, object]) -> str:
    return " ".join(f'{k.replace("_", "-")}="{_short(v)}"' for k, v in values.items())


def _short(value: object) -> object:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
