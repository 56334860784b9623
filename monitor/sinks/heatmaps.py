"""Heatmaps of signed numbers over the steps, one a series: what is remembered of each, and when its picture is due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.image import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.series import ADAM_KINDS, SeriesTable
from monitor.sinks.cells import encodable
from monitor.sinks.heatmap_history import DECADES, History, Shades, shades
from monitor.sinks.heatmap_image import drawn
from monitor.stats.histograms import UNIT_UPPER
from monitor.stats.ops import counted
from monitor.stats.rows import StepRows

BINS: Final = len(UNIT_UPPER)

FIRST_PERIOD: Final = 8
LAST_PERIOD: Final = 64
"""A series has a picture once in so many of its recorded steps: at first, and in the long run."""

HISTORY_BYTES: Final = 64 << 20
"""Of all series. The more series, the fewer columns each one has."""
MOST_COLUMNS: Final = 256
FEWEST_COLUMNS: Final = 32

MOST_AT_CLOSE: Final = 1000
"""Pictures that are brought up to date when the file is closed, which is waited for. One takes a millisecond."""

_DESCRIBED: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        "Which share of the elements is in which bin, over the recorded steps from left to right: "
        f"{BINS - 2} bins between −1 and 1, and a band for all that lies beyond at each side. Colours are logarithmic, "
        f"the palest one also for shares below {100 / 10**DECADES:g} %; white is where nothing is. "
        "A column of several steps has the greatest share of each bin in any of them."
    ),
)


class Heatmaps:
    """Spells the heatmaps of one rank. A step counts once it is kept."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._series = series
        self._rank = rank
        self._kept: dict[int, History] = {}
        self._shown: dict[int, int] = {}
        self._now: dict[int, History] = {}
        self._shown_now: dict[int, int] = {}

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary: the pictures that are due, this step included."""
        self._begin()
        return self._due(rows)

    def rest(self) -> Iterator[memoryview]:
        """The pictures that lack the last steps; to be kept likewise."""
        self._begin()
        behind = [series for series, history in self._kept.items() if self._shown.get(series) != history.last[-1]]
        return (self._picture(series, self._kept[series]) for series in behind[:MOST_AT_CLOSE])

    def keep(self) -> None:
        """The pictures last asked for are in the file, and the step with them."""
        self._kept.update(self._now)
        self._shown.update(self._shown_now)
        self._begin()

    def _begin(self) -> None:
        """What was not kept until now, because it could not be written, is not going to be."""
        self._now, self._shown_now = {}, {}

    def _due(self, rows: StepRows) -> Iterator[memoryview]:
        turns = {series: turn for turn, series in enumerate(self._kept)}
        most = _most_columns(max(len(turns), sum(len(rows.kinds.get(kind, ())) for kind in ADAM_KINDS)))
        for series, shade in _shades(rows):
            history = self._kept.get(series, History.empty(BINS)).with_step(rows.step, shade, most)
            turn = turns.setdefault(series, len(turns))
            self._now[series] = history
            if is_due(history.recorded, turn):
                yield self._picture(series, history)

    def _picture(self, series: int, history: History) -> memoryview:
        self._shown_now[series] = int(history.last[-1])
        picture = drawn(history)
        tag = encodable(f"{self._series[series].tag(self._rank)}_heatmap")
        content = [str(picture.width).encode(), str(picture.height).encode(), picture.png]
        summary = Summary()
        summary.value.add(tag=tag, metadata=_DESCRIBED, tensor=make_tensor_proto(content))
        return memoryview(summary.SerializeToString())


def is_due(recorded: int, turn: int) -> bool:
    """Whether a series has a picture when so many of its steps are recorded.

    Once in every period, whose length doubles up to ``LAST_PERIOD``. Those of many series do not fall on one step.

    Args:
        turn: The place of the series among all that have pictures.
    """
    if recorded < FIRST_PERIOD:
        return False
    period = min(1 << recorded.bit_length() - 1, LAST_PERIOD)
    return recorded % period == turn % period


def _most_columns(series: int) -> int:
    return max(FEWEST_COLUMNS, min(MOST_COLUMNS, HISTORY_BYTES // (BINS * max(series, 1))))


def _shades(rows: StepRows) -> Iterator[tuple[int, Shades]]:
    """Of each series that has a histogram of signed numbers in this step."""
    for kind in ADAM_KINDS:
        if kind not in rows.kinds:
            continue
        of_kind = rows.read(kind)
        there = np.flatnonzero(counted(of_kind.partials))
        partials = of_kind.partials.take(there)
        if partials.histogram is not None and len(there):
            shaded = shades(partials.histogram[:, :BINS], partials["count"])
            yield from zip(of_kind.series[there].tolist(), shaded, strict=True)
