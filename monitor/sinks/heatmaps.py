"""Heatmaps of signed numbers over the steps for TensorBoard, one per series: their history, drawing and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.image import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.series import SIGNED_KINDS, SeriesTable
from monitor.stats.histograms import UNIT_BINS, UNIT_UPPER
from monitor.stats.ops import has_histogram
from monitor.stats.partials import Floats
from monitor.stats.table import StepRows

# --- The history of a histogram over the steps, in bounded memory.

Shades = NDArray[np.uint8]
"""The fraction of a tensor in each bin, on a logarithmic scale from 1 on; 0 for an empty bin."""

DEEPEST: Final = 253
"""The shade of a bin that holds every element."""

DECADES: Final = 4
"""Decades of the scale from ``DEEPEST`` down to shade 1. Smaller fractions, down to any element at all, have shade 1 too."""


def shades(counts: NDArray[np.int64], elements: Floats) -> Shades:
    """The shades of histograms.

    Args:
        counts: Elements in each bin, shape ``(rows, bins)``.
        elements: Number of elements of each row, at least one, shape ``(rows,)``.

    Returns:
        uint8, shape ``(rows, bins)``.
    """
    share = counts / elements[:, None]
    with np.errstate(divide="ignore"):
        depth = 1 + np.log10(share) / DECADES
    shade = 1 + np.rint(np.clip(depth, 0, 1) * (DEEPEST - 1))
    return np.where(counts > 0, shade, 0).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class HeatmapHistory:
    """Columns of shades in the order of the recorded steps.

    A column of several steps has the deepest shade of each bin in any of them, so that an outlier of one step stays visible.

    Attributes:
        shades: Shape ``(columns, bins)``.
        last: The last step of each column, shape ``(columns,)``.
        first: The first step of all, if there is one.
        each: Number of recorded steps in a full column. All columns but the last are full.
        in_last: Number of recorded steps in the last column.
    """

    shades: Shades
    last: NDArray[np.int64]
    first: int = 0
    each: int = 1
    in_last: int = 0

    @classmethod
    def empty(cls, bins: int) -> HeatmapHistory:
        """A history without steps."""
        return cls(np.empty((0, bins), dtype=np.uint8), np.empty(0, dtype=np.int64))

    @property
    def recorded(self) -> int:
        """Number of recorded steps."""
        return (len(self.last) - 1) * self.each + self.in_last if len(self.last) else 0

    def with_step(self, step: int, shade: Shades, most: int) -> HeatmapHistory:
        """The history with one more step. Columns from that step on are dropped first: the run went back to an earlier step.

        Args:
            shade: Shape ``(bins,)``.
            most: Greatest number of columns, at least 2.
        """
        history = self._before(step)
        while len(history.last) > most or (len(history.last) == most and history.in_last == history.each):
            history = history._halved()
        return history._joined(step, shade) if 0 < history.in_last < history.each else history._followed(step, shade)

    def _before(self, step: int) -> HeatmapHistory:
        kept = int(np.searchsorted(self.last, step))
        if kept == len(self.last):
            return self
        if not kept:
            return HeatmapHistory.empty(self.shades.shape[1])
        return HeatmapHistory(self.shades[:kept], self.last[:kept], self.first, self.each, self.each)

    def _halved(self) -> HeatmapHistory:
        """The history with each pair of columns merged into one."""
        first_of_pair = np.arange(0, len(self.last), 2)
        last_of_pair = np.minimum(first_of_pair + 1, len(self.last) - 1)
        in_last = self.in_last if len(self.last) % 2 else self.each + self.in_last
        joined = np.maximum.reduceat(self.shades, first_of_pair, axis=0)
        return HeatmapHistory(joined, self.last[last_of_pair], self.first, 2 * self.each, in_last)

    def _joined(self, step: int, shade: Shades) -> HeatmapHistory:
        columns, last = self.shades.copy(), self.last.copy()
        np.maximum(columns[-1], shade, out=columns[-1])
        last[-1] = step
        return HeatmapHistory(columns, last, self.first, self.each, self.in_last + 1)

    def _followed(self, step: int, shade: Shades) -> HeatmapHistory:
        first = self.first if len(self.last) else step
        return HeatmapHistory(np.vstack([self.shades, shade]), np.append(self.last, step), first, self.each, 1)


# --- A heatmap as a picture: steps from left to right, values from bottom to top, colours for the fraction of elements.

Image.preinit()
"""Loads the modules that saving needs here and not on the writer thread: a process that forks meanwhile would inherit the locks
of a half-loaded module."""

WIDTH: Final = 346
PLOT_WIDTH: Final = 256
LEFT: Final = 26
TOP: Final = 6
BIN: Final = 2
"""Height of a bin between -1 and 1."""
BEYOND: Final = 8
"""Height of the bins below -1 and above 1."""
GAP: Final = 2
"""Pixels between those bins and the others."""

PLOT_HEIGHT: Final = UNIT_BINS * BIN + 2 * (BEYOND + GAP)
HEIGHT: Final = TOP + PLOT_HEIGHT + 20

LINES, INK = DEEPEST + 1, DEEPEST + 2
"""Colours beside the shades: grey and black."""

_ANCHORS: Final = ((252, 229, 170), (251, 154, 90), (222, 73, 104), (140, 41, 129), (59, 15, 112), (8, 5, 29))
"""From pale to deep. Each colour is darker than the one before, so that colour-blind readers see the order too."""


class Picture(NamedTuple):
    """A PNG image and its size in pixels."""

    png: bytes
    width: int
    height: int


def drawn(history: HeatmapHistory) -> Picture:
    """The picture of a history of at least one step. Pixels are indices into a palette, in which a shade is its own index.

    Args:
        history: Its bins from the lowest on: below -1, ``UNIT_BINS`` equal ones up to 1, above 1.
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
    """The column, of so many, that is drawn ``x`` pixels from the left of the plot."""
    return x * columns // PLOT_WIDTH


