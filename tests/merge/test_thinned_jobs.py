"""Ranks that thinned their directories, each by its own bytes: what is not there is named as thinned, and not as lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_job import RecordedRank, merged, table
from sink_rows import Measured
from test_following import Following, assert_as_merged_at_once

from monitor import open_run
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.manifest_format import read_manifest
from monitor.coordinator.output import JobIdentity
from monitor.coordinator.resume import resolve_rank_directory
from monitor.coordinator.thinning import DiskBound, ThinningRule
from monitor.failures import Failures
from monitor.merge import rows as merge_rows
from monitor.merge.report import summary
from monitor.merge.tables import GONE
from monitor.series import Placement, Shard
from monitor.sinks.csv import CsvSink
from monitor.sinks.csv_files import held
from monitor.sinks.files import ALL_STEPS
from monitor.sinks.protocol import SinkContext

STEPS = 40
FORMATS = pytest.mark.parametrize("format", ["csv", "hdf5", "parquet"])


class Thinned(RecordedRank):
    """A rank that removes about so many steps after it has recorded all."""

    def thin(self, count: int, *, interrupted: bool = False) -> list[int]:
        bound = DiskBound(self.directory, Failures(), 1, ThinningRule(1, 1))
        bound.excess = lambda *_: count  # type: ignore[method-assign]
        self.manifest.bound = bound
        steps = self.manifest.excess(0)
        if not interrupted:
            for sink in self._sinks:
                sink.remove(steps)  # type: ignore[attr-defined]
            self.manifest.removed()
        return steps


def job(base: Path, format: str, *counts: int, alert: int | None = None, interrupted: bool = False) -> list[Thinned]:  # noqa: A002
    """Two ranks with a part each of ``w``, which remove different steps. Only the first one has an alert."""
    ranks = []
    for rank, count in enumerate(counts):
        groups = {"dp": list(range(len(counts)))}
        one = Thinned(base, rank, len(counts), format, groups, steps_per_record=1, step_count_per_record=1)
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (4,), (rank * 2,))))
        one.place("grad_reduced", "b", Placement(replicas=(0, 1)))
        for step in range(STEPS):
            if step == alert and rank == 0:
                one.manifest.alert(step)
            b = [Measured("b", [1.0])] if rank == 0 else []
            kinds = {"grad_reduced": [Measured("w", [3.0, 4.0]), *b], "param_origin": [Measured("v", [float(step)])]}
            one.write(step, kinds)
        if count:
            one.thin(count, interrupted=interrupted)
        ranks.append(one)
    return ranks


def steps_in(base: Path, folder: str) -> set[int]:
    """The steps that have a row of ``w``."""
    return {row["step"] for row in table(base, folder).to_pylist() if row["name"] == "w"}


@FORMATS
def test_thinned_steps_are_named_and_nothing_else_is_missing(tmp_path: Path, format: str) -> None:  # noqa: A002
    first, second = job(tmp_path, format, 6, 9)
    first.close(), second.close()
    report = merged(tmp_path, kinds=["grad_reduced"])
    told = report.told()
    assert [told[what]["count"] for what in ("gaps", "dropped", "incomplete", "set_aside", "not_closed")] == [0] * 5
    assert [(one["rank"], one["steps"]["count"]) for one in told["thinned"]["listed"]] == [(0, 6), (1, 9)]
    assert not report.clean
    said = [line for what, line in summary(told) if what == "thinned"]
    assert said[0] == "rank 0, steps 1 to 11 by 2: thinned to stay within max_output_bytes"
    assert steps_in(tmp_path, "per_rank") == set(range(STEPS)) - set(range(1, 12, 2))
    assert steps_in(tmp_path, "global") == set(range(STEPS)) - set(range(1, 18, 2))


def test_the_step_of_an_alert_stays_on_the_rank_that_had_it(tmp_path: Path) -> None:
    first, second = job(tmp_path, "csv", 8, 8, alert=5)
    first.close(), second.close()
    told = merged(tmp_path, kinds=["grad_reduced"]).told()
    assert (told["gaps"]["count"], told["incomplete"]["count"]) == (0, 0)
    rows = table(tmp_path, "per_rank").to_pylist()
    assert {row["rank"] for row in rows if row["step"] == 5} == {0}
    assert 5 not in steps_in(tmp_path, "global")


def test_a_total_norm_without_the_part_of_a_rank_is_absent_with_the_reason(tmp_path: Path) -> None:
    first, second = job(tmp_path, "hdf5", 6, 9)
    first.close(), second.close()
    totals = {row["step"]: row for row in open_run(tmp_path).total_norm("grad_reduced").to_pylist()}
    assert totals[0]["total_norm"] == pytest.approx(51**0.5)
    assert totals[13]["total_norm"] is None  # of the first rank alone there are rows
    assert totals[13]["missing"] == "rank 1: thinned to stay within max_output_bytes"


def test_a_merge_that_follows_the_job_has_the_bytes_of_one_merge_afterwards(tmp_path: Path) -> None:
    ranks = job(tmp_path, "parquet", 0, 0)
    for one in ranks:
        one.manifest.save()
    following = Following(tmp_path)
    assert following.look() is None
    early = set(open_run(tmp_path / "followed").rows("grad_reduced")["step"].to_pylist())
    ranks[0].thin(6), ranks[1].thin(9)
    for one in ranks:
        one.close()
    assert following.look() is not None
    assert_as_merged_at_once(tmp_path)
    assert early - set(open_run(tmp_path / "followed").rows("grad_reduced")["step"].to_pylist()) == set(range(1, 12, 2))


@FORMATS
def test_rows_that_a_kill_has_left_of_a_thinned_step_do_not_count(tmp_path: Path, format: str) -> None:  # noqa: A002
    (rank,) = job(tmp_path, format, 6, interrupted=True)
    rank.flush()
    for path in rank.directory.glob("param_origin_[13]-*"):
        path.unlink()  # the kinds of a step are removed one after the other
    read = {row["step"] for row in open_run(tmp_path).rows("grad_reduced").to_pylist()}
    assert read == set(range(STEPS)) - set(range(1, 12, 2))
    assert steps_of_manifest(rank) == read


def steps_of_manifest(rank: RecordedRank) -> set[int]:
    return set(read_manifest(rank.directory / "manifest.json").steps.written.steps())


def test_a_resumed_run_removes_them_first(tmp_path: Path) -> None:
    (rank,) = job(tmp_path, "csv", 6, interrupted=True)
    rank.flush()
    span = ["Jan01_00-00-00", "Dec31_23-59-59"]
    resolved = resolve_rank_directory(tmp_path, 0, "Dec03_22-00-00", 0, span, ["csv"], Failures())
    facts = RankFacts(JobIdentity("2b" * 16, "Dec03_22-00-00"), 0, 1, {}, {}, {}, "", ["csv"])
    manifest = Manifest(rank.directory, facts, rank.series, Failures(), resolved.earlier, resolved.lock)
    manifest.bound = DiskBound(rank.directory, Failures(), 10**9, ThinningRule(1, 1))
    sink = CsvSink(SinkContext(rank.directory, 0, rank.series, 6, 1, 1e-8))
    left = manifest.excess(0)
    assert left == list(range(1, 12, 2))
    assert (rank.directory / "param_origin_1-1.csv").exists()
    sink.remove(left)
    manifest.removed()
    manifest.close()
    assert held(rank.directory, ALL_STEPS) == set(range(STEPS)) - set(left)
    record = read_manifest(rank.directory / "manifest.json")
    assert (record.thinned.unfinished.count, record.thinned.steps["2"].count) == (0, 6)
    assert manifest.excess(0) == []


@FORMATS
def test_a_file_that_vanishes_while_it_is_merged_is_named_and_the_rest_is_merged(
    tmp_path: Path,
    format: str,  # noqa: A002
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (rank,) = job(tmp_path, format, 0)
    rank.close()
    real = merge_rows.read

    def vanishing(*arguments: object) -> object:
        for path in rank.directory.glob("*_3-3.*"):
            path.unlink()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("monitor.merge.combine.read", vanishing)
    report = merged(tmp_path, kinds=["grad_reduced"])
    assert report.steps == set(range(STEPS)) - {3}
    assert [one["reason"] for one in report.told()["set_aside"]["listed"]] == [GONE]
    assert not report.clean
