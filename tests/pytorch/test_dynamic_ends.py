"""Dynamic monitoring where something ends or fails: the model goes, the process forks, a configuration cannot be used."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evidence import examples
from monitor_threads import threads_of_monitors
from switched import GRADIENTS, Training, training
from torch import nn, optim
from watching import Output, footprint, warnings_in

from monitor.pytorch import backend
from monitor.recording import attachment, trainer_mon


@pytest.fixture(autouse=True)
def _dynamic_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of order")


@pytest.mark.parametrize(
    "broken",
    [
        f"{backend.__name__}.TorchFactories.new_gradients",
        f"{attachment.__name__}.WeightCollector",
        f"{trainer_mon.__name__}.ModelNames",
    ],
)
def test_what_cannot_be_put_in_force_is_said_and_nothing_is_recorded_until_the_next_change(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    with training(output, **GRADIENTS) as one:
        plain = footprint(nn.Sequential(), one.optimizer)
        one.train(3)
        with monkeypatch.context() as patched:
            patched.setattr(broken, fails)
            one.edit(**GRADIENTS, param_distribution=True, xy_distribution=True)
            one.train(3)
        assert footprint(one.model, one.optimizer) == plain
        one.edit(**GRADIENTS, xy_distribution=True)
        one.train(3)
    assert one.steps() == [1, 2, 3, 7, 8]
    assert one.steps("actv") == [7, 8]
    assert sum("applying a configuration failed" in line for line in warnings_in(caplog)) == 1


def test_a_first_step_that_cannot_be_begun_with_keeps_training_and_the_next_change_is_followed(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(output, **GRADIENTS) as one:
        with monkeypatch.context() as patched:
            patched.setattr(f"{backend.__name__}.TorchFactories.new_gradients", fails)
            one.train(2)
        one.edit(**GRADIENTS, step_interval=2)
        one.train(3)
    assert one.steps() == [3]


def test_a_forked_child_trains_on_without_recording_or_waiting(output: Output) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, xy_distribution=True)
        if (child := os.fork()) == 0:
            try:
                one.train(3)
                one.monitor.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        one.train(3)
    assert one.steps() == [1, 2, 3, 4]
    assert one.steps("actv") == [3, 4]


def test_a_forked_child_may_train_with_an_optimizer_of_its_own(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        if (child := os.fork()) == 0:
            one.optimizer = optim.SGD(one.model.parameters(), lr=0.1)
            one.train(3)
            os._exit(len(warnings_in(caplog)))
        assert os.waitpid(child, 0)[1] == 0


def trained_and_dropped(output: Output, **config: Any) -> list[weakref.ref[Any]]:
    one = Training(output, **config)
    one.train(3)
    one.edit(**GRADIENTS, xy_distribution=True)
    one.train(3)
    one.edit(**{**config, "dynamic_on": False})
    one.train(2)
    return [weakref.ref(each) for each in (one.model, one.optimizer, one.monitor, one.recording)]


def test_a_monitor_that_no_one_holds_goes_with_its_model_and_so_do_its_threads(output: Output) -> None:
    threads = threads_of_monitors()
    gone = trained_and_dropped(output, **GRADIENTS)
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    deadline = time.monotonic() + 20
    while not threads_of_monitors() <= threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads_of_monitors() <= threads


def test_many_switches_leave_no_hook_no_thread_no_row_and_no_memory_behind(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="monitor")  # what pytest keeps of the log is not the monitor's
    many = {
        "xy_distribution": True,
        "all_xy": True,
        "wg_distribution": True,
        "mv_distribution": True,
        "format": "api",
        "ops": ["norm"],
    }
    threads = threads_of_monitors()
    one = Training(output, dynamic_on=True, collect_times=100_000, **many)
    off = footprint(one.model, one.optimizer)
    gone = weakref.ref(one.model), weakref.ref(one.monitor)
    few = 200  # below the number of switches: one object that each leaves behind is seen

    gc.collect()
    gc.freeze()  # what was there before is not looked through
    one.train(1)
    switch(one, examples(20, 100), **many)
    objects, before, memory = living(), held_by(one), resident_bytes()
    switch(one, examples(220, 900), **many)
    assert held_by(one) == before
    deadline = time.monotonic() + 20
    while (more := many_more(objects, few)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the writer may be at the manifest, all of which it holds twice then
    assert more == {}
    assert resident_bytes() - memory < 8 * 2**20
    assert footprint(one.model, one.optimizer) == off
    one.monitor.close()
    gc.unfreeze()
    del one
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert threads_of_monitors() <= threads


def switch(one: Training, times: int, **config: Any) -> None:
    """On and off, in turn."""
    for number in range(times):
        one.edit(dynamic_on=number % 2 == 0, collect_times=100_000 + number, **config)
        one.train(2)


def many_more(before: Counter[str], few: int) -> dict[str, int]:
    """The types of which there are more now, by ``few`` or more. What each switch leaves behind is of one type or some."""
    return {name: number for name, number in (living() - before).items() if number >= few}


def living() -> Counter[str]:
    """Objects that the garbage collector knows, by type, without the manifest's ranges of steps, which are bounded there."""
    gc.collect()
    return Counter(name for one in gc.get_objects() if (name := type(one).__name__) != "StepRange")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held_by(one: Training) -> dict[str, int]:
    assert one.recording.flush(20)  # the writer has no file open then
    table = one.recording._recorder.table
    return {
        **footprint(one.model, one.optimizer),
        "rows": sum(page.used for page in table.pages),
        "pages": len(table.pages),
        "layouts": len(table.layouts),
        "series": len(one.recording.series),
        "threads": len(threads_of_monitors()),
        "files": len(os.listdir("/proc/self/fd")),
        "slots": len(one.recording._recorder.reader.rows.slots),
    }
