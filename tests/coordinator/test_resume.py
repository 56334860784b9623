import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from monitor.coordinator import output
from monitor.coordinator.manifest import MOST_EARLIER_RUNS, Earlier, Manifest, RankFacts, Timeline
from monitor.coordinator.manifest_format import KILLED, ManifestRecord, RecordedModel, newest_step, read_manifest
from monitor.coordinator.output import JobIdentity, lock_directory, remove_drafts, write_whole
from monitor.coordinator.resume import RestartedRun, directories, last_manifest, preferred, resolve_rank_directory
from monitor.failures import Failures
from monitor.series import Series, SeriesTable
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

ROOT = Path(__file__).parents[2]
WINTER = ("Dec31_23-00-00", "Jan01_01-00-00")


def made(base, *names):
    for name in names:
        (base / name).mkdir(parents=True)


def names(paths):
    return [path.name for path in paths]


class Rank:
    """A run that records to a directory, and what it says of it."""

    def __init__(self, directory, number=1, earlier=None, recording=0, held=None, watched=None):
        identity = JobIdentity(f"{number:032x}", f"Dec03_21-34-{number % 60:02}")
        facts = RankFacts(identity, 0, 1, {}, {}, {}, "config.json", ["csv"], recording=recording, watched=watched)
        self.failures = Failures()
        self.table = SeriesTable()
        self.manifest = Manifest(directory, facts, self.table, self.failures, earlier, held)
        self.directory = directory

    def write(self, *steps, names=("w",), status="complete"):
        index = np.array([self.table.index_of(Series("grad_reduced", 0, name)) for name in names])
        nothing = np.zeros_like(index)
        rows = KindRows(index, nothing, nothing, nothing, Partials(np.zeros((len(COLUMNS), len(names)))))
        for step in steps:
            self.manifest.written(StepRows(step, ("norm",), {"grad_reduced": rows}, [TensorLayout((2,), "f")], status))

    def saved(self):
        self.manifest.save()
        return read_manifest(self.directory / "manifest.json")


def listed(steps):
    return list(steps.steps())


def resumed(rank, number=2):
    """The run that comes after ``rank``, which has been killed."""
    return Rank(rank.directory, number, Earlier.of(rank.saved()))