def row_of(value_bin: int) -> int:
    """The distance of a bin's upper edge from the top of the plot, in pixels."""
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
    """Red, green and blue of each index: white for empty bins, the shades, grey, black."""
    at = np.linspace(1, DEEPEST, len(_ANCHORS))
    shades = [np.interp(np.arange(1, DEEPEST + 1), at, channel) for channel in zip(*_ANCHORS, strict=True)]
    colours = [(255, 255, 255), *np.column_stack(shades), (176, 176, 176), (0, 0, 0)]
    return np.array(colours).round().astype(np.uint8)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default()


@cache
def _frame() -> NDArray[np.uint8]:
    """The parts that are the same in every picture: the axis of values and the legend."""
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
    """Draw the shades with their fractions, the greatest on top, and the colour of empty bins below."""
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


def _write_steps(image: Image.Image, history: HeatmapHistory) -> None:
    draw = ImageDraw.Draw(image)
    y = TOP + PLOT_HEIGHT + 4
    draw.text((LEFT, y), f"step {history.first}", fill=INK, font=_font(), anchor="lt")
    if history.recorded > 1:
        draw.text((LEFT + PLOT_WIDTH, y), f"step {history.last[-1]}", fill=INK, font=_font(), anchor="rt")
    if history.each > 1:
        text = f"{history.each} steps a column"
        draw.text((LEFT + PLOT_WIDTH // 2, y), text, fill=INK, font=_font(), anchor="mt")


BINS: Final = len(UNIT_UPPER)

FIRST_PERIOD: Final = 8
LAST_PERIOD: Final = 64
"""Recorded steps between two pictures of a series: at first, and in the long run."""

HISTORY_BYTES: Final = 64 << 20
"""Memory for the histories of all series. With more series, each has fewer columns."""
MOST_COLUMNS: Final = 256
FEWEST_COLUMNS: Final = 32

MOST_AT_CLOSE: Final = 1000
"""Most pictures drawn when the file is closed. Each takes a millisecond, and closing waits for them."""

_DESCRIBED: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        "The fraction of elements in each bin, over the recorded steps from left to right: "
        f"{BINS - 2} bins between −1 and 1, and one band for values beyond on each side. Colours are logarithmic; "
        f"the palest one also marks fractions below {100 / 10**DECADES:g} %, and white marks empty bins. "
        "A column of several steps shows the greatest fraction of each bin in any of them."
    ),
)


