"""Several processes at once in one output directory."""

from __future__ import annotations

from evidence import examples
from launching import EVERY_STEP, Launcher
from recorded import Recorded, rank_directories

COUNT = examples(4, 10)


def test_processes_that_know_nothing_of_each_other_do_not_meet(launcher: Launcher, plain_losses: list[str]) -> None:
    (launcher.base / "anomaly_detected").mkdir(parents=True)
    (launcher.base / "anomaly_detected" / "of-an-earlier-run").touch()
    together = [launcher.start("ending.py", "return", 10, config=EVERY_STEP) for _ in range(COUNT)]
    for one in together:
        ended = one.end()
        assert (ended.status, ended.losses, ended.warnings) == (0, plain_losses[:10], []), ended.err

    recordings = [Recorded(directory) for directory in rank_directories(launcher.base)]
    assert len(recordings) == len({recording.manifest().job_id for recording in recordings}) == COUNT
    for recording in recordings:
        assert sorted(recording.kinds["param_updated"]) == list(range(10))
        assert recording.manifest().closed
    [aside] = launcher.base.glob("anomaly_detected-before-*")
    assert [path.name for path in aside.iterdir()] == ["of-an-earlier-run"]
