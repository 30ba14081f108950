"""What the figures are drawn with: a sheet of SVG with boxes, bars, words and axes.

A picture is 800 pixels wide, and its smallest words have 18: at half a page's width, and on a
slide, they can be read.
"""

import html
import math
from collections.abc import Iterable

WIDTH = 800
TITLE, BODY, SMALL = 26, 20, 18

# Okabe and Ito's colours, which differ for colour-blind readers, too.
INK, GREY, PALE, WHITE = "#1a1a1a", "#5f6368", "#ececec", "#ffffff"
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
RED, PURPLE = "#d55e00", "#aa4499"
VERSION = {"V1": "#8a8f94", "V2": SKY, "V3": BLUE, "V4": RED}


def shown(value: object) -> str:
    """A number with two digits behind the point at most; other values as they are."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def attributes(values: dict[str, object]) -> str:
    """As they stand in a tag; what is empty is left out."""
    named = {name.replace("_", "-"): shown(value) for name, value in values.items()}
    return "".join(f' {name}="{value}"' for name, value in named.items() if value)


class Sheet:
    """A picture with a headline; x goes right, y goes down."""

    def __init__(self, title: str, height: int):
        self.height, self.parts = height, []
        self.box(0, 0, WIDTH, height, WHITE)
        self.text(20, 30, title, TITLE, bold=True)

    def __str__(self) -> str:
        about = {"xmlns": "http://www.w3.org/2000/svg", "width": WIDTH, "height": self.height}
        about |= {"viewBox": f"0 0 {WIDTH} {self.height}"}
        about |= {"font-family": "DejaVu Sans, Verdana, Arial, sans-serif", "font-size": BODY}
        about["fill"] = INK
        return "\n".join([f"<svg{attributes(about)}>", *self.parts, "</svg>", ""])

    def add(self, tag: str, content: str | None = None, **values) -> None:
        end = "/>" if content is None else f">{html.escape(content, quote=False)}</{tag}>"
        self.parts.append(f"<{tag}{attributes(values)}{end}")

    def cut(self, top: float, bottom: float, name: str = "slide") -> None:
        """A part for slides, where the slide's title takes the headline's place."""
        self.add("view", id=name, viewBox=f"0 {top:g} {WIDTH} {bottom - top:g}")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = BODY,
        color: str = INK,
        at: str = "",
        bold: bool = False,
        **more,
    ) -> None:
        """Words, of which each line's middle is at this height; `at` is middle or end of x."""
        style = {"font_size": size if size != BODY else "", "font_weight": "bold" if bold else ""}
        style |= {"text_anchor": at, "fill": color if color != INK else ""}
        lines = words.split("\n")
        for i, line in enumerate(lines):
            down = y + 1.3 * size * (i - (len(lines) - 1) / 2) + 0.36 * size
            self.add("text", line, x=x, y=float(down), **style, **more)

    def note(self, y: float, words: str, x: float = 20, at: str = "") -> None:
        self.text(x, y, words, SMALL, GREY, at)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A rectangle from its upper left corner."""
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill)

    def bar(
        self, x: float, y: float, width: float, color: str, number: str, height: float = 41
    ) -> None:
        """A bar, and the number behind it."""
        self.box(x, y, width, height, color)
        self.text(x + width + 10, y + height / 2, number)

    def legend(self, y: float, places: Iterable[float], colors: dict[str, str]) -> None:
        """A line of squares in these colours, each with its name; `places` are their left sides."""
        for x, (name, color) in zip(places, colors.items(), strict=True):
            self.box(x, y, 20, 20, color)
            self.text(x + 28, y + 10, name, SMALL)

    def line(self, *places: float, color: str = GREY, width: float = 1.5, dash: str = "") -> None:
        style = {"stroke": color, "stroke_width": width, "stroke_dasharray": dash}
        if len(places) == 4:
            self.add("line", **dict(zip(("x1", "y1", "x2", "y2"), places, strict=True)), **style)
        else:
            self.add("polyline", points=" ".join(map(shown, places)), fill="none", **style)

    def dot(self, x: float, y: float, color: str, size: float = 7, hollow: bool = False) -> None:
        edge = {"stroke": color, "stroke_width": 3} if hollow else {}
        self.add("circle", cx=x, cy=y, r=size, fill=WHITE if hollow else color, **edge)


class Plot:
    """Axes on a sheet, from a corner in pixels; `ticks` of an axis are its first and last value and
    what is marked between them."""

    def __init__(
        self,
        sheet: Sheet,
        area: tuple[float, float, float, float],
        xs: tuple[float, float],
        ys: tuple[float, float],
        log: bool = False,
    ):
        self.sheet, self.area, self.xs, self.ys = sheet, area, xs, ys
        self.scale = math.log10 if log else float

    def share(self, value: float, ends: tuple[float, float]) -> float:
        """How far a value is from the first end to the other."""
        low, high = map(self.scale, ends)
        return (self.scale(value) - low) / (high - low)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        left, top, width, height = self.area
        return left + width * self.share(x, self.xs), top + height * (1 - self.share(y, self.ys))

    def line(self, *points: tuple[float, float], **style) -> None:
        self.sheet.line(*(part for point in points for part in self.at(*point)), **style)

    def axes(self, xlabel: str, xticks: Iterable, ylabel: str = "", yticks: Iterable = ()) -> None:
        """Both axes, the left one only with a label."""
        left, top, width, height = self.area
        bottom = top + height
        self.sheet.line(left, bottom, left + width, bottom, color=INK, width=1)
        self.sheet.text(left + width / 2, bottom + 41, xlabel, SMALL, at="middle")
        for value in xticks:
            x = self.at(value, self.ys[0])[0]
            self.sheet.line(x, bottom, x, bottom + 5, color=INK, width=1)
            self.sheet.text(x, bottom + 18, f"{value:g}", SMALL, at="middle")
        if ylabel:
            self.sheet.line(left, top, left, bottom, color=INK, width=1)
            middle = f"rotate(-90 {left - 62} {top + height / 2})"
            place = left - 62, top + height / 2
            self.sheet.text(*place, ylabel, SMALL, at="middle", transform=middle)
        for value in yticks:
            y = self.at(self.xs[0], value)[1]
            self.sheet.line(left - 5, y, left, y, color=INK, width=1)
            self.sheet.text(left - 9, y, f"{value:g}", SMALL, at="end")
