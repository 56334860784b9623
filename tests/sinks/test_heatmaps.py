"""Pictures of how histograms change, as TensorBoard reads them back from the files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from counted_rows import counted_step, heatmaps, histograms
from PIL import Image
from sink_rows import Measured, Rank

from monitor.sinks import heatmaps as drawing
from monitor.sinks.heatmaps import (
    BINS,
    DEEPEST,
    INK,
    LEFT,
    MOST_COLUMNS,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    TOP,
    HeatmapHistory,
    column_of,
    drawn,
    is_due,
    row_of,
)
from monitor.sinks.tensorboard import TensorBoardSink

TAG = "0:w/rank0/adam_update_heatmap"
ZERO_BIN = 32
"""Of elements that are 0; the bin above it begins there."""


def write(sink: TensorBoardSink, rank: Rank, *steps: int, values: Sequence[float] = (0.0,)) -> None:
    for step in steps:
        sink.write(counted_step(rank, step, {"adam_update": [Measured("w", values)]}))


def steps_shown(out: Path) -> list[int]:
    return [step for step, _ in heatmaps(out).get(TAG, [])]


def plot(image: Image.Image) -> np.ndarray:
    """The shades of a picture, from the top, without its frame."""
    assert image.mode == "P"
    return np.array(image)[TOP : TOP + PLOT_HEIGHT, LEFT : LEFT + PLOT_WIDTH]


def shade_at(image: Image.Image, column: int, columns: int, value_bin: int) -> int:
    x = next(x for x in range(PLOT_WIDTH) if column_of(x, columns) == column)
    return int(plot(image)[row_of(value_bin), x])


def brightness(image: Image.Image) -> list[float]:
    """Of each colour of the palette."""
    colours = np.array(image.getpalette()).reshape(-1, 3)
    return (colours @ [0.2126, 0.7152, 0.0722]).tolist()


class TestPictures:
    def test_a_column_is_deepest_at_the_bin_that_has_most_elements(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        values = [[0.9] * 9 + [0.0], [0.0], [-0.5] * 3 + [0.5], [2.0] * 5 + [0.0], [-7.0] * 2]
        for step, one in enumerate(values):
            write(sink, rank, step, values=one)
        sink.close()
        ((step, image),) = heatmaps(out)[TAG]
        assert step == 4
        deepest = [int(np.argmax([shade_at(image, column, 5, place) for place in range(66)])) for column in range(5)]
        assert deepest == [61, ZERO_BIN, 16, 65, 0]
        assert [shade_at(image, 1, 5, place) for place in (ZERO_BIN, ZERO_BIN - 1)] == [DEEPEST, 0]

    @pytest.mark.parametrize("steps", [1, 10, 130, 256, 300, 500])
    def test_columns_fill_the_width_however_many_there_are(self, steps: int) -> None:
        history = HeatmapHistory.empty(BINS)
        for step in range(steps):
            history = history.with_step(step, np.full(BINS, 1 + step // 2, dtype=np.uint8), MOST_COLUMNS)
        middle = plot(Image.open(BytesIO(drawn(history).png)))[PLOT_HEIGHT // 2].tolist()
        assert middle == sorted(middle)
        assert set(middle) == set(range(1, 2 + (steps - 1) // 2))

    def test_a_single_step_among_many_that_differs_is_seen(
        self, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drawing, "MOST_COLUMNS", 8)
        monkeypatch.setattr(drawing, "FEWEST_COLUMNS", 8)
        sink = TensorBoardSink(rank.context)
        write(sink, rank, *range(20))
        write(sink, rank, 20, values=[0.0] * 9_999 + [5.0])
        write(sink, rank, *range(21, 40))
        sink.close()
        image = heatmaps(out)[TAG][-1][1]
        assert [shade_at(image, column, 5, 65) for column in range(5)] == [0, 0, 1, 0, 0]

    def test_deeper_shades_are_darker_and_what_is_empty_is_white(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        sink.close()
        ((_, image),) = heatmaps(out)[TAG]
        lights = brightness(image)
        assert lights[0] == pytest.approx(255)
        assert all(np.diff(lights[: DEEPEST + 1]) <= 0)
        assert lights[0] - lights[1] > 20
        assert lights[1] - lights[DEEPEST] > 200

    def test_axes_and_legend_are_labelled(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 7)
        write(sink, rank, 8)
        sink.close()
        ((_, image),) = heatmaps(out)[TAG]
        ink = np.array(image) == INK
        right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
        middle = TOP + PLOT_HEIGHT // 2
        for height in (row_of(64) + TOP, middle, TOP + row_of(1)):
            assert ink[height - 6 : height + 7, :LEFT].any()
        assert ink[bottom + 1 :, LEFT : LEFT + 40].any()
        assert ink[bottom + 1 :, right - 40 : right].any()
        assert not ink[bottom + 1 :, LEFT + 50 : right - 50].any()
        legend = [shade for shade in np.array(image)[:, right + 16].tolist() if 0 < shade <= DEEPEST]
        assert legend == sorted(legend, reverse=True)
        assert (legend[0], legend[-1]) == (DEEPEST, 1)
        assert ink[TOP:, right + 28 :].any()

    def test_the_steps_that_are_shown_are_written_below(self, rank: Rank, out: Path) -> None:
        def written(*steps: int) -> np.ndarray:
            sink = TensorBoardSink(rank.context)
            write(sink, rank, *steps)
            sink.close()
            _, image = heatmaps(out)[TAG][-1]
            for path in out.iterdir():
                path.unlink()
            return np.array(image)[TOP + PLOT_HEIGHT + 1 :, LEFT : LEFT + PLOT_WIDTH]

        half = PLOT_WIDTH // 2
        same, other_end, other_begin = written(3, 4), written(3, 9), written(2, 4)
        assert (same[:, :half] == other_end[:, :half]).all()
        assert (same[:, half:] != other_end[:, half:]).any()
        assert (same[:, half:] == other_begin[:, half:]).all()
        assert (same[:, :half] != other_begin[:, :half]).any()


class TestWhenTheyAreWritten:
    def test_at_first_seldom_then_once_in_every_period_and_when_the_file_is_closed(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, *range(200))
        assert steps_shown(out) == [7, 15, 31, 63, 127, 191]
        sink.close()
        assert steps_shown(out) == [7, 15, 31, 63, 127, 191, 199]

    def test_nothing_is_drawn_again_when_the_last_one_is_up_to_date(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, *range(8))
        sink.close()
        assert steps_shown(out) == [7]

    @pytest.mark.parametrize("turn", [0, 1, 5, 8, 100, 1001])
    def test_every_series_has_one_in_each_period(self, turn: int) -> None:
        due = [recorded for recorded in range(1, 1025) if is_due(recorded, turn)]
        periods = [(8, 16), (16, 32), (32, 64), *((first, first + 64) for first in range(64, 1024, 64))]
        assert [sum(first <= one < last for one in due) for first, last in periods] == [1] * len(periods)
        assert min(due) >= 8

    def test_those_of_many_series_do_not_fall_on_one_step(self) -> None:
        assert max(sum(is_due(recorded, turn) for turn in range(640)) for recorded in range(64, 1024)) == 10

    def test_when_the_file_is_closed_no_more_than_so_many_are_drawn(
        self, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drawing, "MOST_AT_CLOSE", 2)
        sink = TensorBoardSink(rank.context)
        sink.write(counted_step(rank, 0, {"adam_ratio": [Measured(name) for name in "abc"]}))
        sink.close()
        assert set(heatmaps(out)) == {f"0:{name}/rank0/adam_ratio_heatmap" for name in "ab"}

    def test_each_kind_of_each_parameter_has_its_own(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        sink.write(
            counted_step(rank, 0, {kind: [Measured("w"), Measured("v")] for kind in ("adam_ratio", "adam_update", "actv")})
        )
        sink.close()
        assert set(heatmaps(out)) == {
            f"0:{name}/rank0/{kind}_heatmap" for name in "wv" for kind in ("adam_ratio", "adam_update")
        }

    def test_rows_without_a_whole_histogram_are_no_column(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        broken = counted_step(rank, 0, {"adam_update": [Measured("w"), Measured("v")]})
        broken.kinds["adam_update"].partials.histogram[0] = 0
        sink.write(broken)
        sink.write(rank.step(1, {"adam_update": [Measured("w")]}))
        sink.close()
        assert set(heatmaps(out)) == {"0:v/rank0/adam_update_heatmap"}


class TestGuarantees:
    def test_the_last_pictures_do_not_hide_the_step_that_they_are_added_to(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0, 1)
        sink.close()
        assert [step for step, _ in histograms(out)["0:w/rank0/adam_update_histogram"]] == [0, 1]
        assert steps_shown(out) == [1]

    def test_a_step_that_could_not_be_written_is_no_column(self, rank: Rank, out: Path, file_size_limit) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        file_size_limit(os.stat(next(out.iterdir())).st_size + 100)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 1, values=[0.9])
        file_size_limit(None)
        write(sink, rank, 2)
        sink.close()
        ((_, image),) = heatmaps(out)[TAG]
        assert set(plot(image)[row_of(ZERO_BIN)].tolist()) == {DEEPEST}

    def test_pictures_that_find_no_room_when_the_file_is_closed_leave_it_whole(
        self, rank: Rank, out: Path, file_size_limit
    ) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        size = os.stat(next(out.iterdir())).st_size
        file_size_limit(size + 100)
        with pytest.raises(OSError, match="large"):
            sink.close()
        file_size_limit(None)
        assert os.stat(next(out.iterdir())).st_size == size
        assert not [name for name in os.listdir("/proc/self/fd") if str(out) in _target(name)]
        sink.close()

    def test_a_directory_that_is_gone_when_the_file_is_closed_stays_gone(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        next(out.iterdir()).unlink()
        out.rmdir()
        sink.close()
        assert not out.exists()

    def test_a_run_that_goes_back_forgets_the_columns_after_it(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        write(sink, rank, 1, 2, values=[0.9])
        write(sink, rank, 1)
        sink.close()
        step, image = heatmaps(out)[TAG][-1]
        assert step == 1
        assert set(plot(image)[row_of(ZERO_BIN)].tolist()) == {DEEPEST}

    def test_a_resumed_run_begins_a_picture_of_its_own(self, rank: Rank, out: Path) -> None:
        for steps, value in (((0, 1), 0.9), ((2, 3), 0.0)):
            sink = TensorBoardSink(rank.context)
            write(sink, rank, *steps, values=[value])
            sink.close()
        (first, before), (last, after) = heatmaps(out)[TAG]
        assert (first, last) == (1, 3)
        assert set(plot(before)[row_of(61)].tolist()) == {DEEPEST}
        assert set(plot(after)[row_of(61)].tolist()) == {0}

    def test_the_more_series_there_are_the_fewer_columns_each_has(
        self, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drawing, "HISTORY_BYTES", 66 * 4)
        monkeypatch.setattr(drawing, "FEWEST_COLUMNS", 2)
        sink = TensorBoardSink(rank.context)
        for step in range(4):
            write(sink, rank, step, values=[step / 4])
        sink.write(counted_step(rank, 4, {"adam_update": [Measured("v")]}))
        write(sink, rank, 5, values=[-0.9])
        sink.close()
        image = dict(heatmaps(out)[TAG])[5]
        seen = [{place for place in range(66) if shade_at(image, column, 2, place)} for column in (0, 1)]
        assert seen == [{32, 40, 48, 56}, {4}]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
