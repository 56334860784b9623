"""The training program's own code is called with alerts, in its own thread, and may stop the loop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reading_back import Output
from torch import nn

import monitor
from monitor.anomalies.callbacks import AlertEvent
from monitor.pytorch import TrainerMon
from monitor.recording.trainer_mon import AlertCallback

ON_NAN: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "nans"], "alert": {"rules": [{"rule_name": "AnomalyNan"}]}}
LONGEST = 2000


class TooMuchError(Exception):
    pass


def trained(callback: AlertCallback, until: Callable[[], bool], *others: AlertCallback, broken: int = 3) -> int:
    """Train until something is true. One batch has a NaN in it. Returns the number of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with monitor.watch(model, optimizer, None, micro_batches=1, **ON_NAN) as watching:
        for one in (callback, *others):
            watching.add_alert_callback(one)
        for step in range(LONGEST):
            if until():
                return step
            batch = torch.full((2, 4), math.nan if step == broken else 1.0)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
    raise AssertionError("no alert has come")


@pytest.mark.usefixtures("output")
def test_it_is_called_in_the_thread_that_trains_with_what_the_rules_found() -> None:
    found: list[AlertEvent] = []
    threads: list[int] = []

    def callback(events: Sequence[AlertEvent]) -> None:
        found.extend(events)
        threads.append(threading.get_ident())

    trained(callback, lambda: bool(found))

    first, kinds = found[0], ("grad_unreduced", "grad_reduced")
    assert [event.step for event in found] == sorted(event.step for event in found)
    of_the_batch = {(event.kind, event.name) for event in found if event.step == first.step}
    assert of_the_batch == {(kind, f"{layer}.weight") for kind in kinds for layer in (0, 1)}
    assert first.step == 3
    assert (first.rule, first.op, first.micro_step, first.rank) == ("AnomalyNan", "nans", None, 0)
    assert first.value > 0
    assert first.message.startswith("Rule AnomalyNan reports anomaly signal in")
    assert set(threads) == {threading.get_ident()}


@pytest.mark.usefixtures("output")
def test_what_it_raises_reaches_the_loop() -> None:
    def callback(events: Sequence[AlertEvent]) -> None:
        raise TooMuchError(events[0].name)

    with pytest.raises(TooMuchError, match="weight"):
        trained(callback, lambda: False)


@pytest.mark.usefixtures("output")
def test_all_callbacks_are_called_and_the_cause_of_the_first_exception_stays() -> None:
    counts: list[int] = []

    def first(events: Sequence[AlertEvent]) -> None:
        raise TooMuchError(events[0].name) from KeyError("why")

    def second(events: Sequence[AlertEvent]) -> None:
        counts.append(len(events))

    with pytest.raises(TooMuchError) as raised:
        trained(first, lambda: False, second)
    assert isinstance(raised.value.__cause__, KeyError)
    assert counts[0] > 0


@pytest.mark.usefixtures("output")
@pytest.mark.parametrize("program_fails", [True, False])
def test_at_the_end_of_a_block_the_error_of_the_program_comes_first(
    program_fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        with monitor.watch(model, optimizer, None, micro_batches=1, **ON_NAN) as watching:
            close = watching.close

            def closes_with_an_alert() -> None:
                close()
                raise TooMuchError  # as a callback may

            monkeypatch.setattr(watching, "close", closes_with_an_alert)
            if program_fails:
                raise MemoryError

    with pytest.raises(MemoryError if program_fails else TooMuchError):
        train()
    assert ("Closing the monitor raised TooMuchError" in caplog.text) == program_fails


@pytest.mark.usefixtures("output")
def test_the_last_alerts_come_with_close() -> None:
    found: list[AlertEvent] = []
    steps = iter(range(10))
    trained(found.extend, lambda: next(steps) == 4)
    assert {event.step for event in found} == {3}


@pytest.mark.usefixtures("output")
def test_what_cannot_be_called_is_refused_and_missing_rules_are_said(caplog: pytest.LogCaptureFixture) -> None:
    watching = TrainerMon({"wg_distribution": True})
    with pytest.raises(TypeError, match="function: expected a function, got str"):
        watching.add_alert_callback("text")
    watching.add_alert_callback(print)
    assert "there are no alert.rules" in caplog.text


def test_without_alerts_it_is_not_called_and_files_are_as_without(output: Output) -> None:
    calls: list[object] = []
    steps = iter(range(6))
    trained(calls.append, lambda: next(steps) == 5, broken=-1)
    assert calls == []
    assert {row.step for row in output.rows("grad_reduced")} == set(range(5))
