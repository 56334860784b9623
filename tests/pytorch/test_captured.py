"""Rows of code that was captured in a graph of the device, which runs without the host.

A tape takes the place of such a graph here: it runs the same operators on the same tensors again, as a device would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monitor.pytorch.compiled.operators import NO_VALUE
from monitor.pytorch.tensor_reader import OFF, DeviceSteps, TorchTensorReader
from monitor.recording.recorder import Due, RecordedSeries, Recorder
from monitor.series import Series, SeriesTable
from monitor.stats.partials import KindRows
from monitor.stats.table import SealedTable

HOST = torch.device("cpu")
MICRO_STEPS = (0, 1)


class Tape(TorchDispatchMode):
    """What was called, and the tensors that came of it: these have the same address whenever it is played."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.recording = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def __enter__(self) -> Tape:
        self.recording = True
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.recording = False

    def play(self) -> None:
        for func, args, kwargs, result in self._calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Captured:
    """A recorder, and a graph in which three elements of the sum of a tensor and 1 have a row in each micro-step."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.reader = TorchTensorReader(SeriesTable(), 1e-8)
        self.recorder = Recorder(self.reader)
        self.reader.device_steps = DeviceSteps(lambda _: self.tape.recording)
        self.reader.device_steps.make(HOST, 0)
        self.due = Due(True)
        self.watched = self._watched("each", MICRO_STEPS)
        self.whole = self._watched("whole", (-1,))
        self.x = torch.zeros(5, dtype=torch.float64)
        self._have_rows()
        self.tag = torch.tensor(OFF)
        with self.tape:
            self.tag.copy_(self.reader.device_steps.micro_step(HOST, 0))  # as a compiled call does
            y = (self.x + 1)[::2]  # not ordinary, as nothing on a device is while it is captured
            self.reader.record_value(self.whole, y, -1, NO_VALUE, self.tag, self.due)
            self.reader.record_value(self.watched, y, 0, NO_VALUE, self.tag, self.due)
        self.recorder.discard()

    def _watched(self, name: str, micro_steps: tuple[int, ...]) -> Any:
        return RecordedSeries(Series("actv", 0, name), micro_steps)

    def _have_rows(self) -> None:
        self.recorder.activate(True)
        for micro_step in MICRO_STEPS:
            self.recorder.record(self.watched, self.x, micro_step, aliases=False)
        self.recorder.record(self.whole, self.x, aliases=False)
        self.recorder.discard()

    def step(self, values: list[float], collected: bool = True) -> dict[tuple[str, int], float]:
        """Replay the graph for each value of ``x``; the sums in the rows."""
        self.recorder.activate(collected)
        for value in values:
            self.recorder.micro_step_begins(0, len(MICRO_STEPS))
            self.x.fill_(value)
            self.tape.play()
        self.recorder.end_step()
        sealed = SealedTable()
        self.recorder.seal(sealed)
        rows = sealed.rows().kinds.get("actv")
        return {} if rows is None else self._sums(rows)

    def _sums(self, rows: KindRows) -> dict[tuple[str, int], float]:
        names = [self.recorder.table.series[i].name for i in rows.series]
        return {
            (name, int(micro_step)): float(total)
            for name, micro_step, total in zip(names, rows.micro_step, rows.partials["sum"], strict=True)
        }


@pytest.fixture
def captured() -> Captured:
    return Captured()


def test_a_replay_writes_the_row_of_the_micro_step_in_which_it_runs(captured: Captured) -> None:
    assert captured.step([1.0, 2.0]) == {("whole", -1): 9.0, ("each", 0): 6.0, ("each", 1): 9.0}
    assert captured.step([3.0, 4.0]) == {("whole", -1): 15.0, ("each", 0): 12.0, ("each", 1): 15.0}


def test_a_replay_in_a_step_that_is_not_collected_writes_nothing(captured: Captured) -> None:
    assert captured.step([1.0, 2.0], collected=False) == {}
    assert captured.step([1.0]) == {("whole", -1): 6.0, ("each", 0): 6.0}


def test_a_micro_step_more_than_there_are_rows_has_none(captured: Captured) -> None:
    found = captured.step([1.0, 2.0, 3.0])
    assert found == {("whole", -1): 12.0, ("each", 0): 6.0, ("each", 1): 9.0}


def test_rows_of_replays_stand_in_the_order_of_the_capture(captured: Captured) -> None:
    assert [name for name, _ in captured.step([1.0, 2.0])] == ["whole", "each", "each"]


def test_what_was_not_seen_before_a_capture_has_no_row(captured: Captured) -> None:
    late = captured._watched("late", MICRO_STEPS)
    captured.recorder.activate(True)
    with captured.tape:
        captured.reader.record_value(late, captured.x, 0, NO_VALUE, captured.tag, captured.due)
    assert ("late", 0) not in captured.step([1.0])


def test_a_place_that_is_made_within_a_step_has_counted_its_forwards() -> None:
    steps = DeviceSteps(lambda _: False)
    steps.step_begins(True)
    steps.micro_step_begins(0, 3)
    steps.micro_step_begins(0, 3)
    steps.make(HOST, 0)
    assert steps.micro_step(HOST, 0) == 1
    steps.micro_step_begins(0, 3)
    assert steps.micro_step(HOST, 0) == 2
    steps.step_begins(True)
    steps.micro_step_begins(0, 3)
    assert steps.micro_step(HOST, 0) == 0


def test_in_a_capture_no_place_is_made(captured: Captured) -> None:
    with captured.tape:
        captured.reader.device_steps.make(HOST, 1)
    assert not captured.reader.device_steps.has(HOST, 1)
