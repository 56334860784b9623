"""Whatever a loop of the dynamic graph does, every number is right, or absent for a reason, and training is the same."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
from cell_loops import Loop, Observer, Training, loops
from cell_references import Reference
from hypothesis import given
from loop_judging import faults
from loop_rows import EVERYTHING, recorded
from loop_settings import MOST_SHOWN, drawn

from monitor.config import MonitorConfig
from monitor.mindspore import TrainerMon

TOLERANCE = 1e-3
"""Forward and backward are computed in float32, and the reference in float64."""


class Monitored(Observer):
    """A monitor of every kind."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def attach(self, training: Training) -> None:
        config = MonitorConfig(**EVERYTHING, monitor_mbs_grad=training.loop.each_micro_batch)
        self._monitor = TrainerMon.of_config(config, self._base)
        self._monitor.set_monitor(training.network, training.loop.micro_batches, training.optimizers)

    def close(self) -> None:
        self._monitor.close()
        (directory,) = self._base.glob("*-rank0-*")
        self.rows = recorded(directory)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "monitor")


@drawn(20)
@given(loops())
def test_every_number_is_right_or_absent_for_a_reason_and_training_is_the_same(loop: Loop) -> None:
    alone, monitored, reference = Training(loop), Training(loop), Reference()
    alone.run(Observer())
    Training(loop).run(reference)

    with tempfile.TemporaryDirectory() as directory:
        monitor = Monitored(Path(directory))
        monitored.run(monitor)

    assert monitored.bits == alone.bits
    found = [*faults(reference.rows, monitor.rows, TOLERANCE)]
    assert not found, "\n".join([f"{len(found)} faults:", *found[:MOST_SHOWN]])
