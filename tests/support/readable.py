"""Whether a picture can be read: measured on what matplotlib's renderer draws, not on what was asked for."""

from __future__ import annotations

import io
import warnings

from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_hexi.report.labels import BarLabel

#: Parts of a figure's width that axes have at least, all that are side by side together, and inches of a row.
_LEAST_WIDTH, _LEAST_HEIGHT = 0.5, 0.3


def assert_readable(figure: Figure) -> None:
    """Hold a figure against what a reader needs.

    It is drawn without a warning, axes keep at least half of its width and 0.3 inches of height, no two texts
    overlap, and none is cut off at the edge.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")
    width, height = figure.bbox.width, figure.bbox.height
    rows: dict[int, float] = {}
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert box.height >= _LEAST_HEIGHT * figure.dpi, f"{axes.get_title()}: {box.height} pixels high"
        rows[round(box.y0)] = rows.get(round(box.y0), 0.0) + box.width
    assert min(rows.values()) >= _LEAST_WIDTH * width, f"axes are {rows} wide, the figure {width}"
    texts = drawn_texts(figure)
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text.get_text()!r} is cut off: {box} in {width} x {height}"
    order = sorted(range(len(texts)), key=lambda number: boxes[number].x0)
    for place, number in enumerate(order):
        box = boxes[number]
        for other in order[place + 1 :]:
            beside = boxes[other]
            if beside.x0 >= box.x1 - 1:
                break
            apart = beside.y0 >= box.y1 - 1 or beside.y1 <= box.y0 + 1
            assert apart, f"{texts[number].get_text()!r} overlaps {texts[other].get_text()!r}"


def drawn_texts(figure: Figure) -> list[Text]:
    """The texts of a figure that are drawn: ticks within their axes, labels that fit into bars."""
    ticks: dict[int, bool] = {}
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                seen = low - 1e-9 <= tick.get_loc() <= high + 1e-9
                ticks |= {id(label): seen and label.get_visible() for label in (tick.label1, tick.label2)}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible()
        and text.get_text().strip()
        and ticks.get(id(text), True)
        and not (isinstance(text, BarLabel) and not text.choose())
    ]
