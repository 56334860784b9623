"""While dynamic monitoring is off, a configuration asks for nothing to be recorded, whatever its file says."""

from __future__ import annotations

import pytest

from monitor.config import MonitorConfig
from monitor.config.model import CcDistribution, Intervals
from monitor.recording.recording import with_recording_off

SWITCHES = sorted({*Intervals.model_fields, "stack_info", "print_struct", "replica_check", "run_numbers"} - {"cc_distribution"})


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_off(switch: str) -> None:
    assert getattr(with_recording_off(MonitorConfig(**{switch: True, "format": ("parquet",)})), switch) is False


def test_communication_is_off_and_no_step_is_collected() -> None:
    off = with_recording_off(MonitorConfig(cc_distribution=CcDistribution(enable=True)))
    assert (off.cc_distribution.enable, off.collect_times) == (False, 0)
