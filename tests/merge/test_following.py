"""A merge that follows a job: at every moment the set can be read and has each row once. At the end it is that of one merge."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence import PROVES, sampled
from filelock import FileLock
from recorded_job import FORMATS, RecordedRank, files, merged
from sink_rows import Measured
from typer.testing import CliRunner

from monitor import QueryError, open_run
from monitor.merge.cli import app
from monitor.merge.discovery import NO_END, choose, discover, runs_of
from monitor.merge.execution import MergeError
from monitor.merge.follow import FollowedSet, FollowOptions, Horizon, Rounds, UnfinishedError, follow
from monitor.merge.merge import Wanted
from monitor.merge.parts import options_of
from monitor.series import Placement, Shard

VALUES = (3.0, 4.0, -12.0, 0.0, 0.5)


class Job:
    """Two ranks with a part each of ``w`` and activations of their own, which have not ended."""

    def __init__(
        self, base: Path, records: Sequence[int] = (5, 5), formats: Sequence[str] = ("hdf5", "hdf5"), **more: Any
    ) -> None:
        self.base = base
        each = zip(records, formats, strict=True)
        self.ranks = [
            RecordedRank(base, rank, 2, form, {"dp": [0, 1]}, steps_per_record=length, step_count_per_record=length, **more)
            for rank, (length, form) in enumerate(each)
        ]
        for rank, one in enumerate(self.ranks):
            one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (5,), (rank * 2,))))

    def write(self, steps: range, ranks: Sequence[int] = (0, 1), *names: str) -> Job:
        for rank in ranks:
            for step in steps:
                held = VALUES[:2] if rank == 0 else VALUES[2:]
                rows = [
                    Measured("w", [value * (step + 1) for value in held]),
                    *(Measured(name, [1.0 * rank]) for name in names),
                ]
                self.ranks[rank].write(step, {"grad_reduced": rows, "actv": [Measured("a", [step, rank], micro_step=0)]})
            self.ranks[rank].manifest.save()
        return self

    def close(self) -> None:
        for one in self.ranks:
            one.close()


class Following:
    """A process that follows the job; a new one is one that was started again."""

    def __init__(self, base: Path, output: str = "followed", **wanted: Any) -> None:
        self.said: list[str] = []
        wanted = Wanted(base, base / output, **wanted)
        self._rounds = Rounds(wanted, FollowedSet(base / output, options_of(wanted)), self.said.append, lambda *_: None)

    def look(self, *, finish: bool = False) -> dict[str, Any] | None:
        report = self._rounds.next(finish=finish)
        return None if report is None else report.told()


def steps_of(output: Path, kind: str = "grad_reduced") -> list[int]:
    """The steps of a followed set, of which each rank has one row, and the whole tensor another one."""
    run = open_run(output)
    rows, whole = run.rows(kind), run.rows(kind, per_rank=False)
    places = list(zip(rows["step"].to_pylist(), rows["rank"].to_pylist(), rows["name"].to_pylist(), strict=True))
    assert len(places) == len(set(places))
    steps = sorted({step for step, _, _ in places})
    assert {(step, rank) for step, rank, _ in places} == {(step, rank) for step in steps for rank in (0, 1)}
    assert sorted(set(whole["step"].to_pylist())) == steps
    return steps


def assert_as_merged_at_once(base: Path, output: str = "followed", **wanted: Any) -> None:
    merged(base, "at-once", **wanted)
    assert files(base / output) == files(base / "at-once")
    assert {path.name for path in base.iterdir() if output in path.name} == {output}


@pytest.mark.parametrize(("recorded", "format"), sampled(list(product(FORMATS, FORMATS)), 1, 5, 6))
def test_the_set_has_all_complete_records_and_at_the_end_the_bytes_of_one_merge(
    tmp_path: Path,
    recorded: str,
    format: str,  # noqa: A002
) -> None:
    job, following = Job(tmp_path, formats=(recorded, recorded)), Following(tmp_path, format=format)
    for begin in range(0, 18, 3):
        job.write(range(begin, begin + 3))
        assert following.look() is None
        complete = (begin + 3) // 5 * 5
        assert not complete or steps_of(tmp_path / "followed") == list(range(complete))
    job.close()
    assert following.look() is not None
    assert_as_merged_at_once(tmp_path, format=format)


@pytest.mark.parametrize(
    ("rows", "records", "formats"),
    sampled(
        [
            (rows, *borders)
            for borders in [((2, 3), ("hdf5", "csv")), ((5, 5), ("csv", "parquet")), ((1, 4), ("csv", "csv"))]
            for rows in (1, 3, 8, 20, 1000)
        ],
        *(1, 3, 7, 10),
    ),
)
def test_pieces_of_any_size_and_ranks_of_any_borders_give_the_bytes_of_one_merge(
    tmp_path: Path, rows: int, records: Sequence[int], formats: Sequence[str]
) -> None:
    job, following = Job(tmp_path, records, formats), Following(tmp_path, rows=rows)
    known: list[int] = []
    for step in range(14):
        job.write(range(step, step + 1))
        following.look()
        if (tmp_path / "followed").exists():
            steps = steps_of(tmp_path / "followed")
            assert steps[: len(known)] == known
            known = steps
    assert len(known) >= 5
    job.close()
    Following(tmp_path, rows=rows).look()
    assert_as_merged_at_once(tmp_path, rows=rows)


def test_a_file_that_is_final_is_never_touched_again(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(10)), Following(tmp_path, rows=20)
    following.look()
    first = {path: path.stat().st_ino for path in (tmp_path / "followed" / "per_rank").iterdir()}
    job.write(range(10, 25))
    following.look()
    job.close()
    following.look()
    assert {path.name for path in first} == {"actv_0-9.parquet", "grad_reduced_0-9.parquet"}
    assert {path: path.stat().st_ino for path in first} == first
    assert_as_merged_at_once(tmp_path, rows=20)


def test_the_rank_that_is_behind_is_named_and_nothing_beyond_it_is_merged(tmp_path: Path) -> None:
    job, following = Job(tmp_path), Following(tmp_path)
    job.write(range(20), [0]).write(range(0))
    following.look()
    assert following.said == ["waiting for rank 1, which has no complete files yet"]
    job.write(range(7), [1])
    following.look()
    assert steps_of(tmp_path / "followed") == [0, 1, 2, 3, 4]
    assert following.said[-1] == "merged up to step 4, 20 rows; waiting for rank 1, which has complete files up to step 4"


def test_a_rank_without_a_directory_is_waited_for(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, 0, 3)
    one.write(0, {"actv": [Measured("a")]})
    one.close()
    following = Following(tmp_path)
    assert following.look() is None
    assert following.said == ["waiting for rank 1 and 1 more, which has no manifest yet"]
    assert not (tmp_path / "followed").exists()


def test_a_kind_that_is_not_there_yet_is_named_once_and_refused_at_the_end(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(5)), Following(tmp_path, kinds=["actv", "actvv"])
    following.look()
    job.write(range(5, 10))
    following.look()
    assert [line for line in following.said if "actvv" in line] == [
        "the job has not recorded actvv so far, which --kinds names"
    ]
    job.close()
    with pytest.raises(MergeError, match="--kinds names 'actvv'"):
        following.look()


def test_before_the_first_rank_there_is_it_waits(tmp_path: Path) -> None:
    following = Following(tmp_path)
    assert following.look() is None
    assert following.said == ["waiting for the first rank, no directory has a manifest yet"]


def test_while_ranks_write_the_report_says_so_and_does_not_take_their_files_for_left_ones(tmp_path: Path) -> None:
    Job(tmp_path).write(range(8))
    Following(tmp_path).look()
    told = open_run(tmp_path / "followed").manifest
    assert (told["clean"], told["not_closed"]["count"], told["set_aside"]["count"]) == (False, 2, 0)


@pytest.mark.parametrize("format", sampled(["parquet", "csv"]))
def test_killed_between_any_two_changes_it_continues(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,  # noqa: A002
) -> None:
    job, known = Job(tmp_path, (2, 3)), {}
    for number, moment in enumerate(range(0, 100, 1 if PROVES else 3)):
        job.write(range(6 * number, 6 * number + 6))
        with monkeypatch.context() as patch:
            ended = dies_before_change(patch, moment, Following(tmp_path, rows=30, format=format).look)
        there = found(tmp_path / "followed")
        assert all(there[what][: len(steps)] == steps for what, steps in known.items())
        known = there
        if ended:
            break
    assert 10 < moment < 99
    job.close()
    Following(tmp_path, rows=30, format=format).look()
    assert_as_merged_at_once(tmp_path, rows=30, format=format)


def found(output: Path) -> dict[tuple[str, bool], list[int]]:
    """By kind, of rows of ranks and of whole tensors: the steps. Each row is there once."""
    if not output.exists():
        return {}
    run = open_run(output)
    listed = {}
    for kind, whole in product(run.kinds, (False, True)):
        try:
            rows = run.rows(kind, per_rank=not whole)
        except QueryError:  # its other files are there already
            continue
        steps = sorted(set(rows["step"].to_pylist()))
        assert len(rows) == len(steps) * (1 if whole and kind == "grad_reduced" else 2)
        listed[kind, whole] = steps
    return listed


class KilledError(Exception):
    pass


def dies_before_change(patch: pytest.MonkeyPatch, moment: int, work: Callable[[], object]) -> bool:
    """Does the work, and is killed before it has changed a name ``moment + 1`` times. True if it ended before that."""
    count = 0

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def changing(path: Any, *more: Any, **how: Any) -> None:
            nonlocal count
            if "followed" in str(path) and "work" not in Path(path).parts:
                if count == moment:
                    raise KilledError
                count += 1
            change(path, *more, **how)

        return changing

    for name in ("replace", "rename", "unlink"):
        patch.setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    except KilledError:
        return False
    return True


def test_killed_at_the_very_end_it_ends_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(tmp_path).write(range(7)).close()
    with monkeypatch.context() as patch:
        patch.setattr(FollowedSet, "close", lambda _: (_ for _ in ()).throw(KilledError()))
        with pytest.raises(KilledError):
            Following(tmp_path).look()
    assert Following(tmp_path).look() is not None
    assert_as_merged_at_once(tmp_path)


def test_steps_that_a_resumed_run_does_again_are_those_of_the_later_run(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(20)), Following(tmp_path, rows=20)
    following.look()
    assert steps_of(tmp_path / "followed") == list(range(20))
    again = Job.__new__(Job)
    groups = {"dp": [0, 1]}
    again.ranks = [RecordedRank(tmp_path, rank, 2, "hdf5", groups, suffix=f"fffffff{rank}") for rank in (0, 1)]
    assert job.ranks[0].directory < again.ranks[0].directory
    again.write(range(7, 18))
    Following(tmp_path, rows=20).look()
    assert steps_of(tmp_path / "followed") == list(
        range(5)
    )  # its first record holds 0 to 99, and shares 5 and 6 with the first run
    again.close()
    Following(tmp_path, rows=20).look()
    assert steps_of(tmp_path / "followed") == list(range(18))
    assert_as_merged_at_once(tmp_path, rows=20)


def test_a_tensor_that_appears_late_is_in_the_set(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(10)), Following(tmp_path, rows=20)
    following.look()
    job.write(range(10, 20), (0, 1), "late")
    following.look()
    assert "late" in open_run(tmp_path / "followed").rows("grad_reduced")["name"].to_pylist()
    job.close()
    following.look()
    assert_as_merged_at_once(tmp_path, rows=20)


def test_a_job_that_was_killed_is_finished_on_demand(tmp_path: Path) -> None:
    Job(tmp_path).write(range(8))
    following = Following(tmp_path)
    following.look()
    told = following.look(finish=True)
    assert told is not None
    assert (told["not_closed"]["count"], told["steps"]["ranges"]) == (2, [[0, 7, 1]])
    assert_as_merged_at_once(tmp_path)


def test_without_news_it_ends_and_says_how_to_continue(tmp_path: Path) -> None:
    Job(tmp_path).write(range(8))
    wanted, said = Wanted(tmp_path, tmp_path / "followed"), []
    with pytest.raises(UnfinishedError, match=r"no news for .*rank 0, which has .* step 4.\nTo continue, run\n.*--follow\n"):
        follow(wanted, FollowOptions(0.01, 0.05), said.append, lambda *_: None)
    assert len(said) == 1
    assert steps_of(tmp_path / "followed") == [0, 1, 2, 3, 4]


def test_a_look_without_news_does_nothing(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(7)), Following(tmp_path)
    following.look()
    draft = tmp_path / ".followed.following" / "draft"
    draft.rename(draft.with_name("seen"))
    job.write(range(7, 9))
    following.look()
    assert not draft.exists()
    assert len(following.said) == 1


def test_a_set_that_was_opened_before_can_be_read_after_files_were_replaced(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(5)), Following(tmp_path)
    following.look()
    run, asked = open_run(tmp_path / "followed"), open_run(tmp_path / "followed")
    assert len(run.rows("actv")) == 10
    job.write(range(5, 10))
    following.look()
    assert len(run.rows("actv")) == 20
    assert run.steps["actv"] == [range(10)]
    assert asked.sql("select count(*) as n from actv")["n"].to_pylist() == [20]


def test_a_file_that_was_replaced_under_its_name_is_read_anew(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(5)), Following(tmp_path)
    following.look()
    run = open_run(tmp_path / "followed")
    assert len(run.rows("actv")) == 10
    job.write(range(5, 10))
    Following(tmp_path, "other").look()
    os.replace(tmp_path / "other/per_rank/actv_0-9.parquet", tmp_path / "followed/per_rank/actv_0-4.parquet")
    assert len(run.rows("actv")) == 20


@pytest.mark.parametrize("what", ["file", "directory", "merged"])
def test_what_is_not_followed_is_not_touched(tmp_path: Path, what: str) -> None:
    Job(tmp_path).write(range(5)).close()
    if what == "merged":
        merged(tmp_path, "followed")
    elif what == "directory":
        (tmp_path / "followed" / "mine").mkdir(parents=True)
    else:
        (tmp_path / "followed").write_text("mine")
    before = files(tmp_path)
    with pytest.raises(MergeError, match=r"followed exists\. Remove it, or name another directory"):
        Following(tmp_path)
    assert files(tmp_path) == before


def test_a_set_is_not_followed_with_other_options(tmp_path: Path) -> None:
    Job(tmp_path).write(range(5))
    Following(tmp_path).look()
    with pytest.raises(MergeError, match=r"is followed with --format parquet, not with --format csv\. Use the same options"):
        Following(tmp_path, format="csv")


def test_a_set_is_not_followed_for_another_job(tmp_path: Path) -> None:
    first = Job(tmp_path).write(range(5))
    Following(tmp_path).look()
    for one in first.ranks:
        one.directory.rename(tmp_path / f"elsewhere-{one.directory.name}")
    for rank in (0, 1):
        other = RecordedRank(tmp_path, rank, 2, job="f" * 32, suffix=f"eeeeeee{rank}")
        other.write(0, {"actv": [Measured("a")]})
        other.close()
    with pytest.raises(MergeError, match="is of job 1a2b"):
        Following(tmp_path).look()


def test_while_one_merge_writes_another_one_does_not_follow(tmp_path: Path) -> None:
    Job(tmp_path).write(range(5))
    with FileLock(tmp_path / ".followed.lock"), pytest.raises(MergeError, match="another merge"):
        follow(Wanted(tmp_path, tmp_path / "followed"), FollowOptions(), print, lambda *_: None)


def test_a_job_without_rows_leaves_nothing(tmp_path: Path) -> None:
    RecordedRank(tmp_path).close()
    result = CliRunner().invoke(app, [str(tmp_path), "--follow", "-o", str(tmp_path / "followed")])
    assert result.exit_code == 1
    assert "recorded no rows" in result.output
    assert [path for path in tmp_path.iterdir() if "followed" in path.name] == []


def test_the_command_ends_as_a_merge_does_when_all_ranks_have_ended(tmp_path: Path) -> None:
    Job(tmp_path).write(range(7)).close()
    result = CliRunner().invoke(app, [str(tmp_path), "--follow"])
    assert result.exit_code == 0, result.output
    assert_as_merged_at_once(tmp_path, "merged")


@pytest.mark.parametrize(("more", "said"), [(["--part", "1/2"], "--part and --follow"), (["-o", "memory://x"], "not to a URL")])
def test_what_cannot_be_combined_is_refused(tmp_path: Path, more: list[str], said: str) -> None:
    Job(tmp_path).write(range(7)).close()
    result = CliRunner().invoke(app, [str(tmp_path), "--follow", *more])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


# --- How far ranks have come.


def horizon(base: Path) -> Horizon:
    found = discover(base)
    return Horizon.of(runs_of(found, choose(found, None)))


@pytest.mark.parametrize(("length", "written", "expected"), [(5, 4, -1), (5, 5, 4), (5, 6, 4), (5, 10, 9), (1, 3, 2)])
def test_records_are_complete_up_to_the_one_that_is_written(tmp_path: Path, length: int, written: int, expected: int) -> None:
    Job(tmp_path, (length, length)).write(range(written))
    assert horizon(tmp_path).step == expected


def test_the_step_count_of_a_record_is_that_of_the_format_if_it_is_not_configured(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="parquet", steps_per_record=100)
    for step in range(150):
        one.write(step, {"actv": [Measured("a")]})
    one.manifest.save()
    assert horizon(tmp_path).step == 99


def test_steps_that_a_sink_has_lost_count_and_dropped_ones_do_not(tmp_path: Path) -> None:
    job = Job(tmp_path).write(range(3))
    for one in job.ranks:
        one.manifest.lost(7, "hdf5", "no space")
        one.manifest.dropped(40, "the ring was full")
        one.manifest.save()
    assert horizon(tmp_path).step == 4


def test_when_all_ranks_have_ended_there_is_no_horizon(tmp_path: Path) -> None:
    job = Job(tmp_path).write(range(3))
    job.ranks[0].close()
    assert horizon(tmp_path).step == -1
    job.ranks[1].close()
    assert horizon(tmp_path) == Horizon(NO_END)


def test_a_run_that_has_begun_and_has_no_step_leaves_the_horizon_where_it_is(tmp_path: Path) -> None:
    Job(tmp_path).write(range(12))
    for rank in (0, 1):
        RecordedRank(tmp_path, rank, 2, suffix=f"fffffff{rank}").manifest.save()
    assert horizon(tmp_path).step == 9


def test_rows_are_those_that_were_recorded(tmp_path: Path) -> None:
    job, following = Job(tmp_path).write(range(5)), Following(tmp_path)
    following.look()
    whole = open_run(tmp_path / "followed").rows("grad_reduced", per_rank=False, columns=["step", "norm"])
    expected = [np.linalg.norm(VALUES) * (step + 1) for step in range(5)]
    assert whole["norm"].to_pylist() == pytest.approx(expected)
    job.close()