class TestDirectories:
    def test_both_ends_of_the_range_are_in_it(self, tmp_path):
        within = [f"Dec03_21-34-4{second}-rank0-1a2b3c4d" for second in (0, 1, 2)]
        made(tmp_path, *within, "Dec03_21-34-39-rank0-1a2b3c4d", "Dec03_21-34-43-rank0-1a2b3c4d")
        assert names(directories(tmp_path, 0, ("Dec03_21-34-40", "Dec03_21-34-42"))) == within[::-1]

    def test_a_range_that_ends_before_it_begins_goes_around_new_year_and_january_is_the_newer(self, tmp_path):
        within = ["Dec31_23-00-00-rank0-1a2b3c4d", "Dec31_23-59-59-rank0-1a2b3c4d", "Jan01_01-00-00-rank0-1a2b3c4d"]
        made(
            tmp_path, *within, "Jan01_01-00-01-rank0-1a2b3c4d", "Dec31_22-59-59-rank0-1a2b3c4d", "Jul01_00-00-00-rank0-1a2b3c4d"
        )
        assert names(directories(tmp_path, 0, WINTER)) == within[::-1]

    def test_months_are_in_the_order_of_the_year(self, tmp_path):
        made(tmp_path, *(f"{month}01_00-00-00-rank0-1a2b3c4d" for month in ("Apr", "Aug", "Feb")))
        found = directories(tmp_path, 0, ("Jan01_00-00-00", "Dec31_23-59-59"))
        assert [name[:3] for name in names(found)] == ["Aug", "Apr", "Feb"]

    def test_other_ranks_files_and_whatever_else_lies_there_are_passed_over(self, tmp_path):
        made(tmp_path, "Jan01_00-00-00-rank1-1a2b3c4d", "Jan01_00-00-00-rank10-1a2b3c4d", "Jan01_00-00-00-rank1-xyz", "rank1")
        (tmp_path / "Jan01_00-00-00-rank1-ffffffff").write_text("")
        assert names(directories(tmp_path, 1, WINTER)) == ["Jan01_00-00-00-rank1-1a2b3c4d"]

    def test_of_one_second_that_which_was_begun_last_is_the_newest(self, tmp_path):
        made(tmp_path, *(f"Jan01_00-00-00-rank0-{letter * 8}" for letter in "abc"))
        for letter, started in (("a", "2026-01-01T00:00:02+00:00"), ("b", "2026-01-01T01:00:01+01:00")):
            directory = tmp_path / f"Jan01_00-00-00-rank0-{letter * 8}"
            Rank(directory).manifest.save()
            fields = json.loads((directory / "manifest.json").read_text()) | {"started": started}
            (directory / "manifest.json").write_text(json.dumps(fields))
        os.utime(tmp_path / "Jan01_00-00-00-rank0-cccccccc", (0, 0))
        assert [name[-1] for name in names(directories(tmp_path, 0, WINTER))] == ["a", "b", "c"]

    def test_a_process_with_several_recordings_finds_that_of_each(self, tmp_path):
        for number in range(3):
            Rank(tmp_path / f"{number}", recording=number).manifest.save()
        newest_first = [tmp_path / "2", tmp_path / "1", tmp_path / "0"]
        assert [preferred(newest_first, number).name for number in range(4)] == ["0", "1", "2", "2"]

    def test_a_recording_finds_that_of_what_it_watches_however_many_were_begun_before(self, tmp_path):
        watched = [
            RecordedModel("torch Teacher", "a"),
            RecordedModel("torch Network", "b"),
            RecordedModel("torch Network", "b", number=1),
        ]
        for number, one in enumerate(watched):
            Rank(tmp_path / f"{number}", recording=number, watched=one).manifest.save()
        newest_first = [tmp_path / "2", tmp_path / "1", tmp_path / "0"]
        assert [preferred(newest_first, 0, one).name for one in watched] == ["0", "1", "2"]
        assert preferred(newest_first, 1, RecordedModel("torch AdamW Teacher", "a")).name == "0"


