"""
Drawing SVG files that are readable in light and dark, with the fonts of the reader's system.

A picture has a background of its own, and colours for both schemes: a browser applies the scheme of
the page that shows the picture, and where it does not, the picture is readable all the same. A text
that does not fit its box is an error. The module must not know what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

LIGHT = {
    "page": ("#ffffff", "#d0d7de"),
    "zone": ("#f6f8fa", "#d0d7de"),
    "box": ("#ffffff", "#6e7781"),
    "ours": ("#ddf4ff", "#0969da"),
    "good": ("#dafbe1", "#1a7f37"),
    "warn": ("#fff8c5", "#9a6700"),
    "bad": ("#ffebe9", "#cf222e"),
    "first": ("#8c959f", "none"),
    "second": ("#0969da", "none"),
}
DARK = {
    "page": ("#161b22", "#3d444d"),
    "zone": ("#1c232c", "#3d444d"),
    "box": ("#212830", "#9198a1"),
    "ours": ("#0c2d4d", "#4493f8"),
    "good": ("#12301c", "#3fb950"),
    "warn": ("#3a2d0a", "#d29922"),
    "bad": ("#431a1d", "#f85149"),
    "first": ("#6e7781", "none"),
    "second": ("#4493f8", "none"),
}
INKS = {
    "ink": ("#1f2328", "#e6edf3"),
    "dim": ("#57606a", "#9aa4af"),
    "line": ("#57606a", "#9aa4af"),
}
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"

NARROW, WIDE = frozenset("iljtfrI.,:;'|!()[]/ "), frozenset("mwMW@%")
PADDING = 8
LINE = 1.35
"""The height of a line, in its font's size."""

Point = tuple[float, float]


class DoesNotFitError(Exception):
    """A text is wider than the place that it is drawn in."""


def width_of(text: str, size: float, mono: bool = False) -> float:
    """Return about how wide a text is: slightly too wide for the usual fonts."""
    if mono:
        return len(text) * size * 0.61
    units = 0.0
    for letter in text:
        if letter in NARROW:
            units += 0.33
        elif letter in WIDE:
            units += 0.9
        else:
            units += 0.69 if letter.isupper() else 0.57
    return units * size


@dataclass(frozen=True)
class Box:
    """The position of a box, for arrows."""

    x: float
    y: float
    width: float
    height: float

    def top(self, at: float = 0.5) -> Point:
        return self.x + self.width * at, self.y

    def bottom(self, at: float = 0.5) -> Point:
        return self.x + self.width * at, self.y + self.height

    def left(self, at: float = 0.5) -> Point:
        return self.x, self.y + self.height * at

    def right(self, at: float = 0.5) -> Point:
        return self.x + self.width, self.y + self.height * at


