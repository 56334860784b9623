"""``trainermon top`` beside a real job of four ranks, one of which is stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hanging import until
from launching import Launcher, Nursery
from typer.testing import CliRunner

from monitor.coordinator.progress import LEAST_SECONDS, PROGRESS_FILE
from monitor.top.cli import app
from monitor.top.watching import BEATS_MISSED, ENDED, RUNNING, SILENT, WAITING, Watch

SCRIPT = Path(__file__).resolve().parents[1] / "merge" / "scripts" / "steady.py"
SOON = 120.0
STOPPED = 2
INTERVAL_S = 2.0
"""Of the command, if it is not given."""


@pytest.fixture
def launcher(tmp_path: Path, nursery: Nursery) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, nursery)
    yield launcher
    assert launcher.clean_up() == ([], [])


def test_a_stopped_rank_is_silent_within_ten_seconds() -> None:
    """Of the clock. What waits for a busy machine comes on top."""
    assert (BEATS_MISSED + 1) * LEAST_SECONDS + INTERVAL_S / 2 <= 10


def test_of_four_ranks_the_one_that_was_stopped_is_named_and_no_other(launcher: Launcher, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    config: dict[str, Any] = {"wg_distribution": True, "format": ["parquet"], "ops": ["norm"]}
    ranks = launcher.start_ranks(4, str(SCRIPT), stop, config=config)
    assert until(lambda: len(list(launcher.base.glob("*/manifest.json"))) == 4, SOON)
    watch = Watch(launcher.base)

    def states() -> list[str]:
        return [one.state for one in watch.look().ranks]

    assert until(lambda: set(states()) <= {RUNNING, WAITING}, SOON)
    ranks[STOPPED].send(signal.SIGSTOP)
    try:
        assert until(lambda: states()[STOPPED] == SILENT, SOON)
        assert set(states()[:STOPPED] + states()[STOPPED + 1 :]) <= {RUNNING, WAITING}
        shown = CliRunner().invoke(app, [str(launcher.base), "--once"])
        assert shown.exit_code == 1
        assert f"silent: rank {STOPPED} (process {ranks[STOPPED].child.pid} on " in shown.stdout
        told = json.loads(CliRunner().invoke(app, [str(launcher.base), "--json"]).stdout)
        assert [one["rank"] for one in told["ranks"] if one["state"] == SILENT] == [STOPPED]
    finally:
        ranks[STOPPED].send(signal.SIGCONT)
    assert until(lambda: SILENT not in states(), SOON)
    stop.touch()
    assert [one.end().status for one in ranks] == [0] * 4
    assert [one.warnings for one in (rank.end() for rank in ranks)] == [[]] * 4
    look = watch.look()
    assert [one.state for one in look.ranks] == [ENDED] * 4
    assert (look.is_well, look.has_ended) == (True, True)
    assert not list(launcher.base.glob(f"*/{PROGRESS_FILE}"))