class TestClaims:
    def test_a_directory_is_claimed_once(self, tmp_path):
        first = lock_directory(tmp_path)
        assert lock_directory(tmp_path) is None
        first.release()
        second = lock_directory(tmp_path)
        assert second is not None
        first.release()
        assert lock_directory(tmp_path) is None
        second.release()
        assert list(tmp_path.iterdir()) == []

    def test_a_process_that_is_killed_before_it_begins_leaves_the_time_of_the_one_before(self, tmp_path):
        """Some locks touch their file; those files of the first process that the recovery has yet to see would look older."""
        (tmp_path / ".lock").write_text("")
        os.utime(tmp_path / ".lock", ns=(5, 5))
        held = lock_directory(tmp_path)
        assert (held.before_ns, (tmp_path / ".lock").stat().st_mtime_ns) == (5, 5)
        held.begin()
        assert (tmp_path / ".lock").stat().st_mtime_ns > 5
        held.release()

    def test_where_there_are_no_locks_no_one_is_kept_out_and_no_file_is_left(self, tmp_path, monkeypatch):
        def no_locks(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        first, second = lock_directory(tmp_path), lock_directory(tmp_path)
        for one in (first, second):
            one.release()
        assert list(tmp_path.iterdir()) == []

    def test_a_forked_child_neither_holds_nor_releases_it(self, tmp_path):
        held = lock_directory(tmp_path)
        child = os.fork()
        if child == 0:
            held.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert lock_directory(tmp_path) is None
        held.release()

    def test_it_does_not_outlive_a_process_that_was_killed_and_tells_when_that_began(self, tmp_path):
        program = (
            "import sys, time; from pathlib import Path; from monitor.coordinator.output import lock_directory;"
            "held = lock_directory(Path(sys.argv[1])); held.begin(); print('held', flush=True); time.sleep(600)"
        )
        process = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout.readline() == "held\n"
            began = (tmp_path / ".lock").stat().st_mtime_ns
            assert lock_directory(tmp_path) is None
            process.send_signal(signal.SIGKILL)
        held = lock_directory(tmp_path)
        assert held.before_ns == began
        held.release()


class TestTimeline:
    def test_steps_before_the_one_resumed_at_stay_and_those_recorded_again_count_once(self, tmp_path):
        first = Rank(tmp_path)
        first.write(*range(10))
        second = resumed(first)
        second.write(6, 7)
        steps = second.saved().steps
        assert (listed(steps.written), listed(steps.abandoned)) == ([*range(8)], [8, 9])
        second.write(8, 9, 10)
        steps = second.saved().steps
        assert (listed(steps.written), listed(steps.abandoned), steps.written.count) == ([*range(11)], [], 11)

    def test_what_was_missing_is_missing_until_it_is_recorded_again(self, tmp_path):
        first = Rank(tmp_path)
        first.write(0, 1, 4, 5)
        for step in (2, 6):
            first.manifest.dropped(step, "queue full")
        for step in (3, 7):
            first.manifest.lost(step, "csv", "disk full")
        second = resumed(first)
        assert (listed(second.saved().dropped["queue full"]), listed(second.saved().lost["csv"]["disk full"])) == (
            [2, 6],
            [3, 7],
        )
        second.write(3, 4, 5, 6, 7)
        saved = second.saved()
        assert (listed(saved.dropped["queue full"]), saved.lost) == ([2], {})

    def test_a_step_that_is_lost_this_time_is_not_counted_as_written_because_it_was_once(self, tmp_path):
        first = Rank(tmp_path)
        first.write(*range(6))
        second = resumed(first)
        second.write(5)
        second.manifest.dropped(3, "queue full")  # told late
        second.manifest.lost(4, "csv", "disk full")
        saved = second.saved()
        assert (listed(saved.steps.written), listed(saved.steps.abandoned)) == ([0, 1, 2, 5], [3, 4])
        assert saved.first_step == 3

    def test_a_step_recorded_again_is_skipped_only_if_it_was_this_time(self, tmp_path):
        first = Rank(tmp_path)
        first.write(0, 1, 2, 3, status="skipped")
        second = resumed(first)
        second.write(2)
        second.write(3, status="skipped")
        assert listed(second.saved().steps.skipped) == [0, 1, 3]

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=5))
    def test_however_often_it_is_resumed_each_step_is_reported_once(self, runs):
        line, written, ever = Timeline(), set(), set()
        for first, count in runs:
            for step in range(first, first + count):
                line.write(step, "complete")
            if count:
                written = {step for step in written if step < first} | set(range(first, first + count))
                ever |= written
            line = Timeline.restored(record_with(**line.manifest_fields()))
        steps = line.manifest_fields()["steps"]
        assert (set(steps.written.steps()), set(steps.abandoned.steps())) == (written, ever - written)
        assert steps.written.count == len(written)

    def test_files_have_the_last_word_of_a_run_that_was_killed(self):
        line = Timeline()
        for step in range(6):
            line.write(step, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.correct([(4, 7)], {"csv": {4, 6}}, [7])
        told = line.manifest_fields()
        assert listed(told["steps"].written) == [0, 1, 2, 3, 4, 6]
        assert listed(told["dropped"][KILLED]) == [5, 7]

    @pytest.mark.parametrize(("interval", "resumed", "lost"), [(1, 9, [6, 7, 8]), (1, 6, []), (5, 145, [*range(30, 145, 5)])])
    def test_what_a_killed_run_had_not_written_before_the_step_it_is_resumed_at_is_dropped(self, interval, resumed, lost):
        line = Timeline()
        for step in range(6):
            line.write(step * interval, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields(), config={"step_interval": interval}))
        line.write(resumed, "complete")
        line.write(resumed + interval, "complete")
        told = line.manifest_fields()["dropped"]
        assert {cause: listed(steps) for cause, steps in told.items()} == ({KILLED: lost} if lost else {})

    def test_what_a_killed_run_lost_is_dropped_though_the_next_run_was_killed_before_it_could_say_so(self):
        line = Timeline()
        for step in range(6):
            line.write(step, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.correct([(10, 11), (4, 5)], {"csv": {4, 5, 10}}, [])  # the next run began with step 10
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.write(12, "complete")
        told = line.manifest_fields()
        assert listed(told["steps"].written) == [0, 1, 2, 3, 4, 5, 10, 12]
        assert listed(told["dropped"][KILLED]) == [6, 7, 8, 9, 11]

    def test_a_step_that_a_sink_has_lost_is_missing_until_a_restart_finds_it_in_a_file(self):
        line = Timeline()
        for step in range(3):
            line.write(step, "complete")
        line.remove(1, "csv", "its file was removed")
        told = line.manifest_fields()
        assert (listed(told["steps"].written), listed(told["lost"]["csv"]["its file was removed"])) == ([0, 2], [1])
        line = Timeline.restored(record_with(**told))
        line.correct([(0, 2)], {"csv": {0, 1, 2}}, [])
        told = line.manifest_fields()
        assert listed(told["steps"].written) == [0, 1, 2]
        assert not any(steps.count for steps in told["lost"]["csv"].values())

    def test_steps_that_the_resumed_run_trains_without_collecting_them_are_not_called_missing(self):
        line = Timeline()
        for step in range(6):
            line.write(step, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.begins = 8
        line.write(20, "complete")
        assert listed(line.manifest_fields()["dropped"][KILLED]) == [6, 7]

    def test_steps_that_happen_to_lie_equally_far_apart_do_not_hide_those_between_them(self):
        line = Timeline()
        for step in (0, 25):  # the only steps that two killed runs had written
            line.write(step, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.write(29, "complete")
        assert listed(line.manifest_fields()["dropped"][KILLED]) == [26, 27, 28]

    def test_a_run_that_ended_cleanly_has_lost_nothing(self):
        line = Timeline()
        line.write(0, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields(), closed=True))
        line.write(7, "complete")
        assert line.manifest_fields()["dropped"] == {}

    def test_a_step_that_some_sinks_of_a_killed_run_have_is_lost_to_the_others(self):
        line = Timeline()
        for step in range(3):
            line.write(step, "complete")
        line.lose(3, "hdf5", "the disk was full")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.correct([(0, 9), (2, 4)], {"csv": {0, 1, 3, 4, 5}, "hdf5": {0, 1, 2, 5}}, [])
        told = line.manifest_fields()
        assert listed(told["steps"].written) == [0, 1, 5]
        assert {cause: listed(steps) for cause, steps in told["lost"]["hdf5"].items()} == {
            "the disk was full": [3],
            KILLED: [4],
        }
        assert {cause: listed(steps) for cause, steps in told["lost"]["csv"].items()} == {KILLED: [2]}
        assert told["dropped"] == {}

    def test_an_abandoned_step_that_some_sinks_still_have_stays_abandoned(self):
        line = Timeline()
        for step in range(4):
            line.write(step, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.write(1, "complete")
        line = Timeline.restored(record_with(**line.manifest_fields()))
        line.correct([(1, 99)], {"csv": {0, 1, 2, 3}, "hdf5": {0, 1}}, [])
        told = line.manifest_fields()
        assert (listed(told["steps"].written), listed(told["steps"].abandoned)) == ([0, 1], [2, 3])
        assert (told["lost"], told["dropped"]) == ({}, {})


def record_with(**fields):
    """A manifest of a run that said nothing else."""
    facts = dict.fromkeys(("timestamp", "started", "saved", "host", "config_path"), "")
    facts |= {name: {} for name in ("groups", "versions", "config", "failures", "notes")}
    facts |= {"schema_version": 1, "job_id": "", "job_agreed": True, "closed": False, "rank": 0, "world_size": 1, "pid": 1}
    return ManifestRecord(**(facts | {"formats": (), "series": None} | fields))


class TestManifest:
    def test_the_resumed_run_is_a_new_one_and_names_those_before_it(self, tmp_path):
        first = Rank(tmp_path, 1)
        first.write(0, 1)
        second = resumed(first, 2)
        second.write(1)
        third = resumed(second, 3)
        third.write(2)
        saved = third.saved()
        assert (int(saved.job_id, 16), saved.timestamp, saved.first_step, saved.closed) == (3, "Dec03_21-34-03", 2, False)
        assert [(int(run.job_id, 16), run.first_step, run.closed) for run in saved.resumed] == [(1, 0, False), (2, 1, False)]

    def test_of_many_runs_the_latest_are_named(self, tmp_path):
        rank = Rank(tmp_path, 0)
        for number in range(1, MOST_EARLIER_RUNS + 5):
            rank = resumed(rank, number)
        assert [int(run.job_id, 16) for run in rank.saved().resumed] == list(range(4, MOST_EARLIER_RUNS + 4))

    def test_failures_add_up_and_notes_stay_until_they_are_replaced(self, tmp_path):
        first = Rank(tmp_path)
        for cause, key in (("disk", "scaled"), ("disk", "clipped")):
            first.failures.warn(cause, "it is full")
            first.manifest.note(key, "by the first")
        second = resumed(first)
        second.failures.warn("disk", "it is full again")
        second.failures.report("network", OSError("of \udce9"))
        second.manifest.note("clipped", "by the second")
        saved = second.saved()
        assert (saved.failures, saved.notes) == (
            {"disk": 3, "network: OSError": 1},
            {"scaled": "by the first", "clipped": "by the second"},
        )
        assert saved.said == {
            "disk": "it is full",
            "network: OSError": "network failed: OSError('of \\udce9'). Training continues.",
        }

    def test_the_series_of_earlier_runs_can_still_be_read(self, tmp_path):
        first = Rank(tmp_path)
        first.write(0, names=["a"])
        second = resumed(first)
        for names_ in (["a"], ["a", "b"], ["a", "b", "c"]):
            second.write(1, names=names_)
            saved = second.saved()
        assert saved.resumed[0].series.count == 1
        assert {path.name for path in tmp_path.glob("series-*")} == {saved.series.file, saved.resumed[0].series.file}

    def test_closing_lets_others_have_the_directory(self, tmp_path):
        rank = Rank(tmp_path, held=lock_directory(tmp_path))
        rank.manifest.save()
        assert lock_directory(tmp_path) is None
        rank.manifest.close()
        held = lock_directory(tmp_path)
        assert held is not None
        held.release()

    def test_one_that_cannot_be_read_is_set_aside_and_never_lost(self, tmp_path, caplog):
        for content in ("{", "[]"):
            (tmp_path / "manifest.json").write_text(content)
            assert last_manifest(tmp_path) is None
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
            "manifest.json.unreadable": "{",
            "manifest.json.unreadable.2": "[]",
        }
        assert "manifest.json is damaged" in caplog.text

    def test_none_is_no_earlier_run(self, tmp_path):
        assert last_manifest(tmp_path) is None
        assert (Earlier.of(None).runs, newest_step(None)) == ((), -1)

    def test_drafts_of_a_process_that_was_killed_are_removed_and_nothing_else(self, tmp_path):
        for name in (".manifest.json.1a2b3c4d", ".series-0123456789abcdef.json.gz.ffffffff", ".other", "file.1a2b3c4d"):
            (tmp_path / name).write_text("")
        write_whole(tmp_path / "manifest.json", b"{}")
        remove_drafts(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {".other", "file.1a2b3c4d", "manifest.json"}


class TestHome:
    def settle(self, base, *span, failures=None, recording=0, formats=("csv",)):
        return resolve_rank_directory(base, 0, "Mar01_00-00-00", recording, span, formats, failures or Failures())

    def released(self, *homes):
        for one in homes:
            one.lock.release()

    def test_without_append_output_every_run_has_a_directory_of_its_own(self, tmp_path):
        first, second = self.settle(tmp_path), self.settle(tmp_path)
        assert first.directory != second.directory
        assert first.directory.name.startswith("Mar01_00-00-00-rank0-")
        self.released(first, second)

    def test_fault_20_without_a_directory_in_the_range_a_new_one_is_begun(self, tmp_path, caplog):
        made(tmp_path, "Feb01_00-00-00-rank0-1a2b3c4d", "Jan01_00-00-00-rank1-1a2b3c4d")
        begun = self.settle(tmp_path, *WINTER)
        assert begun.directory.name.startswith("Mar01_00-00-00-rank0-")
        assert caplog.text.count("append_output") == 1
        assert "this rank has no directory from Dec31_23-00-00 to Jan01_01-00-00" in caplog.text
        self.released(begun)

    def test_a_new_directory_that_cannot_be_locked_is_used_without_a_lock_and_that_is_reported(self, tmp_path, monkeypatch):
        def refuse(_directory):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(output, "lock_directory", refuse)
        failures = Failures()
        begun = self.settle(tmp_path, failures=failures)
        assert begun.lock is None
        assert dict(failures.counts) == {"locking the directory: OSError ENOLCK": 1}

    def test_of_several_the_newest_is_taken_which_is_said(self, tmp_path, caplog):
        made(tmp_path, *(f"Jan01_00-00-0{second}-rank0-1a2b3c4d" for second in range(3)))
        taken = self.settle(tmp_path, *WINTER)
        assert taken.directory.name == "Jan01_00-00-02-rank0-1a2b3c4d"
        assert "3 directories are in the range; using Jan01_00-00-02-rank0-1a2b3c4d" in caplog.text
        self.released(taken)

    def test_one_that_another_job_writes_to_is_left_to_it_which_is_said(self, tmp_path, caplog):
        made(tmp_path, "Jan01_00-00-00-rank0-1a2b3c4d")
        first, second = self.settle(tmp_path, *WINTER), self.settle(tmp_path, *WINTER)
        assert first.directory.name == "Jan01_00-00-00-rank0-1a2b3c4d"
        assert second.directory.name.startswith("Mar01_00-00-00-rank0-")
        assert "is writing Jan01_00-00-00-rank0-1a2b3c4d" in caplog.text
        self.released(first, second)

    def test_one_that_cannot_be_put_in_order_is_released_and_nothing_is_raised(self, tmp_path):
        directory = tmp_path / "Jan01_00-00-00-rank0-1a2b3c4d"
        (directory / ".actv_0-4.csv.part").mkdir(parents=True)
        failures = Failures()
        begun = self.settle(tmp_path, *WINTER, failures=failures)
        assert begun.directory.name.startswith("Mar01_00-00-00-rank0-")
        assert dict(failures.counts) == {"appending to an earlier directory: IsADirectoryError EISDIR": 1}
        assert lock_directory(directory) is not None
        self.released(begun)

    @pytest.mark.parametrize("part", [".actv_0-4.csv.part", ".metrics_0-4.h5.part"])
    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
    def test_a_part_that_is_no_regular_file_is_never_opened(self, tmp_path, part, make):
        directory = tmp_path / "Jan01_00-00-00-rank0-1a2b3c4d"
        directory.mkdir()
        make(directory / part)
        taken = self.settle(tmp_path, *WINTER, formats=["csv", "hdf5"])
        assert taken.directory != directory
        assert os.path.lexists(directory / part)
        self.released(taken)

    def test_files_that_were_visible_after_the_last_word_of_a_killed_run_are_known(self, tmp_path):
        directory = tmp_path / "Jan01_00-00-00-rank0-1a2b3c4d"
        first = Rank(directory)
        first.write(0, 1)
        first.saved()
        time.sleep(0.02)  # a tick of the file system's clock
        (directory / "grad_reduced_0-1.csv").write_text("vpp_stage,name,step,norm\n0,w,0,1\n0,w,1,1\n")
        (directory / "grad_reduced_2-3.csv").write_text("vpp_stage,name,step,norm\n0,w,2,1\n0,w,3,1\n")
        taken = self.settle(tmp_path, *WINTER)
        assert listed(taken.earlier.timeline.manifest_fields()["steps"].written) == [0, 1, 2, 3]
        self.released(taken)


class TestAuto:
    MODEL = RecordedModel("torch/Net", "1" * 16)

    def earlier(self, base, number=0, steps=range(3), saved=None, watched=MODEL, **facts):
        """A directory of rank 0 that a killed run left, which began at this minute."""
        path = base / f"Mar01_00-{number:02}-00-rank0-{number:08x}"
        path.mkdir(parents=True)
        rank = Rank(path, number, watched=watched)
        rank.write(*steps)
        rank.manifest.save()
        known = json.loads((path / "manifest.json").read_text())
        known |= {f"{one}ed": f"2026-03-01T00:{at:02}:00+00:00" for one, at in (("start", number), ("sav", saved or number))}
        (path / "manifest.json").write_text(json.dumps(known | facts))
        return path

    def settle(self, base, start=3, **this):
        this = RestartedRun(**{"watched": self.MODEL, "start_step": start} | this)
        found = resolve_rank_directory(base, 0, "Mar02_00-00-00", 0, ("auto",), ("csv",), Failures(), this)
        found.lock.release()
        return found

    def test_a_restart_continues_in_the_newest_directory_of_the_same_model_and_number_of_ranks(self, tmp_path):
        self.earlier(tmp_path, 0)
        newest = self.earlier(tmp_path, 1)
        self.earlier(tmp_path, 2, watched=RecordedModel("torch/Net", "2" * 16))
        self.earlier(tmp_path, 3, watched=RecordedModel("torch/Net", "1" * 16, number=1))
        self.earlier(tmp_path, 7, watched=RecordedModel("torch/Net", "1" * 16, shapes="3" * 16))
        self.earlier(tmp_path, 4, world_size=2)
        self.earlier(tmp_path, 5, groups={"dp": [0, 1]})
        self.earlier(tmp_path, 6, watched=None)
        found = self.settle(tmp_path)
        assert (found.directory, found.earlier.timeline.newest) == (newest, 2)
        assert [(run.first_step, run.last_step) for run in found.earlier.runs] == [(0, 2)]

    def test_the_first_run_begins_a_directory_and_says_so(self, tmp_path, caplog):
        caplog.set_level("INFO")
        assert self.settle(tmp_path, start=0).earlier.runs == ()
        assert "append_output: A new directory begins at step 0." in caplog.text
        assert "WARNING" not in caplog.text

    def test_a_restart_that_finds_only_others_begins_a_directory_and_warns(self, tmp_path, caplog):
        other = self.earlier(tmp_path, world_size=2)
        assert self.settle(tmp_path).directory != other
        said = "no directory of this rank has the same model, number of ranks and groups"
        assert f"append_output: {said}. A new directory begins at step 3." in caplog.text

    def test_a_second_recording_of_a_model_in_one_process_begins_a_directory_and_the_reason_is_said(self, tmp_path, caplog):
        first = self.earlier(tmp_path)
        again = replace(self.MODEL, number=1)
        assert self.settle(tmp_path, watched=again).directory != first
        assert "this process has recorded the same model before" in caplog.text
        caplog.clear()
        assert self.settle(tmp_path, watched=again, world_size=2).directory != first
        assert "this process has recorded the same model before" not in caplog.text

    def test_a_run_from_step_0_leaves_the_earlier_directory_as_it_is_and_names_start_iteration(self, tmp_path, caplog):
        earlier = self.earlier(tmp_path)
        assert self.settle(tmp_path, start=0).directory != earlier
        assert f"{earlier.name} is left as it is. To continue after its step 2, pass the step of the checkpoint" in caplog.text

    def test_of_two_jobs_that_ran_at_the_same_time_neither_is_continued(self, tmp_path, caplog):
        both = {self.earlier(tmp_path, 0, saved=5), self.earlier(tmp_path, 1, saved=3)}
        assert self.settle(tmp_path).directory not in both
        assert "were written at the same time, so it is not known which of them to continue" in caplog.text
        assert "MONITOR_OUTPUT_DIR" in caplog.text

    def test_a_directory_that_is_being_written_is_not_continued(self, tmp_path, caplog):
        earlier = self.earlier(tmp_path)
        held = lock_directory(earlier)
        assert self.settle(tmp_path).directory != earlier
        held.release()
        assert f"another process, or this one, is writing {earlier.name}. This rank begins a new directory." in caplog.text

    def test_a_directory_without_a_readable_manifest_is_not_continued(self, tmp_path):
        earlier = self.earlier(tmp_path)
        (earlier / "manifest.json").write_text("{")
        assert self.settle(tmp_path).directory != earlier
        assert (earlier / "manifest.json").read_text() == "{"
