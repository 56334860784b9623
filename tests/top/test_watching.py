"""What ``trainermon top`` finds in the files of ranks, and how it says so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hanging import until
from recorded_job import FORMATS, JOB, RecordedRank
from rich.console import Console
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.coordinator.output import write_whole
from monitor.coordinator.progress import PROGRESS_FILE, ProgressRecord
from monitor.merge.execution import NothingRecordedError
from monitor.report.history import WARM_UP
from monitor.stats.partials import COUNT, SUM, SUMSQ
from monitor.top.cli import app, for_programs, screen
from monitor.top.watching import ENDED, RUNNING, SILENT, UNKNOWN, WAITING, SignOfLife, Watch

NOW = 1_000_000.0


def living(one: RecordedRank, saved: float, **changed: object) -> None:
    """Write a sign of life as the rank's own thread would."""
    given = {
        "schema_version": 1,
        "job_id": JOB,
        "saved": saved,
        "every": 2.0,
        "elapsed": 100.0,
        "step": 7,
        "idle": 0.5,
        "rate": 2.0,
        "recorded": 7,
        "written": 8,
        "dropped": 0,
        "failures": 0,
        "writer_seconds": 1.5,
    }
    write_whole(one.directory / PROGRESS_FILE, ProgressRecord.model_validate(given | changed).model_dump_json().encode())


