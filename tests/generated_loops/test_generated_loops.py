"""Whatever a training loop does, every number of the monitor is right, or absent for a reason, and training is the same."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, note
from loop_absences import WARNINGS
from loop_judging import faults
from loop_monitored import Monitored
from loop_references import expected_rows
from loop_settings import MOST_SHOWN, drawn
from loop_telling import told
from loop_training import Observer, Training
from loops import Loop, loops


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What the monitor says of thousands of loops is in their manifests, as far as it counts."""
    caplog.set_level(logging.CRITICAL, "monitor")


@drawn(50)
@given(loops())
def test_every_number_is_right_or_absent_for_a_reason_and_training_is_the_same(loop: Loop) -> None:
    note(told(loop))
    alone, monitored = Training(loop), Training(loop)
    alone.run(Observer())

    with tempfile.TemporaryDirectory() as directory:
        monitor = Monitored(Path(directory))
        monitored.run(monitor)

    assert str(monitored.losses) == str(alone.losses)
    assert monitored.weights == alone.weights
    found = [*faults(expected_rows(loop), monitor.rows, 1e-5 if loop.single else 1e-9)]
    assert not found, "\n".join([f"{len(found)} faults:", *found[:MOST_SHOWN]])
    assert not [cause for cause in monitor.manifest["failures"] if not cause.startswith(tuple(WARNINGS))]
