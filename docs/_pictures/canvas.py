"""A small SVG writer for the pictures of these pages.

Pictures are 360 units wide, the width of a phone, with text of 10 units and more: there they are
shown as they are, on a desktop they are scaled up. Text and lines have the colour of the text
around them (`currentColor`), boxes a tint of their own that is readable on light and dark grounds.
"""

from __future__ import annotations

from html import escape

WIDTH = 360
_STYLE = """\
.drawn text { fill: currentColor; font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; }
.drawn .small { font-size: 10px; }
.drawn .bold { font-weight: 600; }
.drawn .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 10px; }
.drawn .faint { fill-opacity: .65; }
.drawn .line { stroke: currentColor; stroke-opacity: .45; fill: none; }
.drawn .arrow { fill: currentColor; fill-opacity: .6; }
.drawn .gather { fill: #3b82f6; fill-opacity: .32; stroke: #3b82f6; }
.drawn .reduce { fill: #f08c1a; fill-opacity: .34; stroke: #f08c1a; }
.drawn .weight { fill: #12a676; fill-opacity: .32; stroke: #12a676; }
.drawn .compute { fill: currentColor; fill-opacity: .12; stroke: currentColor; stroke-opacity: .5; }
.drawn .empty { fill: none; stroke: currentColor; stroke-opacity: .35; }
.drawn .unused { fill: none; stroke: currentColor; stroke-opacity: .55; stroke-dasharray: 3 2; }
.drawn .group { fill: currentColor; fill-opacity: .05; stroke: currentColor; stroke-opacity: .25; }
"""
# For a picture that stands alone; the site removes it, and the text takes the colour of the page.
_ALONE = """\
<style class="alone">
svg { color: #1f2328; }
@media (prefers-color-scheme: dark) { svg { color: #e6e6e6; } }
</style>
"""


class Picture:
    """Shapes, top to bottom; `y` grows downwards."""

    def __init__(self, height: float, title: str):
        self.height = height
        self._parts = [f"<title>{escape(title)}</title>"]

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "start") -> None:
        """A line of text; `y` is its baseline."""
        attributes = f' class="{look}"' if look else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, look: str, text: str = "", small=True
    ) -> None:
        """A box with a line of text in its middle."""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2"'
        self._parts.append(f'<rect {size} class="{look}"/>')
        if text:
            look = "small" if small else ""
            self.text(x + width / 2, y + height / 2 + 3.7, text, look, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" class="line"/>')

    def down(self, x: float, y1: float, y2: float) -> None:
        """An arrow straight down."""
        self.line(x, y1, x, y2 - 4)
        self._parts.append(f'<path d="M{_n(x - 3.5)} {_n(y2 - 5)}h7l-3.5 5z" class="arrow"/>')

    def right(self, x1: float, x2: float, y: float) -> None:
        """An arrow straight to the right."""
        self.line(x1, y, x2 - 4, y)
        self._parts.append(f'<path d="M{_n(x2 - 5)} {_n(y - 3.5)}v7l5 -3.5z" class="arrow"/>')

    def left(self, x1: float, x2: float, y: float) -> None:
        """An arrow straight to the left, from `x1` to `x2`."""
        self.line(x1, y, x2 + 4, y)
        self._parts.append(f'<path d="M{_n(x2 + 5)} {_n(y - 3.5)}v7l-5 -3.5z" class="arrow"/>')

    def legend(
        self, x: float, y: float, entries: list[tuple[str, str]], widths: list[float]
    ) -> None:
        """Small boxes with their meaning, side by side."""
        for (look, text), width in zip(entries, widths, strict=True):
            self.box(x, y - 8, 10, 10, look)
            self.text(x + 14, y + 0.5, text, "small")
            x += width

    def svg(self) -> str:
        """The file."""
        body = "\n".join(self._parts)
        box = f'viewBox="0 0 {WIDTH} {_n(self.height)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {box}>\n'
            f"{_ALONE}<style>\n{_STYLE}</style>\n{body}\n</svg>\n"
        )


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
