"""A heatmap as a picture: steps from left to right, values from bottom to top, colour for the share of elements."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from monitor.sinks.heatmap_history import DECADES, DEEPEST, History
from monitor.stats.histograms import UNIT_BINS

Image.preinit()
"""What saving looks through, loaded here and not by the thread that writes: a process that forks meanwhile would have the
locks of a half-loaded module."""

WIDTH: Final = 346
PLOT_WIDTH: Final = 256
LEFT: Final = 26
TOP: Final = 6
BIN: Final = 2
"""Height of a bin between -1 and 1."""
BEYOND: Final = 8
"""Height of a bin beyond."""
GAP: Final = 2
"""Between the two."""

PLOT_HEIGHT: Final = UNIT_BINS * BIN + 2 * (BEYOND + GAP)
HEIGHT: Final = TOP + PLOT_HEIGHT + 20

LINES, INK = DEEPEST + 1, DEEPEST + 2
"""Colours that are no shade: grey and black."""

_ANCHORS: Final = ((252, 229, 170), (251, 154, 90), (222, 73, 104), (140, 41, 129), (59, 15, 112), (8, 5, 29))
"""From pale to deep, and darker at every step, so that the order is also seen by who sees no hues."""


class Picture(NamedTuple):
    """An image in the format PNG, and its size in pixels."""

    png: bytes
    width: int
    height: int


def drawn(history: History) -> Picture:
    """The picture of a history of at least one step. Its pixels are indices into a palette: shades are their own.

    Args:
        history: Bins from the lowest on: beyond -1, ``UNIT_BINS`` equal ones up to 1, beyond 1.
    """
    pixels = _frame().copy()
    pixels[TOP : TOP + PLOT_HEIGHT, LEFT : LEFT + PLOT_WIDTH] = _plot(history.shades)
    image = Image.fromarray(pixels)
    image.putpalette(_palette().tobytes())
    _write_steps(image, history)
    file = BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return Picture(file.getvalue(), WIDTH, HEIGHT)


def column_of(x: int, columns: int) -> int:
    """Which column of a history of so many is seen ``x`` pixels from the left of the plot."""
    return x * columns // PLOT_WIDTH


def row_of(value_bin: int) -> int:
    """How many pixels below the top of the plot a bin begins to be seen."""
    if value_bin > UNIT_BINS:
        return 0
    if value_bin == 0:
        return PLOT_HEIGHT - BEYOND
    return BEYOND + GAP + (UNIT_BINS - value_bin) * BIN


def _plot(shades: NDArray[np.uint8]) -> NDArray[np.uint8]:
    bins = np.full(PLOT_HEIGHT, -1)
    for value_bin in range(UNIT_BINS + 2):
        height = BIN if 0 < value_bin <= UNIT_BINS else BEYOND
        bins[row_of(value_bin) : row_of(value_bin) + height] = value_bin
    columns = np.array([column_of(x, len(shades)) for x in range(PLOT_WIDTH)])
    return np.where(bins[:, None] < 0, np.uint8(LINES), shades[np.ix_(columns, bins)].T)


@cache
def _palette() -> NDArray[np.uint8]:
    """Red, green and blue of each index: white where nothing is, the shades, grey, black."""
    at = np.linspace(1, DEEPEST, len(_ANCHORS))
    shades = [np.interp(np.arange(1, DEEPEST + 1), at, channel) for channel in zip(*_ANCHORS, strict=True)]
    colours = [(255, 255, 255), *np.column_stack(shades), (176, 176, 176), (0, 0, 0)]
    return np.array(colours).round().astype(np.uint8)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default()


@cache
def _frame() -> NDArray[np.uint8]:
    """What is the same in every picture: the axis of values and the legend."""
    image = Image.new("P", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(image)
    draw.rectangle((LEFT - 1, TOP - 1, LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT), outline=LINES)
    _label_values(draw)
    _draw_legend(draw)
    frame: NDArray[np.uint8] = np.array(image)
    return frame


def _label_values(draw: ImageDraw.ImageDraw) -> None:
    middle = TOP + PLOT_HEIGHT // 2
    half = UNIT_BINS // 2 * BIN
    ends = (("> 1", TOP + BEYOND // 2 - 1), ("< -1", TOP + PLOT_HEIGHT - BEYOND // 2))
    for text, y in (("1", middle - half + 6), ("0", middle), ("-1", middle + half - 5), *ends):
        draw.text((LEFT - 5, y), text, fill=INK, font=_font(), anchor="rm")
    for y in (middle - half, middle, middle + half):
        draw.line((LEFT - 4, y, LEFT - 1, y), fill=INK)


def _draw_legend(draw: ImageDraw.ImageDraw) -> None:
    """The shades with their shares, the greatest on top, and below them what has no element."""
    left, top, step = LEFT + PLOT_WIDTH + 12, TOP + 27, 24
    draw.text((left, TOP - 3), "share of\nelements", fill=INK, font=_font(), spacing=0)
    for y in range(DECADES * step + 1):
        shade = round(DEEPEST - y / (DECADES * step) * (DEEPEST - 1))
        draw.line((left, top + y, left + 11, top + y), fill=shade)
    for decade in range(DECADES + 1):
        share = f"{100 / 10**decade:g} %"
        draw.text((left + 16, top + decade * step), share, fill=INK, font=_font(), anchor="lm")
    none = top + DECADES * step + 10
    draw.rectangle((left, none, left + 11, none + 11), outline=LINES)
    draw.text((left + 16, none + 6), "none", fill=INK, font=_font(), anchor="lm")


def _write_steps(image: Image.Image, history: History) -> None:
    draw = ImageDraw.Draw(image)
    y = TOP + PLOT_HEIGHT + 4
    draw.text((LEFT, y), f"step {history.first}", fill=INK, font=_font(), anchor="lt")
    if history.recorded > 1:
        draw.text((LEFT + PLOT_WIDTH, y), f"step {history.last[-1]}", fill=INK, font=_font(), anchor="rt")
    if history.each > 1:
        text = f"{history.each} steps a column"
        draw.text((LEFT + PLOT_WIDTH // 2, y), text, fill=INK, font=_font(), anchor="mt")