class Picture:
    """One SVG file. Coordinates are pixels at the size in which a wide page shows it."""

    def __init__(self, title: str, description: str, width: float, height: float) -> None:
        self._title, self._description = title, description
        self._width, self._height = width, height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        title: str = "",
        lines: Sequence[str] = (),
        *,
        kind: str = "box",
        top: bool = False,
        mono: bool = False,
    ) -> Box:
        """Draw a box with a title and lines of text, in its middle, or from its top left."""
        self._parts.append(f'<rect class="{kind}" {_area(x, y, width, height)} rx="6"/>')
        sizes = [(title, 14.0, "b")] * bool(title) + [(line, 12.0, "") for line in lines]
        tall = sum(size * LINE for _, size, _ in sizes)
        if tall > height:
            raise DoesNotFitError(f"{title or lines}: {tall:.0f} px high in {height} px")
        at = y + (PADDING if top else (height - tall) / 2)
        for text, size, style in sizes:
            at += size * LINE
            self._fits(text, size, width, mono and not style)
            classes = f"{style} {'m' if mono and not style else ''}".strip()
            if top:
                self.text(x + PADDING + 2, at - size * 0.35, text, size=size, style=classes)
            else:
                self.text(
                    x + width / 2, at - size * 0.35, text, size=size, style=classes, anchor="middle"
                )
        return Box(x, y, width, height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        style: str = "",
        anchor: str = "start",
    ) -> None:
        wide = width_of(text, size, mono=style == "m")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if left < 2 or left + wide > self._width - 2 or y > self._height - 4:
            raise DoesNotFitError(f"{text!r} goes beyond the picture")
        words = f' class="{style}"' if style else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{words}{where}>'
            f"{escape(text)}</text>"
        )

    def fixed(self, x: float, y: float, text: str, *, size: float, style: str = "m") -> None:
        """Draw text of a terminal: each character has the same width, whatever the font is."""
        if not text.strip():
            return
        wide = width_of(text, size, mono=True)
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" class="{style}"'
            f' textLength="{_n(wide)}" lengthAdjust="spacingAndGlyphs"'
            f' xml:space="preserve">{escape(text)}</text>'
        )

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._parts.append(f'<rect class="{kind}" {_area(x, y, width, height)}/>')

    def dot(self, x: float, y: float, kind: str = "line") -> None:
        self._parts.append(f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="4"/>')

    def line(self, points: Iterable[Point], *, dashed: bool = False) -> None:
        self._path(points, "rule dashed" if dashed else "rule", "")

    def arrow(
        self,
        points: Sequence[Point],
        label: str | Sequence[str] = "",
        *,
        at: Point | None = None,
        anchor: str = "middle",
        dashed: bool = False,
        both: bool = False,
    ) -> None:
        """Draw an arrow along points; its label is at a place, or on the arrow's first part."""
        ends = ' marker-end="url(#head)"' + (' marker-start="url(#head)"' if both else "")
        self._path(points, "arrow dashed" if dashed else "arrow", ends)
        lines = [label] if isinstance(label, str) else label
        (x0, y0), (x1, y1) = points[0], points[1]
        x, y = at or ((x0 + x1) / 2, (y0 + y1) / 2 - 6 - 15 * (len(lines) - 1))
        for number, text in enumerate(lines):
            if text:
                self.text(x, y + 15 * number, text, style="label", anchor=anchor)

    def svg(self) -> str:
        size = f"{_n(self._width)} {_n(self._height)}"
        page = (
            f'<rect class="page" x="0.5" y="0.5" width="{_n(self._width - 1)}"'
            f' height="{_n(self._height - 1)}" rx="8"/>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"'
                f' width="{_n(self._width)}" height="{_n(self._height)}" role="img"'
                ' aria-labelledby="title description">',
                f'<title id="title">{escape(self._title)}</title>',
                f'<desc id="description">{escape(self._description)}</desc>',
                f"<style>\n{_style()}</style>",
                '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8"'
                ' markerHeight="8" orient="auto-start-reverse"><path class="head"'
                ' d="M0 1 L9 5 L0 9 z"/></marker></defs>',
                page,
                *self._parts,
                "</svg>\n",
            ]
        )

    def _path(self, points: Iterable[Point], style: str, ends: str) -> None:
        steps = " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{steps}"{ends}/>')

    def _fits(self, text: str, size: float, width: float, mono: bool) -> None:
        if (wide := width_of(text, size, mono)) > width - 2:
            raise DoesNotFitError(f"{text!r} is {wide:.0f} px wide in {width} px")


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _area(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'


def _style() -> str:
    def colours(which: int) -> str:
        kinds = (LIGHT, DARK)[which]
        rules = [
            f".{kind} {{ fill: {fill}; stroke: {edge} }}" for kind, (fill, edge) in kinds.items()
        ]
        ink, dim, line = (INKS[name][which] for name in ("ink", "dim", "line"))
        page = kinds["page"][0]
        rules += [
            f"text {{ fill: {ink} }}",
            f".dim {{ fill: {dim} }}",
            f".label {{ fill: {ink}; stroke: {page} }}",
            f".arrow, .rule {{ stroke: {line} }}",
            f".head, .line {{ fill: {line} }}",
        ]
        return "\n".join(rules)

    return (
        f"text {{ font-family: {SANS} }}\n"
        f".m {{ font-family: {MONO} }}\n"
        ".b { font-weight: 600 }\n"
        ".label { paint-order: stroke; stroke-width: 4px; stroke-linejoin: round }\n"
        ".arrow, .rule { fill: none; stroke-width: 1.5 }\n"
        ".rule { stroke-width: 1; stroke-opacity: 0.5 }\n"
        ".dashed { stroke-dasharray: 5 4 }\n"
        f"{colours(0)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{colours(1)}\n}}\n"
    )
