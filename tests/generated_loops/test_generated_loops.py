"""Whatever a training loop does, every number of the monitor is right, or absent for a reason, and training is the same."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from loop_absences import WARNINGS
from loop_judging import faults
from loop_monitored import Monitored
from loop_references import expected_rows
from loop_rows import Place
from loop_settings import MOST_SHOWN, drawn
from loop_telling import told
from loop_training import Observer, Training
from loops import Loop, loops
from ways import IN_PYTHON, use


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


@drawn(20)
@given(loops())
def test_rows_are_the_same_whether_c_or_python_makes_them(loop: Loop) -> None:
    """Bit for bit, and in the same order."""
    note(told(loop))
    in_c = rows_of(loop)
    with pytest.MonkeyPatch.context() as patch:
        use(IN_PYTHON, patch)
        in_python = rows_of(loop)
    assert list(in_c) == list(in_python)
    assert {str(place) for place in in_c if repr(in_c[place]) != repr(in_python[place])} == set()


def rows_of(loop: Loop) -> dict[Place, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        monitor = Monitored(Path(directory))
        Training(loop).run(monitor)
        return monitor.rows
