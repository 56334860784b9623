"""Dynamic start and stop in one process: the scenarios of the documentation, with real training and real files."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attaching import Output, footprint, step_with, steps_of, warnings_in
from evidence import examples
from mindspore import nn
from monitor_threads import no_thread_left, threads_of_monitors
from training import Net

from monitor.mindspore import TrainerMon

GRADIENTS: dict[str, Any] = {"dynamic_on": True, "wg_distribution": True, "ops": ["norm"]}
"""The cheapest that has rows in every step."""
ACTIVATIONS: dict[str, Any] = {"dynamic_on": True, "xy_distribution": True, "all_xy": True, "ops": ["max", "min"]}


@pytest.fixture(autouse=True)
def _dynamic_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


class Training:
    """A process that trains one small model under dynamic monitoring."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.path.write_text(json.dumps(config))
        self.net = Net()
        self.optimizer = nn.Adam(self.net.trainable_params(), 0.01)
        self.monitor = TrainerMon(self.path)
        self.monitor.set_monitor(self.net, 1, self.optimizer)

    def edit(self, **config: Any) -> None:
        """Write the file and look at it, as the thread does once a second."""
        self.path.write_text(json.dumps(config))
        switching = self.monitor._recordings[0].switching
        assert switching is not None
        assert switching._control is not None
        assert switching._control._watching is not None
        switching._control._watching.turn()

    def train(self, steps: int) -> None:
        for number in range(steps):
            step_with(self.net, self.optimizer, number)


@contextmanager
def training(output: Output, **config: Any) -> Iterator[Training]:
    with no_thread_left():
        one = Training(output.base.parent / "config.json", **config)
        try:
            yield one
        finally:
            one.monitor.close()


def test_nothing_is_recorded_or_hooked_but_what_tells_steps_while_dynamic_on_is_false(output: Output) -> None:
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        one.train(4)
        assert not any(place.startswith("hooks of") for place in footprint(one.net, one.optimizer))
    assert list(output.directory().glob("*.csv")) == []


def test_what_is_on_from_the_start_is_recorded_from_the_step_after_the_first_until_collect_times(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 3, "start_step": 100}) as one:
        one.train(6)
    assert steps_of(output, "grad_reduced") == steps_of(output, "grad_unreduced") == [1, 2, 3]
    assert json.loads(one.path.read_text())["dynamic_on"] is False


def test_switched_on_by_an_edit_it_counts_from_the_next_step_whatever_start_step_says(output: Output) -> None:
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        one.train(4)
        one.edit(**GRADIENTS, start_step=1000, step_interval=3, collect_times=3)
        one.train(9)
    assert steps_of(output, "grad_unreduced") == [5, 8, 11]


def test_changed_before_its_end_it_goes_over_to_other_kinds_ops_and_targets_and_counts_anew(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 4}) as one:
        one.train(2)
        one.edit(**ACTIVATIONS | {"all_xy": False, "targets": {"a": {}}, "collect_times": 3})
        one.train(6)
    assert steps_of(output, "grad_unreduced") == [1, 2]
    assert steps_of(output, "actv") == steps_of(output, "actv_grad") == [3, 4, 5]
    assert {row.name for row in output.rows("actv")} == {"a.input", "a.output"}
    assert {tuple(row.values) for row in output.rows("actv")} == {("max", "min")}


def test_collect_times_0_stops_early_and_another_edit_starts_anew(output: Output) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, collect_times=0)
        one.train(2)
        one.edit(**GRADIENTS, collect_times=2)
        one.train(4)
    assert steps_of(output, "grad_reduced") == [1, 2, 5, 6]


def test_after_its_end_it_starts_anew_when_dynamic_on_is_set_again(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 2}) as one:
        one.train(4)
        assert json.loads(one.path.read_text())["dynamic_on"] is False
        one.edit(**GRADIENTS, collect_times=2)
        one.train(4)
        assert json.loads(one.path.read_text())["dynamic_on"] is False
    assert steps_of(output, "grad_reduced") == [1, 2, 5, 6]


@pytest.mark.parametrize("dynamic_on", [False, True])
def test_without_dynamic_monitoring_every_step_is_recorded_whatever_dynamic_on_says(
    dynamic_on: bool, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "False")
    with training(output, **GRADIENTS | {"dynamic_on": dynamic_on}) as one:
        one.train(3)
    assert steps_of(output, "grad_reduced") == [0, 1, 2]
    assert json.loads(one.path.read_text())["dynamic_on"] is dynamic_on


def test_a_bad_edit_is_said_once_and_what_was_before_continues(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, step_interval=0)
        one.edit(**GRADIENTS, step_interval=0)
        one.train(2)
    assert steps_of(output, "grad_reduced") == [1, 2, 3]
    (said,) = [line for line in warnings_in(caplog) if "stays in force" in line]
    assert "step_interval: 0 is not allowed" in said


def test_a_model_that_was_attached_again_continues_with_what_is_in_force(output: Output) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**ACTIVATIONS)
        one.train(2)
        one.monitor.set_monitor(one.net, 1, one.optimizer)
        one.train(2)
    assert steps_of(output, "actv") == steps_of(output, "actv_grad") == [3, 4, 5]


def living() -> Counter[str]:
    """Objects that the garbage collector knows, by type, without what the manifest keeps: ranges of steps, which are bounded
    there, and one record for each change of the configuration.
    """
    gc.collect()
    by_design = {"StepSpan", "ConfigurationRecord"}
    return Counter(name for one in gc.get_objects() if (name := type(one).__name__) not in by_design)


def held_by(one: Training) -> dict[str, int]:
    recording = one.monitor._recordings[0]
    table = recording._recorder.table
    return footprint(one.net, one.optimizer) | {
        "rows": sum(page.used for page in table.pages),
        "pages": len(table.pages),
        "layouts": len(table.layouts),
        "series": len(recording.series),
        "slots": len(recording._recorder.reader.rows.slots),
        "threads": len(threads_of_monitors()),
    }


def switch(one: Training, times: int, **config: Any) -> None:
    """On and off, in turn."""
    for number in range(times):
        one.edit(dynamic_on=number % 2 == 0, collect_times=100_000 + number, **config)
        one.train(1)


def test_many_switches_leave_no_hook_no_row_and_no_memory_behind(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="monitor")  # what pytest keeps of the log is not the monitor's
    many = {"xy_distribution": True, "wg_distribution": True, "format": "api", "ops": ["norm"]}
    with training(output, **many, dynamic_on=True, collect_times=100_000) as one:
        off = footprint(one.net, one.optimizer)
        one.train(1)
        switch(one, examples(50, 100), **many)
        held, objects = held_by(one), living()
        switch(one, examples(120, 200), **many)
        assert held_by(one) == held
        deadline = time.monotonic() + 20
        while (more := (living() - objects).total()) >= 100 and time.monotonic() < deadline:
            time.sleep(0.1)  # the writer may be at the manifest, all of which it holds twice then
        assert more < 100
        assert footprint(one.net, one.optimizer) == off