@pytest.fixture
def open_ranks() -> Iterator[ExitStack]:
    """Closes ranks at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.top.watching.time.time", lambda: NOW)


def ranks_of(base: Path, stack: ExitStack, count: int, world_size: int | None = None) -> list[RecordedRank]:
    made = [RecordedRank(base, rank, world_size or count) for rank in range(count)]
    for one in made:
        stack.callback(one.close)
        one.write(0, {"grad_reduced": [Measured("w")]})
        one.manifest.save()
    return made


def printed(look: object) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(look))  # type: ignore[arg-type]
    console.file.close()
    return console.export_text()


def test_a_rank_is_silent_when_its_signs_stay_away_and_waits_when_its_step_stays(tmp_path: Path, open_ranks: ExitStack) -> None:
    running, waiting, silent, unknown = ranks_of(tmp_path, open_ranks, 4)
    living(running, NOW - 1)
    living(waiting, NOW - 1, idle=60.0)
    living(silent, NOW - 6.5)
    look = Watch(tmp_path).look()
    assert [one.state for one in look.ranks] == [RUNNING, WAITING, SILENT, UNKNOWN]
    assert look.ranks[2].silent_s == 6.5
    assert not look.is_well
    text = printed(look)
    assert "1 silent, 1 waiting, 1 unknown, 1 running" in text
    assert max(map(len, text.splitlines())) <= 80
    unknown.close()
    assert [one.state for one in Watch(tmp_path).look().ranks][3] == ENDED


def test_a_job_whose_ranks_all_wait_for_a_minute_is_not_well(tmp_path: Path, open_ranks: ExitStack) -> None:
    ranks = ranks_of(tmp_path, open_ranks, 2)
    for still, well in ((30.0, True), (90.0, False)):
        for one in ranks:
            living(one, NOW, idle=still)
        look = Watch(tmp_path).look()
        assert (look.stands_still_s, look.is_well) == (still, well)
        assert f"no rank has ended a step for {still:.0f} s" in printed(look)
    living(ranks[0], NOW)
    assert Watch(tmp_path).look().stands_still_s is None


def test_what_could_not_be_looked_at_is_said_and_not_well(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    living(one, NOW)
    (one.directory / "actv_0-4.csv").write_text("no rows")
    look = Watch(tmp_path).look()
    assert not look.is_well
    assert "not looked at: actv_0-4.csv was not read" in printed(look)


def test_the_sign_of_an_earlier_job_in_the_same_directory_does_not_count(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    living(one, NOW - 1, job_id="0" * 32)
    assert Watch(tmp_path).look().ranks[0].state == UNKNOWN


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema_version": 99}', b"\xff" * 5000])
def test_a_damaged_sign_is_none(tmp_path: Path, open_ranks: ExitStack, damage: bytes) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    (one.directory / PROGRESS_FILE).write_bytes(damage)
    assert Watch(tmp_path).look().ranks[0].state == UNKNOWN


def test_clocks_that_differ_do_not_make_a_rank_silent_once_a_sign_was_seen_to_come() -> None:
    seen = SignOfLife()
    assert seen.age(100.0, 3700.0) == 3600.0
    assert seen.age(102.0, 3702.5) == 0.0
    assert seen.age(102.0, 3709.0) == pytest.approx(6.5)
    assert SignOfLife().age(100.0, 90.0) == 0.0


def test_the_slowest_rank_is_behind_and_not_only_seen_earlier(tmp_path: Path, open_ranks: ExitStack) -> None:
    first, second, third = ranks_of(tmp_path, open_ranks, 3)
    for one in (first, second, third):
        living(one, NOW, step=100, rate=5.0)
    living(second, NOW - 2, step=91, rate=5.0)
    assert Watch(tmp_path).look().slowest is None
    living(third, NOW, step=80, rate=5.0)
    assert Watch(tmp_path).look().slowest == 2


def test_ranks_without_a_directory_and_dropped_steps_are_said(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1, world_size=3)
    living(one, NOW, dropped=4, failures=2)
    look = Watch(tmp_path).look()
    assert not look.is_well
    text = printed(look)
    assert "2 ranks have no directory here yet" in text
    assert "dropped 4 steps, 2 failures of the monitor; the writer thread takes 1.5% of a" in text


def test_one_of_a_thing_is_said_in_the_singular(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1, world_size=2)
    living(one, NOW, dropped=1, failures=1)
    text = printed(Watch(tmp_path).look())
    assert "1 of 2 ranks: " in text
    assert "1 rank has no directory here yet" in text
    assert "dropped 1 step, 1 failure of the monitor; " in text


@pytest.mark.parametrize("form", FORMATS)
def test_a_tensor_far_from_its_own_history_is_named_with_its_rank_and_step(
    tmp_path: Path, open_ranks: ExitStack, form: str
) -> None:
    ranks = [RecordedRank(tmp_path, rank, 2, form, steps_per_record=1 if form == "csv" else 100) for rank in range(2)]
    watch = None
    for step in range(WARM_UP + 4):
        for rank, one in enumerate(ranks):
            off = 1e6 if (rank, step) == (1, WARM_UP + 2) else 1.0
            steady = [Measured("steady", [1.0 + step % 2]), Measured("w", [off])]
            one.write(step, {"grad_reduced": steady})
            one.flush()
            one.manifest.save()
            living(one, NOW, recorded=step, step=step)
        if step in (WARM_UP, WARM_UP + 2):
            watch = watch or Watch(tmp_path)
            watch._paced_rows._next = 0.0
            look = watch.look()
    (found,) = look.unusual
    assert (found.kind, found.name, found.rank, found.step, found.value) == ("grad_reduced", "w", 1, WARM_UP + 2, 1e6)
    assert found.typical == pytest.approx(1.0, rel=1e-4)
    assert look.is_well
    assert look.rows_of == [0, 1]
    for one in ranks:
        open_ranks.callback(one.close)


@pytest.mark.parametrize("elements", [1, 2])
@pytest.mark.parametrize("form", ["hdf5", "parquet"])
def test_a_tensor_of_few_elements_that_comes_near_zero_is_not_unusual(
    tmp_path: Path, open_ranks: ExitStack, form: str, elements: int
) -> None:
    """Its norm is small there, and the ratio of its update to it is large. Neither says anything."""
    one = RecordedRank(tmp_path, format=form)
    open_ranks.callback(one.close)
    for step in range(WARM_UP + 4):
        weight = 1e-6 if step == WARM_UP + 2 else 1.0
        ratio = Measured("gate", numbers={COUNT: float(elements), SUM: 1e-6, SUMSQ: elements * weight**2})
        one.write(step, {"param_origin": [Measured("gate", [weight] * elements)], "update_ratio": [ratio]})
    one.flush()
    one.manifest.save()
    living(one, NOW, recorded=WARM_UP + 3)
    assert Watch(tmp_path).look().unusual == []


def test_rows_that_come_late_are_judged_too(tmp_path: Path, open_ranks: ExitStack) -> None:
    """Of a rank that is behind, and of CSV whose record of several steps becomes a file when it is complete."""
    ahead, behind = (RecordedRank(tmp_path, rank, 2, "csv", steps_per_record=5) for rank in range(2))
    for one in (ahead, behind):
        open_ranks.callback(one.close)
    watch = None
    for step in range(11):
        ahead.write(step, {"grad_reduced": [Measured("w")]})
        if step >= 3:
            behind.write(step - 3, {"grad_reduced": [Measured("w", [math.inf if step == 7 else 1.0])]})
        for one in (ahead, behind):
            one.manifest.save()
            living(one, NOW, recorded=step, step=step)
        watch = watch or Watch(tmp_path)
        watch._paced_rows._next = 0.0
        look = watch.look()
        found = [(each.rank, each.step, each.value) for each in look.unusual]
        assert found == ([(1, 4, math.inf)] if step >= 7 else [])


def test_a_nan_is_unusual_without_a_history_and_programs_get_it_as_text(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    one.write(1, {"grad_reduced": [Measured("w", [math.nan, 1.0])]})
    living(one, NOW, recorded=1, step=1)
    look = Watch(tmp_path).look()
    assert [(each.name, each.step) for each in look.unusual] == [("w", 1)]
    assert not look.is_well
    told = json.loads(json.dumps(for_programs(look), allow_nan=False))
    assert (told["unusual"][0]["value"], told["well"]) == ("nan", False)


def test_a_mask_that_a_module_is_given_is_not_unusual_but_an_output_of_the_same_numbers_is(
    tmp_path: Path, open_ranks: ExitStack
) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    one.write(1, {"actv": [Measured(f"attention.{slot}", [0.0, -math.inf], 0) for slot in ("input_mask", "output")]})
    living(one, NOW, recorded=1, step=1)
    assert [each.name for each in Watch(tmp_path).look().unusual] == ["attention.output"]


def test_names_that_would_move_the_cursor_are_escaped(tmp_path: Path, open_ranks: ExitStack) -> None:
    (one,) = ranks_of(tmp_path, open_ranks, 1)
    one.write(1, {"grad_reduced": [Measured("\x1b[2J[red]w", [math.nan])]})
    living(one, NOW, recorded=1, step=1)
    text = printed(Watch(tmp_path).look())
    assert r"\x1b[2J[red]w" in text
    assert "\x1b[2J" not in text


def test_before_the_first_directory_there_is_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(NothingRecordedError, match="has no directory of a rank"):
        Watch(tmp_path)
    for options in ([], ["--once"], ["--json"]):
        ended = CliRunner().invoke(app, [str(tmp_path), *options])
        assert ended.exit_code == 2
        assert "There is nothing to show" in ended.stderr
    assert CliRunner().invoke(app, [str(tmp_path / "absent"), "--once"]).exit_code == 2


def test_of_a_thousand_ranks_the_silent_and_the_slowest_are_listed(tmp_path: Path, open_ranks: ExitStack) -> None:
    ranks = ranks_of(tmp_path, open_ranks, 40)
    for one in ranks:
        living(one, NOW)
    living(ranks[17], NOW - 99)
    look = Watch(tmp_path).look()
    text = printed(look)
    assert len(text.splitlines()) < 40
    assert "and 28 more" in text
    assert "silent: rank 17" in text
    assert len(look.rows_of) == 16


def test_the_sign_of_life_of_a_rank_is_its_own_thread_s_and_gone_when_it_closes(tmp_path: Path) -> None:
    one, step = RecordedRank(tmp_path), [1]
    one.write(0, {"grad_reduced": [Measured("w")]})
    one.manifest.watch_steps(lambda: step[0])
    path = one.directory / PROGRESS_FILE
    assert until(path.exists, 60)
    told = ProgressRecord.model_validate_json(path.read_bytes())
    assert (told.job_id, told.step, told.recorded, told.written) == (JOB, 0, 0, 1)
    one.close()
    assert not path.exists()


def test_the_loss_of_the_last_rank_is_seen_however_many_ranks_there_are(tmp_path: Path, open_ranks: ExitStack) -> None:
    ranks = ranks_of(tmp_path, open_ranks, 20)
    for one in ranks:
        living(one, NOW - 1)
    ranks[-1].write(1, {"run": [Measured("loss", numbers={COUNT: 1.0, SUM: math.nan})]})
    ranks[-1].flush()
    look = Watch(tmp_path).look()
    assert (len(look.rows_of), look.rows_of[0], look.rows_of[-1]) == (16, 0, 19)
    assert math.isnan(look.numbers["loss"].value)
    assert not look.is_well


@pytest.mark.parametrize(
    ("ops", "element", "seen", "note"),
    [
        (("norm",), -math.inf, "inf", ""),
        (("min", "mean"), -math.inf, "-inf", ""),
        (("min", "max"), -math.inf, "-inf", ""),
        (("nans", "infs"), math.inf, "inf", ""),
        (("nans",), math.nan, "nan", "NaN and infinity in grad_reduced: nans does not show all"),
        (("max",), 1.0, "", "NaN and infinity in grad_reduced: max does not show all"),
        (("zeros",), math.nan, "", "rows of grad_reduced have no op that is judged"),
    ],
)
def test_what_no_op_shows_is_said_and_not_well(
    ops: tuple[str, ...], element: float, seen: str, note: str, tmp_path: Path, open_ranks: ExitStack
) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=ops, steps_per_record=1)
    open_ranks.callback(one.close)
    for step in range(3):
        one.write(step, {"grad_reduced": [Measured("w", [1.0, element if step == 1 else 1.0])]})
    one.manifest.save()
    living(one, NOW - 1, recorded=2)
    look = Watch(tmp_path).look()
    assert not look.is_well
    assert [str(each.value) for each in look.unusual] == ([seen] if seen else [])
    assert look.notes == ([note] if note else [])


@pytest.mark.parametrize("form", FORMATS)
def test_shares_of_equal_signs_leave_nothing_unseen(form: str, tmp_path: Path, open_ranks: ExitStack) -> None:
    one = RecordedRank(tmp_path, format=form, ops=("norm",), steps_per_record=1)
    open_ranks.callback(one.close)
    for step in range(3):
        share = Measured("w", numbers={COUNT: 4.0, SUM: 2.0})
        one.write(step, {"grad_reduced": [Measured("w")], "mg_direction": [share]})
    one.flush()
    one.manifest.save()
    living(one, NOW - 1, recorded=2)
    look = Watch(tmp_path).look()
    assert (look.notes, look.is_well) == ([], True)


def test_a_rank_whose_directory_is_deleted_is_said_and_the_others_are_shown(tmp_path: Path, open_ranks: ExitStack) -> None:
    ranks = ranks_of(tmp_path, open_ranks, 2)
    for one in ranks:
        living(one, NOW - 1)
    watch = Watch(tmp_path)
    moved = ranks[1].directory.rename(tmp_path / "elsewhere")
    look = watch.look()
    assert ([one.rank for one in look.ranks], look.is_well) == ([0], False)
    assert any(one.startswith("rank 1: ") for one in look.notes)
    kept = ranks[0].directory.rename(tmp_path / "elsewhere-too")
    with pytest.raises(NothingRecordedError):
        watch.look()
    moved.rename(ranks[1].directory)
    kept.rename(ranks[0].directory)
    assert watch.look().is_well
