"""Labels of pictures with bounded size, drawn only where they fit.

A label beside the axes takes room from them, and a long one would leave none. So names from the user are
wrapped and shortened, and text in a bar is drawn only where the bar has room for it.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text

#: Letters in a line of a label beside the axes, and its most lines.
LABEL_WIDTH, LABEL_LINES = 34, 3
#: Letters of 9 points in an inch, and of a title's 12 points; wide letters such as M count for more.
_LETTERS_PER_INCH = 11
_TITLE_LETTERS_PER_INCH = 8.5
_TITLE_LINES = 3
#: Room of a legend's entry besides its name, in letters, and the most columns.
_HANDLE, _MOST_COLUMNS = 8, 5
#: Most letters of a name in a legend, and inches of a line.
_LEGEND_NAME, _LEGEND_LINE = 48, 0.22
#: Part of a bar's width and height that its label may take.
_FILL = 0.96


def wrap(text: str, width: int = LABEL_WIDTH, lines: int = LABEL_LINES) -> str:
    """Return a text in at most `lines` lines of at most `width` letters, with an ellipsis where shortened.

    A single line is shortened in its middle: names of nodes often differ at their end.
    """
    if lines == 1:
        half = (width - 1) // 2
        return text if len(text) <= width else f"{text[:half]}…{text[-half:]}"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …") or [""])


def lines_of(labels: Sequence[str]) -> int:
    """Return the number of lines of the longest of some wrapped labels."""
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
    """Return the height of a legend with these names in a figure of a width, both in inches."""
    return _LEGEND_LINE * math.ceil(len(names) / _columns(names, width))


def _columns(names: Sequence[str], width: float) -> int:
    longest = max((min(len(name), _LEGEND_NAME) for name in names), default=1) + _HANDLE
    return max(1, min(_MOST_COLUMNS, int(width * _LETTERS_PER_INCH) // longest))


def every_nth(count: int, height: float, line: float) -> int:
    """Return n such that labels of every n-th row fit in a picture; `height` (of all rows) in inches.

    Returns:
        1 for all rows, 2 for every other row, and so on.
    """
    return max(1, math.ceil(count * line / height))


class BarLabel(Text):
    """A text in the middle of a bar, which is drawn only where it fits into the bar.

    Args:
        bar: its left and right end, and its bottom and top, in the axes' units.
        texts: texts of which the first that fits is drawn, upright in a narrow bar, if any does.
    """

    def __init__(
        self, axes: Axes, bar: tuple[float, float, float, float], texts: Sequence[str], **style: Any
    ) -> None:
        left, right, bottom, top = bar
        super().__init__((left + right) / 2, (bottom + top) / 2, texts[0], ha="center", va="center", **style)
        self._corners = (left, bottom), (right, top)
        self._texts = tuple(texts)
        self.set_in_layout(False)  # it takes no room in the layout
        axes.add_artist(self)

    def draw(self, renderer: RendererBase) -> None:
        """Draw the first text that fits."""
        if self.choose(renderer):
            super().draw(renderer)

    def choose(self, renderer: RendererBase | None = None) -> bool:
        """Choose the first text that fits into the bar; return whether one does."""
        assert self.axes is not None
        (left, bottom), (right, top) = self.axes.transData.transform(self._corners)
        for rotation, text in itertools.product((0, 90), self._texts):
            self.set_rotation(rotation)
            self.set_text(text)
            extent = self.get_window_extent(renderer)
            if extent.width <= _FILL * abs(right - left) and extent.height <= _FILL * abs(top - bottom):
                return True
        return False
