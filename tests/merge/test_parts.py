"""Merges in parts: any split gives the same bytes, and what is missing is named."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
from evidence import sampled
from hanging import until
from recorded_job import FORMATS, RecordedRank, files, merged, sharded
from sink_rows import Measured
from typer.testing import CliRunner

from monitor import open_run
from monitor.merge import finished, merge
from monitor.merge.cli import app
from monitor.merge.execution import MergeError, NothingRecordedError
from monitor.merge.merge import Wanted, Window
from monitor.merge.parts import DoneWindows, Part, finish, merge_part, parts_of
from monitor.series import Placement, Shard
from monitor.sinks.files import StepSpan

SPAWN = multiprocessing.get_context("spawn")
SOON = 60.0
ROWS = 3
"""Of a piece, so that there are many windows."""


def wanted(base: Path, output: Path | str | None = None, **options: Any) -> Wanted:
    return Wanted(base, output or base / "merged", **{"rows": ROWS, **options})


def do(request: Wanted, part: str) -> DoneWindows:
    return merge_part(request, Part.parse(part), lambda _done, _all: None)


def in_parts(request: Wanted, count: int) -> dict[str, Any]:
    """The last part first: their order must not matter."""
    for number in range(count, 0, -1):
        do(request, f"{number}/{count}")
    return finish(request)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    sharded(tmp_path, steps=20)
    return tmp_path


def window(rows: float, first: int = 0) -> Window:
    return Window("actv", StepSpan(first, first), (StepSpan(first, first),), rows=rows)


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what one merge makes of it."""
    base = tmp_path_factory.mktemp("job")
    sharded(base, request.param, steps=8)
    merged(base, rows=ROWS)
    return base


@pytest.mark.parametrize(
    ("recorded", "count"), sampled(list(product(FORMATS, range(1, 8))), 0, 2, 6, 8, 17), indirect=["recorded"]
)
def test_any_split_gives_the_bytes_of_one_merge(recorded: Path, tmp_path: Path, count: int) -> None:
    in_parts(wanted(recorded, tmp_path / "parts"), count)
    assert files(tmp_path / "parts") == files(recorded / "merged")
    assert len(files(tmp_path / "parts")) > 10
    assert {path.name for path in tmp_path.iterdir()} == {"parts"}


@pytest.mark.parametrize("format", ["hdf5", "csv"])
def test_every_format_can_be_written_in_parts(job: Path, format: str) -> None:  # noqa: A002
    in_parts(wanted(job, job / "parts", format=format), 3)
    merged(job, rows=ROWS, format=format)
    assert files(job / "parts") == files(job / "merged")


FLAWS = {
    *("duplicate_steps", "gaps", "set_aside", "disagreements", "incomplete", "without_global"),
    *("unplaced", "not_combined", "not_closed"),
}


def test_the_report_of_a_flawed_job_is_the_same(tmp_path: Path) -> None:
    everyone = range(4)
    for rank in everyone:
        one = RecordedRank(tmp_path, rank, 5, ["hdf5", "csv"] if rank else "csv", ops=("norm", "min"))
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1, 2, 3, 4), (15,), (3 * rank,))))
        one.place("grad_reduced", "b", Placement(unclaimed=tuple(everyone)))
        one.place("grad_reduced", "t", Placement(partial=True))
        for step in range(12):
            value = math.nan if (rank, step) == (2, 3) else 1.0 + (rank == 3)
            tensors = [Measured("w", [1.0, 2.0, 3.0]), Measured("b", [value]), Measured("t", [1.0])]
            one.write(step, {"grad_reduced": tensors})
        one.close()
    (rank1,), (rank2,), (rank3,) = (tmp_path.glob(f"*rank{rank}*") for rank in (1, 2, 3))
    shutil.copy(rank1 / "metrics_0-4.h5", rank1 / "metrics_0-3.h5")
    for name in ("metrics_5-9.h5", "grad_reduced_5-9.csv"):
        (rank2 / name).write_text("no rows")
    known = json.loads((rank3 / "manifest.json").read_text())
    known["series"] = None
    known["closed"] = False
    (rank3 / "manifest.json").write_text(json.dumps(known))
    told = merged(tmp_path, rows=ROWS).told()
    assert FLAWS - {what for what, found in told.items() if isinstance(found, dict) and found.get("count")} == set()
    assert in_parts(wanted(tmp_path, tmp_path / "parts"), 4) == told
    assert files(tmp_path / "parts") == files(tmp_path / "merged")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_every_window_is_in_one_part_and_parts_have_about_as_many_rows(count: int) -> None:
    windows = [window(100 + number % 7) for number in range(40)]
    numbers = parts_of(windows, count)
    assert numbers == sorted(numbers)
    assert {*numbers} <= {*range(1, count + 1)}
    rows = [sum(one.rows for one, number in zip(windows, numbers, strict=True) if number == part) for part in {*numbers}]
    assert max(rows) - min(rows) <= 2 * 106