class Heatmaps:
    """Makes the heatmaps of one rank. A step becomes part of the histories at ``keep``."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._series = series
        self._rank = rank
        self._kept: dict[int, HeatmapHistory] = {}
        self._shown: dict[int, int] = {}
        self._now: dict[int, HeatmapHistory] = {}
        self._shown_now: dict[int, int] = {}

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary: the pictures that are due, with this step in them."""
        self._begin()
        return self._due(rows)

    def outdated(self) -> Iterator[memoryview]:
        """New pictures of the series whose last picture lacks the last steps. Call ``keep`` after them too."""
        self._begin()
        behind = [series for series, history in self._kept.items() if self._shown.get(series) != history.last[-1]]
        return (self._picture(series, self._kept[series]) for series in behind[:MOST_AT_CLOSE])

    def keep(self) -> None:
        """Commit the last step and its pictures: they are in the file."""
        self._kept.update(self._now)
        self._shown.update(self._shown_now)
        self._begin()

    def _begin(self) -> None:
        """Discard what was not committed because it could not be written."""
        self._now, self._shown_now = {}, {}

    def _due(self, rows: StepRows) -> Iterator[memoryview]:
        turns = {series: turn for turn, series in enumerate(self._kept)}
        most = _most_columns(max(len(turns), sum(len(rows.kinds.get(kind, ())) for kind in SIGNED_KINDS)))
        for series, shade in _shades(rows):
            history = self._kept.get(series, HeatmapHistory.empty(BINS)).with_step(rows.step, shade, most)
            turn = turns.setdefault(series, len(turns))
            self._now[series] = history
            if is_due(history.recorded, turn):
                yield self._picture(series, history)

    def _picture(self, series: int, history: HeatmapHistory) -> memoryview:
        self._shown_now[series] = int(history.last[-1])
        picture = drawn(history)
        tag = f"{self._series[series].tag(self._rank)}_heatmap"
        content = [str(picture.width).encode(), str(picture.height).encode(), picture.png]
        summary = Summary()
        summary.value.add(tag=tag, metadata=_DESCRIBED, tensor=make_tensor_proto(content))
        return memoryview(summary.SerializeToString())


def is_due(recorded: int, turn: int) -> bool:
    """Whether a series gets a picture after ``recorded`` recorded steps.

    It gets one per period, and periods double in length up to ``LAST_PERIOD``. Pictures of many series fall on different steps.

    Args:
        turn: The index of the series among all that have pictures.
    """
    if recorded < FIRST_PERIOD:
        return False
    period = min(1 << recorded.bit_length() - 1, LAST_PERIOD)
    return recorded % period == turn % period


def _most_columns(series: int) -> int:
    return max(FEWEST_COLUMNS, min(MOST_COLUMNS, HISTORY_BYTES // (BINS * max(series, 1))))


def _shades(rows: StepRows) -> Iterator[tuple[int, Shades]]:
    """The shades of each series that has a histogram of signed numbers in this step."""
    for kind in SIGNED_KINDS:
        if kind not in rows.kinds:
            continue
        of_kind = rows.read(kind)
        there = np.flatnonzero(has_histogram(of_kind.partials))
        partials = of_kind.partials.take(there)
        if partials.histogram is not None and len(there):
            shaded = shades(partials.histogram[:, :BINS], partials["count"])
            yield from zip(of_kind.series[there].tolist(), shaded, strict=True)
