"""Labels of pictures that stay readable: names take a bounded part of a figure, and bars keep to themselves.

A label beside the axes takes its room from them, and a long one would leave them none. So every text that
names something of the user's is wrapped and shortened before it is drawn, and what is written into a bar is
drawn only where the bar has room for it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text

#: Letters of a label beside the axes that are drawn, in lines of so many letters.
LABEL_WIDTH, LABEL_LINES = 34, 3
#: Letters of 9 points that fit in an inch, and of a title's 12 points; wide ones, as M, count for more.
_LETTERS_PER_INCH = 11
_TITLE_LETTERS_PER_INCH = 8.5
_TITLE_LINES = 3
#: Room of a legend's entry besides its name, in letters, and the most columns.
_HANDLE, _MOST_COLUMNS = 8, 5
#: Letters of a name in a legend that are drawn, and inches of a line of it.
_LEGEND_NAME, _LEGEND_LINE = 48, 0.22
#: Part of a bar's width and height that its label may take.
_FILL = 0.96


def wrap(text: str, width: int = LABEL_WIDTH, lines: int = LABEL_LINES) -> str:
    """The text in so many lines of at most so many letters; an ellipsis stands for what is left out.

    In one line that is its middle: names of nodes often differ at their end.
    """
    if lines == 1:
        half = (width - 1) // 2
        return text if len(text) <= width else f"{text[:half]}…{text[-half:]}"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …") or [""])


def lines_of(labels: Sequence[str]) -> int:
    """How many lines the longest of some wrapped labels has."""
    return max((label.count("\n") + 1 for label in labels), default=1)


def set_title(figure: Figure, text: str) -> None:
    """Write a title above a figure, in as many lines as it needs."""
    width = int(figure.get_figwidth() * _TITLE_LETTERS_PER_INCH)
    figure.suptitle(wrap(text, width, _TITLE_LINES))


def add_legend(figure: Figure | SubFigure, handles: Sequence[Any]) -> None:
    """Write a legend below the axes, in as many columns as have room."""
    for handle in handles:
        handle.set_label(wrap(handle.get_label(), _LEGEND_NAME, 1))
    columns = _columns([handle.get_label() for handle in handles], figure.bbox.width / figure.dpi)
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def legend_height(names: Sequence[str], width: float) -> float:
    """How high the legend of a figure of that width is with these names, both in inches."""
    return _LEGEND_LINE * math.ceil(len(names) / _columns(names, width))


def _columns(names: Sequence[str], width: float) -> int:
    longest = max((min(len(name), _LEGEND_NAME) for name in names), default=1) + _HANDLE
    return max(1, min(_MOST_COLUMNS, int(width * _LETTERS_PER_INCH) // longest))


def every_nth(count: int, height: float, line: float) -> int:
    """Which rows of a picture can be labelled, where all of them together have that height, in inches.

    Returns:
        1 for all of them, 2 for every other one, and so on.
    """
    return max(1, math.ceil(count * line / height))


class BarLabel(Text):
    """A text in the middle of a bar, which is drawn only where it fits into the bar.

    Args:
        axes: of the bar.
        bar: its left and right end, and its bottom and top, in the axes' units.
        texts: the first of them that fits is drawn; none where none does.
        style: as of `matplotlib.text.Text`.
    """

    def __init__(
        self, axes: Axes, bar: tuple[float, float, float, float], texts: Sequence[str], **style: Any
    ) -> None:
        left, right, bottom, top = bar
        super().__init__((left + right) / 2, (bottom + top) / 2, texts[0], ha="center", va="center", **style)
        self._corners = (left, bottom), (right, top)
        self._texts = tuple(texts)
        self.set_in_layout(False)  # it takes no room from others
        axes.add_artist(self)

    def draw(self, renderer: RendererBase) -> None:
        """Draw the first text that fits."""
        if self.choose(renderer):
            super().draw(renderer)

    def choose(self, renderer: RendererBase | None = None) -> bool:
        """Take the first text that fits into the bar, as the axes are now; whether there is one."""
        assert self.axes is not None
        (left, bottom), (right, top) = self.axes.transData.transform(self._corners)
        for text in self._texts:
            self.set_text(text)
            extent = self.get_window_extent(renderer)
            if extent.width <= _FILL * abs(right - left) and extent.height <= _FILL * abs(top - bottom):
                return True
        return False