def test_windows_without_rows_are_in_parts_too() -> None:
    assert parts_of([window(0.0)] * 4, 2) == [1, 1, 2, 2]
    assert parts_of([], 3) == []


@pytest.mark.parametrize("given", ["0/8", "9/8", "1/0", "8", "", "1/8/2", "-1/8", "1 /8", "a/b", "1/9999999"])
def test_a_part_that_there_cannot_be_is_refused_with_what_to_write(job: Path, given: str) -> None:
    result = CliRunner().invoke(app, [str(job), "--part", given], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert f"--part is {given!r}. Write I/N: parts count from 1" in result.output
    assert '--part "$((JOB_COMPLETION_INDEX + 1))/8"' in result.output


def test_a_part_that_is_done_is_not_done_again(job: Path) -> None:
    first = do(wanted(job), "1/3")
    assert (first.all > 1, first.before) == (True, 0)
    written = {path: path.stat().st_mtime_ns for path in (job / ".merged.parts").rglob("*.parquet")}
    assert do(wanted(job), "1/3") == DoneWindows(first.all, first.all)
    assert {path: path.stat().st_mtime_ns for path in (job / ".merged.parts").rglob("*.parquet")} == written


def killed_before_its_end(base: Path) -> None:
    """When the first of its windows have their records, and the others are not in their place."""

    def die(done: int, every: int) -> None:
        if done == every and until(lambda: any((base / ".merged.parts" / ".done").glob("*.json")), SOON):
            os.kill(os.getpid(), signal.SIGKILL)

    merge_part(wanted(base), Part(1, 1), die)


def test_a_part_that_is_killed_continues_when_it_is_run_again(job: Path) -> None:
    process = SPAWN.Process(target=killed_before_its_end, args=(job,))
    process.start()
    process.join(SOON)
    assert process.exitcode == -signal.SIGKILL
    done = do(wanted(job), "1/1")
    assert 0 < done.before < done.all
    finish(wanted(job))
    assert files(job / "merged") == files_of_one_merge(job)


def test_a_part_that_runs_twice_at_the_same_time_does_no_harm(job: Path) -> None:
    processes = [SPAWN.Process(target=do, args=(wanted(job), "1/1")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SOON)
    assert [process.exitcode for process in processes] == [0, 0]
    finish(wanted(job))
    assert files(job / "merged") == files_of_one_merge(job)


def test_parts_of_another_split_are_used(job: Path) -> None:
    done = do(wanted(job), "1/2")
    assert do(wanted(job), "1/1").before == done.all
    finish(wanted(job))
    assert files(job / "merged") == files_of_one_merge(job)


def test_until_it_is_finished_nothing_has_the_name_and_what_is_missing_is_named_with_the_commands(job: Path) -> None:
    for number in (1, 3):
        do(wanted(job, steps=StepSpan(0, 15)), f"{number}/4")
    with pytest.raises(MergeError) as error:
        finish(wanted(job, steps=StepSpan(0, 15)))
    said = str(error.value).splitlines()
    assert "ranges of steps are not done: grad_reduced from step " in said[0]
    assert said[1] == "They are of parts 2, 4 of 4. What is done stays. Run, then --finish again:"
    command = f"trainermon merge {job} -o {job / 'merged'} --steps 0:15 --format parquet --part"
    assert said[2:] == [f"  {command} 2/4", f"  {command} 4/4"]
    assert not (job / "merged").exists()
    for line in said[2:]:
        do(wanted(job, steps=StepSpan(0, 15)), line.split()[-1])
    assert finish(wanted(job, steps=StepSpan(0, 15)))["clean"]


def test_without_any_part_finish_says_how_to_begin(job: Path) -> None:
    with pytest.raises(MergeError, match=r"has no part yet\. Run every part.*\n  trainermon merge .* --part 1/1"):
        finish(wanted(job))


def test_windows_whose_files_have_changed_since_are_named_and_done_again(job: Path) -> None:
    in_all = do(wanted(job), "1/1").all
    (changed,) = job.glob("*rank1*/metrics_0-4.h5")
    os.utime(changed)
    with pytest.raises(MergeError, match="of these were made from files that have changed since"):
        finish(wanted(job))
    again = do(wanted(job), "1/1")
    assert 0 < again.before < again.all == in_all
    assert finish(wanted(job))["clean"]


def test_files_that_no_window_has_any_more_do_not_get_into_the_data_set(tmp_path: Path) -> None:
    sharded(tmp_path / "short", steps=7)
    sharded(tmp_path / "long", steps=12)
    (tmp_path / "now").symlink_to("short")
    do(wanted(tmp_path / "now", tmp_path / "parts"), "1/1")
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("long")
    before = {path.name for path in (tmp_path / ".parts.parts" / "per_rank").iterdir()}
    with pytest.raises(MergeError, match="are not done"):
        finish(wanted(tmp_path / "now", tmp_path / "parts"))
    in_parts(wanted(tmp_path / "now", tmp_path / "parts"), 2)
    merged(tmp_path / "long", rows=ROWS)
    assert files(tmp_path / "parts") == files(tmp_path / "long" / "merged")
    assert before - {path.name for path in (tmp_path / "parts" / "per_rank").iterdir()}


def test_a_file_that_is_gone_is_written_again(job: Path) -> None:
    do(wanted(job), "1/1")
    next((job / ".merged.parts" / "global").iterdir()).unlink()
    with pytest.raises(MergeError, match=r"1 of .* ranges of steps are not done"):
        finish(wanted(job))
    in_parts(wanted(job), 2)
    assert files(job / "merged") == files_of_one_merge(job)


def test_records_that_are_damaged_or_foreign_count_as_not_done(job: Path) -> None:
    do(wanted(job), "1/1")
    first, second, third, *_ = sorted((job / ".merged.parts" / ".done").glob("*.json"))
    first.write_bytes(b"\xff{")
    second.write_text("[" * 100_000)
    content = third.read_bytes()
    third.unlink()
    (job / "elsewhere").write_bytes(content)
    third.symlink_to(job / "elsewhere")
    os.mkfifo(job / ".merged.parts" / ".done" / "grad_reduced_0-999.json")
    with pytest.raises(MergeError, match=r"3 of .* ranges of steps are not done"):
        finish(wanted(job))
    in_parts(wanted(job), 2)
    assert files(job / "merged") == files_of_one_merge(job)


def test_parts_with_other_options_are_refused_and_the_difference_is_named(job: Path) -> None:
    do(wanted(job), "1/2")
    with pytest.raises(MergeError, match="has parts with --format parquet, and this one has --format csv"):
        do(wanted(job, format="csv"), "2/2")
    with pytest.raises(MergeError, match="The parts have no --kinds, and --finish has --kinds grad_reduced"):
        finish(wanted(job, kinds=["grad_reduced"]))
    with pytest.raises(MergeError, match="has parts with no --steps, and this one has --steps 3:"):
        do(wanted(job, steps=StepSpan(3, 2**63 - 1)), "2/2")


def test_where_something_stands_no_part_begins(job: Path) -> None:
    merged(job)
    with pytest.raises(MergeError, match=r"merged exists\. Remove it, or name another output"):
        do(wanted(job), "1/2")
    (job / "here").mkdir()
    (job / ".there.parts").symlink_to(job / "here")
    with pytest.raises(MergeError, match=r"\.there\.parts is not a directory"):
        do(wanted(job, job / "there"), "1/2")


def test_finish_may_be_repeated_also_after_it_was_interrupted(job: Path) -> None:
    told = in_parts(wanted(job), 2)
    (job / "merged" / ".done").mkdir()  # as of a kill just before the end
    assert finish(wanted(job)) == told
    assert {path.name for path in (job / "merged").iterdir()} == {"per_rank", "global", "report.json"}


def test_what_killed_parts_have_left_is_not_in_the_data_set(job: Path) -> None:
    do(wanted(job), "1/1")
    (job / ".merged.parts" / ".work-abc").mkdir()
    (job / ".merged.parts" / "per_rank" / ".grad_reduced_0-9.parquet.77.part").write_text("half")
    finish(wanted(job))
    assert files(job / "merged") == files_of_one_merge(job)


def test_a_part_without_windows_is_done(tmp_path: Path) -> None:
    sharded(tmp_path, steps=1)
    assert [do(wanted(tmp_path, rows=1000), f"{number}/3").all for number in (1, 2, 3)] == [0, 1, 0]
    assert finish(wanted(tmp_path, rows=1000))["clean"]


def test_a_job_without_rows_leaves_nothing(tmp_path: Path) -> None:
    sharded(tmp_path, steps=0)
    do(wanted(tmp_path), "1/1")
    with pytest.raises(NothingRecordedError):
        finish(wanted(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".parts")] == []


def test_the_commands_of_an_array_end_with_0_and_the_last_one_as_a_merge_does(tmp_path: Path) -> None:
    sharded(tmp_path, steps=3)
    (rank1,) = tmp_path.glob("*rank1*")
    (rank1 / "metrics_0-4.h5").unlink()
    for part in ("1/2", "2/2"):
        result = CliRunner().invoke(app, [str(tmp_path), "--part", part])
        assert result.exit_code == 0, result.output
        assert f"Part {part} is done." in result.output
    result = CliRunner().invoke(app, [str(tmp_path), "--finish"])
    assert result.exit_code == 1
    assert "written to" in result.output
    assert CliRunner().invoke(app, [str(tmp_path), "--finish", "--part", "1/2"]).exit_code == 2


def test_directories_of_ranks_behind_a_url_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["s3://bucket/output", "-o", str(tmp_path / "merged")], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "DIR is a URL" in result.output


# --- Behind a URL.


@pytest.fixture
def url(tmp_path: Path) -> str:
    """In the memory of this process."""
    return f"memory://{tmp_path.name}/merged"


def test_a_data_set_behind_a_url_has_the_bytes_of_a_local_one_and_can_be_read(job: Path, url: str) -> None:
    for part in ("1/2", "2/2"):
        do(wanted(job, url), part)
        assert "report.json" not in stored(url)
    finish(wanted(job, url))
    merged(job, rows=ROWS)
    assert stored(url) == files(job / "merged")
    here, there = open_run(job / "merged"), open_run(url)
    assert there.rows("grad_reduced").equals(here.rows("grad_reduced"))
    with pytest.raises(MergeError, match="is a finished data set"):
        do(wanted(job, url), "1/2")


def test_one_command_merges_to_a_url(job: Path, url: str) -> None:
    result = CliRunner().invoke(app, [str(job), "-o", url], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert f"written to {url}" in result.output
    merged(job)
    assert stored(url) == files(job / "merged")


def test_behind_a_url_finish_may_be_repeated_also_after_it_was_interrupted(job: Path, url: str) -> None:
    do(wanted(job, f"{url}/"), "1/1")
    records = {name: content for name, content in stored(url).items() if name.startswith(".done/")}
    told = finish(wanted(job, url))
    whole = stored(url)
    for name in ("request", "grad_reduced_0-0.json"):
        fsspec.filesystem("memory").pipe(f"{url.removeprefix('memory:/')}/.done/{name}", b"left by a kill just before the end")
    assert records
    assert finish(wanted(job, url)) == told
    assert stored(url) == whole == files_of_one_merge(job)


def test_what_is_not_ours_is_not_touched(job: Path, url: str) -> None:
    files_there = fsspec.filesystem("memory")
    place = url.removeprefix("memory:/")
    files_there.pipe(f"{place}/per_rank/grad_reduced_0-9.parquet", b"not ours")
    with pytest.raises(MergeError, match="contains per_rank, which is not of a merge in parts"):
        do(wanted(job, url), "1/1")
    files_there.rm(place, recursive=True)
    do(wanted(job, url), "1/1")
    files_there.pipe({f"{place}/.done/grad_reduced_5-9.json/x": b"", f"{place}/per_rank/notes.txt": b"mine"})
    files_there.pipe(f"{place}/per_rank/grad_reduced_90-99.parquet", b"not of a window")
    finish(wanted(job, url))
    merged(job, rows=ROWS)
    assert stored(url) == files(job / "merged") | {"per_rank/notes.txt": b"mine"}


def test_a_url_of_a_package_that_is_missing_is_refused(job: Path) -> None:
    with pytest.raises(MergeError, match="cannot be opened"):
        do(wanted(job, "nowhere://bucket/merged"), "1/1")


def test_passwords_in_urls_are_not_shown(job: Path) -> None:
    with pytest.raises(MergeError) as error:
        do(wanted(job, "nowhere://me:secret@host/merged"), "1/1")
    assert "secret" not in str(error.value)


def files_of_one_merge(job: Path) -> dict[str, bytes]:
    merged(job, "whole", rows=ROWS)
    return files(job / "whole")


def stored(url: str) -> dict[str, bytes]:
    files_there, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): files_there.cat_file(path) for path in files_there.find(root)}


def test_the_rows_of_a_piece_are_those_of_every_merge() -> None:
    assert Wanted(Path(), Path()).rows == merge.PIECE_ROWS
    assert finished.PATIENCE == 60.0
