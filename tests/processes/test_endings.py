"""However a run ends by itself, everything that it sealed is there, and the step in progress is marked as what it is."""

from __future__ import annotations

import pytest
from evidence import sampled
from launching import EVERY_STEP, Launcher
from recorded import Recorded, listed, only_recording

from monitor.sinks.hdf5 import read_hdf5


def assert_ten_steps_and_the_eleventh_begun(recording: Recorded) -> None:
    """Of the eleventh the forward was done."""
    assert sorted(recording.kinds["grad_reduced"]) == list(range(10))
    assert sorted(recording.kinds["actv"]) == list(range(11))
    manifest = recording.manifest()
    assert manifest.closed
    assert listed(manifest.steps.written) == list(range(11))
    assert listed(manifest.steps.incomplete) == [10]


ENDINGS = [
    ("return", 0, ""),
    ("close", 0, ""),
    ("raise", 1, "ArithmeticError: the loss is not what it should be"),
    ("exit", 3, ""),
    ("interrupt", -2, "KeyboardInterrupt"),
]


@pytest.mark.parametrize(
    ("steps_per_record", "how", "status", "reason"),
    sampled([(steps_per_record, *ending) for steps_per_record in (4, 1) for ending in ENDINGS], *range(6)),
)
def test_every_step_is_there_and_the_step_in_progress_is_marked_incomplete(
    launcher: Launcher, plain_losses: list[str], steps_per_record: int, how: str, status: int, reason: str
) -> None:
    ended = launcher.run("ending.py", how, config=EVERY_STEP | {"step_count_per_record": steps_per_record})
    assert (ended.status, ended.losses) == (status, plain_losses[:10]), ended.err
    assert ended.err.rstrip().endswith(reason)
    assert ended.warnings == []

    assert_ten_steps_and_the_eleventh_begun(only_recording(launcher.base))


def test_an_interpreter_of_its_own_ends_in_the_same_way(launcher: Launcher, plain_losses: list[str]) -> None:
    ended = launcher.start_interpreter("ending.py", "exit", config=EVERY_STEP).end()
    assert (ended.status, ended.losses, ended.warnings) == (3, plain_losses[:10], []), ended.err
    assert_ten_steps_and_the_eleventh_begun(only_recording(launcher.base))


def test_a_library_that_is_loaded_late_does_not_take_leave_first(launcher: Launcher) -> None:
    """h5py gives up its conversions at exit, and was loaded by the switch to HDF5, long after the monitor."""
    config = {"dynamic_on": True, "wg_distribution": True, "ops": ["norm"]}
    ended = launcher.start_interpreter("late_format.py", config=config).end()
    assert (ended.status, ended.warnings) == (0, []), ended.err
    (shard,) = launcher.base.glob("*-rank0-*/metrics_*.h5")
    assert sorted(set(read_hdf5(shard)["step"].to_pylist())) == [4, 5]
