"""``monitor-ctl`` as people run it, on manifests as ranks write them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from monitor.config import load_config
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.coordinator.output import JobIdentity, RankDirectory, prepare
from monitor.dynamic.cli import app
from monitor.dynamic.controller import digest_of
from monitor.failures import Failures
from monitor.series import SeriesTable

START = '{\n  // one file for all\n  "dynamic_on": false,\n  "collect_times": 5,\n}\n'
OTHER = "0" * 16


class PlayedJob:
    """A job of two ranks, and the file that it watches."""

    def __init__(self, base: Path, job_id: str = "a" * 32) -> None:
        self.base, self.path = base, base / "config.json"
        self.path.write_text(START)
        identity = JobIdentity(job_id, "Dec03_21-34-40")
        self.manifests = [self._manifest(identity, rank) for rank in range(2)]

    def _manifest(self, identity: JobIdentity, rank: int) -> Manifest:
        directory = prepare(self.base / str(RankDirectory.new(identity.timestamp, rank)))
        facts = RankFacts(identity, rank, 2, {}, {}, {}, str(self.path), ("csv",))
        manifest = Manifest(directory, facts, SeriesTable(), Failures())
        manifest.save()
        return manifest

    def took_over(self, number: int, from_step: int, *, rank: int | None = None, **record: Any) -> PlayedJob:
        """One rank, or all, went over to what the file says."""
        config = load_config(self.path)
        told = {"since": from_step, "on": config.dynamic_on, "digest": digest_of(config), "changed": "", "origin": "file"}
        for each, manifest in enumerate(self.manifests):
            if rank in (each, None):
                manifest.configured(ConfigurationRecord(number=number, from_step=from_step, **(told | record)))
                manifest.save()
        return self


@pytest.fixture
def job(tmp_path: Path) -> PlayedJob:
    return PlayedJob(tmp_path).took_over(0, 0, origin="start")


def ran(base: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and what was said, in one line."""
    result = CliRunner().invoke(app, [str(base), *arguments], env={"COLUMNS": "400"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, " ".join(result.output.split())


def test_on_and_off_change_one_word_of_the_file(job: PlayedJob) -> None:
    status, said = ran(job.base, "on")
    assert (status, said) == (0, f"{job.path}: dynamic_on: false -> true")
    assert job.path.read_text() == START.replace("false", "true")
    assert ran(job.base, "off")[0] == 0
    assert job.path.read_text() == START
    assert ran(job.base, "off") == (0, f"{job.path}: nothing to change")


def test_set_takes_several_values_as_json_or_as_text(job: PlayedJob) -> None:
    status, said = ran(job.base, "set", "collect_times=7", "format=hdf5", 'targets["h.0"]={}', "alert.dump=true")
    assert status == 0, said
    config = load_config(job.path)
    assert (config.collect_times, config.formats, list(config.targets), config.alert.dump) == (7, ("hdf5",), ["h.0"], True)
    assert "// one file for all" in job.path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "collect_times=many"], 'collect_times: "many" is not allowed'),
        (["set", "colect_times=1"], "colect_times: unknown field, did you mean `collect_times`?"),
        (["set", "collect_times"], "'collect_times' gives no value: write KEY=VALUE"),
        (["set", "collect_times.x=1"], "collect_times is 5, which is not an object with fields"),
        (["set", "=1"], "'' names no field"),
        (["set"], "set needs values"),
        (["on", "x=1"], "on takes no values, and was given x=1"),
        (["status", "--job", "b"], "'b' begins the ids of 0 jobs"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_file_is_as_before(job: PlayedJob, arguments: list[str], said: str) -> None:
    status, told = ran(job.base, *arguments)
    assert status == 2
    assert told.startswith("Nothing was done: ")
    assert said in told
    assert job.path.read_text() == START


def test_status_shows_what_holds_since_when_on_every_rank(job: PlayedJob) -> None:
    job.path.write_text(START.replace("false", "true"))
    job.took_over(1, 120, changed="dynamic_on: false -> true")
    status, said = ran(job.base, "status")
    assert status == 0
    assert f"job {'a' * 32}, 2 of 2 ranks, {job.path}" in said
    for rank in range(2):
        assert f"{rank} 0 running on 120 1 file dynamic_on: false -> true" in said


def test_ranks_that_disagree_are_warned_of(job: PlayedJob) -> None:
    job.took_over(1, 10, rank=0).took_over(1, 11, rank=1).took_over(2, 20, rank=0).took_over(2, 20, rank=1, digest=OTHER)
    status, said = ran(job.base, "status")
    assert status == 1
    assert "warning: ranks 0 and 1 have different configurations for change 1" in said
    assert "warning: ranks 0 and 1 have different configurations for change 2" in said


def test_a_rank_that_learned_late_and_one_that_is_cut_off_are_warned_of(job: PlayedJob) -> None:
    job.took_over(1, 10, rank=0).took_over(1, 10, rank=1, since=13)
    job.manifests[0].undecided(15)
    job.manifests[0].save()
    status, said = ran(job.base, "status")
    assert status == 1
    assert "rank 1 adopted change 1 late: it recorded steps 10 to 12 with the configuration before" in said
    assert "rank 0 could not reach the others: from step 15 on it uses its own configuration" in said


def test_a_rank_that_has_not_written_yet_does_not_disagree(job: PlayedJob) -> None:
    job.took_over(1, 10, rank=0)
    assert ran(job.base, "status")[0] == 0


def test_with_wait_it_returns_when_all_ranks_have_gone_over(job: PlayedJob) -> None:
    def follow() -> None:
        while "true" not in job.path.read_text():
            pass
        job.took_over(1, 30, rank=0).took_over(1, 30, rank=1)

    follower = threading.Thread(target=follow)
    follower.start()
    status, said = ran(job.base, "on", "--wait", "60")
    follower.join()
    assert status == 0
    assert said.count("running on 30 1 file") == 2


def test_with_wait_it_says_so_when_time_is_up(job: PlayedJob) -> None:
    status, said = ran(job.base, "on", "--wait", "0.1")
    assert status == 1
    assert "not all ranks have adopted the change yet" in said


def test_a_job_that_does_not_look_at_its_file_is_left_alone(tmp_path: Path) -> None:
    job = PlayedJob(tmp_path)
    status, said = ran(job.base, "on")
    assert (status, job.path.read_text()) == (2, START)
    assert "it was not started with DYNAMIC_MONITOR=True" in said
    assert "does not watch its file" in ran(job.base, "status")[1]


def test_a_file_that_is_named_is_changed_without_a_job(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert ran(tmp_path, "on", "--config", str(path))[0] == 0
    assert json.loads(path.read_text()) == {"dynamic_on": True}


def test_of_two_jobs_the_one_that_runs_is_meant_and_of_two_that_run_one_is_to_be_chosen(tmp_path: Path, job: PlayedJob) -> None:
    ended = PlayedJob(tmp_path, "b" * 32).took_over(0, 0)
    assert "there are 2 jobs here" in ran(tmp_path, "status")[1]
    for manifest in ended.manifests:
        manifest.close()
    assert f"job {'a' * 32}" in ran(tmp_path, "status")[1]
    assert f"job {'b' * 32}" in ran(tmp_path, "status", "--job", "b")[1]
    assert job.manifests


def test_an_empty_directory_and_one_that_is_not_there_are_said(tmp_path: Path) -> None:
    assert ran(tmp_path, "status") == (
        2,
        "Nothing was done: there is no directory here of a rank with a manifest that can be merged",
    )
    assert "cannot be read" in ran(tmp_path / "none", "on")[1]


def test_the_help_names_the_actions_and_the_exit_statuses(tmp_path: Path) -> None:
    said = ran(tmp_path, "--help")[1]
    for part in ("on|off|set|status", "DYNAMIC_MONITOR=True", "collect_times=100", "Exit status: 0 done"):
        assert part in said
