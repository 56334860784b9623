import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from monitor.coordinator.manifest import MORE_NOTES, MOST_NOTES, Manifest, RankFacts
from monitor.coordinator.manifest_format import read_manifest
from monitor.coordinator.output import JobIdentity
from monitor.coordinator.series_file import Edge, Flow, MeasuredSeries, Pass, read_flow, read_series
from monitor.failures import Failures
from monitor.series import Series, SeriesTable
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

LAYOUT = TensorLayout((4, 8), "torch.float32")
FACTS = RankFacts(
    identity=JobIdentity("1a2b3c4d" * 4, "Dec03_21-34-40"),
    rank=1,
    world_size=4,
    groups={"dp": [1, 3]},
    versions={"torch": "2.13.0"},
    config={"ops": ("norm",), "eps": 1e-8, "targets": None},
    config_path="/data/config.json",
    formats=["csv"],
)


class Rank:
    """A manifest with what it is about: its directory, its series and its failures."""

    def __init__(self, directory):
        self.directory = directory
        self.failures = Failures(1)
        self.table = SeriesTable()
        self.manifest = Manifest(directory, FACTS, self.table, self.failures)

    def write(self, step, *names, status="complete"):
        kinds = {}
        if names:
            index = np.array([self.table.index_of(Series("grad_reduced", 0, name)) for name in names])
            nothing = np.zeros_like(index)
            kinds["grad_reduced"] = KindRows(index, nothing, nothing, nothing, Partials(np.zeros((len(COLUMNS), len(names)))))
        self.manifest.written(StepRows(step, ("norm",), kinds, [LAYOUT], status))

    def saved(self):
        self.manifest.save()
        return self.read()

    def read(self):
        return read_manifest(self.directory / "manifest.json")

    def series(self):
        return {one.series.name for one in read_series(self.directory, self.read())}


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path / "rank")


def ranges(steps):
    return [list(one) for one in steps.ranges]


def test_what_is_known_at_the_start_stands_in_the_file(rank):
    saved = rank.saved()
    assert (saved.job_id, saved.timestamp, saved.job_agreed) == ("1a2b3c4d" * 4, "Dec03_21-34-40", True)
    assert (saved.rank, saved.world_size, saved.groups) == (1, 4, {"dp": (1, 3)})
    assert (saved.versions, saved.formats, saved.pid) == ({"torch": "2.13.0"}, ("csv",), os.getpid())
    assert (saved.config, saved.config_path) == ({"ops": ["norm"], "eps": 1e-8, "targets": None}, "/data/config.json")


@pytest.mark.parametrize(
    ("ranks", "chunks", "stages"), [((1, 3), 1, (0,)), ((3, 1), 1, (1,)), ((3, 1, 5), 2, (1, 4)), ((1,), 3, (0, 1, 2))]
)
def test_a_rank_of_a_pipeline_says_which_stages_it_has(tmp_path, ranks, chunks, stages):
    facts = replace(FACTS, groups={"pp": ranks}, chunks=chunks)
    Manifest(tmp_path, facts, SeriesTable(), Failures(1)).save()
    pipeline = read_manifest(tmp_path / "manifest.json").pipeline
    assert (pipeline.ranks, pipeline.stage, pipeline.stages) == (ranks, ranks.index(1), stages)


def test_a_rank_of_none_has_none(rank):
    assert rank.saved().pipeline is None


def test_how_data_ran_stands_in_the_series_file_and_that_it_was_cut_in_a_note(rank):
    rank.write(0, "h.0.weight", "h.0.bias")
    flow = Flow((Edge(0, 1),), (Pass(True, 0, 0),), cut=True)
    rank.manifest.flows(flow)
    saved = rank.saved()
    assert read_flow(rank.directory, saved) == flow
    assert "edges between series are kept" in saved.notes["flow"]


def test_how_data_ran_stands_in_a_new_series_file_if_it_is_known_later_than_the_series(rank):
    rank.write(0, "h.0.weight", "h.0.bias")
    before = rank.saved()
    flow = Flow((Edge(0, 1),), (Pass(True, 0, 0),))
    rank.manifest.flows(flow)
    saved = rank.saved()
    assert read_flow(rank.directory, saved) == flow
    assert saved.series.file != before.series.file


def test_its_times_have_a_year_and_an_offset(rank):
    saved = rank.saved()
    started, now = (datetime.fromisoformat(time) for time in (saved.started, saved.saved))
    assert started <= now <= datetime.now(UTC)


def test_every_tenth_step_is_one_range(rank):
    for step in range(5, 100_000, 10):
        rank.write(step)
    assert ranges(rank.saved().steps.written) == [[5, 99_995, 10]]


def test_steps_skipped_and_incomplete_are_among_those_written(rank):
    for step, status in enumerate(["complete", "skipped", "complete", "incomplete"]):
        rank.write(step, status=status)
    steps = rank.saved().steps
    assert [ranges(part) for part in (steps.written, steps.skipped, steps.incomplete)] == [
        [[0, 3, 1]],
        [[1, 1, 1]],
        [[3, 3, 1]],
    ]


def test_dropped_steps_are_counted_by_reason(rank):
    for step in (3, 4, 5, 9):
        rank.manifest.dropped(step, "queue full" if step < 9 else "closing")
    dropped = rank.saved().dropped
    assert {reason: (ranges(steps), steps.count) for reason, steps in dropped.items()} == {
        "queue full": ([[3, 5, 1]], 3),
        "closing": ([[9, 9, 1]], 1),
    }


def test_lost_steps_are_counted_by_sink_and_reason(rank):
    rank.manifest.lost(7, "csv", "OSError: disk full")
    rank.manifest.lost(8, "csv", "OSError: disk full")
    rank.manifest.lost(8, "hdf5", "closed")
    lost = rank.saved().lost
    assert {sink: {reason: ranges(steps) for reason, steps in reasons.items()} for sink, reasons in lost.items()} == {
        "csv": {"OSError: disk full": [[7, 8, 1]]},
        "hdf5": {"closed": [[8, 8, 1]]},
    }


def test_failures_are_counted(rank):
    rank.failures.warn("targets", "said once")
    rank.failures.warn("targets", "said once")
    assert rank.saved().failures == {"targets": 2}


def test_the_latest_note_under_a_key_stands(rank):
    rank.manifest.note("grad_unreduced", "scaled")
    rank.manifest.note("grad_unreduced", "scaled by the loss scale")
    rank.manifest.note("loss_scale", 65536)
    rank.manifest.note("clipped", True)
    assert rank.saved().notes == {"grad_unreduced": "scaled by the loss scale", "loss_scale": 65536, "clipped": True}


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
def test_a_number_that_json_does_not_have_is_noted_as_text(rank, value, text):
    rank.manifest.note("loss", value)
    assert rank.saved().notes == {"loss": text}


def test_a_run_that_was_not_closed_says_so(rank):
    assert not rank.saved().closed
    rank.manifest.close()
    assert rank.read().closed


def test_series_stand_in_a_file_that_the_manifest_points_at(rank):
    rank.write(0, "h.0.weight", "h.0.bias")
    saved = rank.saved()
    assert saved.series.count == 2
    assert read_series(rank.directory, saved) == tuple(
        MeasuredSeries(Series("grad_reduced", 0, name), LAYOUT, False) for name in ("h.0.weight", "h.0.bias")
    )


def test_before_the_first_step_there_is_no_series_file(rank):
    assert rank.saved().series is None
    assert [path.name for path in rank.directory.iterdir()] == ["manifest.json"]


def test_the_series_file_is_written_once_for_its_content(rank):
    rank.write(0, "h.0.weight")
    path = rank.directory / rank.saved().series.file
    before = path.stat()
    rank.write(1, "h.0.weight")
    assert rank.saved().series.file == path.name
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_only_the_last_series_file_is_kept(rank):
    for step in range(5):
        rank.write(step, f"h.{step}.weight")
        rank.manifest.save()
    assert len(list(rank.directory.iterdir())) == 2
    assert rank.series() == {f"h.{step}.weight" for step in range(5)}


def test_a_series_that_no_step_has_brought_yet_is_not_in_the_table(rank):
    rank.write(0, "h.0.weight")
    rank.table.index_of(Series("grad_reduced", 0, "found meanwhile by the training thread"))
    rank.manifest.save()
    assert rank.series() == {"h.0.weight"}


def test_a_directory_that_was_removed_is_made_again_with_all_that_belongs_in_it(rank):
    rank.write(0, "h.0.weight")
    for path in (rank.directory / rank.saved().series.file, rank.directory / "manifest.json", rank.directory):
        path.rmdir() if path.is_dir() else path.unlink()
    assert ranges(rank.saved().steps.written) == [[0, 0, 1]]
    assert rank.series() == {"h.0.weight"}


def test_a_save_that_fails_says_so_and_the_next_makes_up_for_it(rank):
    rank.directory.write_text("in the way")
    rank.write(0)
    with pytest.raises(OSError, match="rank"):
        rank.manifest.save()
    rank.directory.unlink()
    rank.write(1)
    assert ranges(rank.saved().steps.written) == [[0, 1, 1]]


def test_a_forked_child_saves_and_closes_nothing(rank):
    rank.write(0)
    before = rank.saved()
    child = os.fork()
    if child == 0:
        rank.write(1)
        rank.manifest.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rank.read() == before


TELLINGS = st.lists(
    st.tuples(st.sampled_from(["written", "dropped", "lost", "note"]), st.integers(0, 10**9), st.text(max_size=5)), max_size=60
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(TELLINGS)
def test_whatever_is_recorded_reads_back(tmp_path, tellings):
    rank = Rank(tmp_path / "rank")
    expected = {"written": set(), "dropped": set(), "lost": set()}
    for what, step, text in tellings:
        if what == "written":
            rank.write(step)
        elif what == "dropped":
            rank.manifest.dropped(step, "full")
        elif what == "lost":
            rank.manifest.lost(step, "csv", "full")
        else:
            rank.manifest.note(text, step)
        expected.get(what, set()).add(step)
    saved = rank.saved()
    assert set(saved.steps.written.steps()) == expected["written"]
    assert {step for steps in saved.dropped.values() for step in steps.steps()} == expected["dropped"]
    assert {step for causes in saved.lost.values() for steps in causes.values() for step in steps.steps()} == expected["lost"]
    assert saved.notes == {text: step for what, step, text in tellings if what == "note"}


def test_its_size_is_bounded_however_long_and_bad_the_run(rank):
    """Steps at random distances, each with an error of its own in every sink."""
    distances = np.random.default_rng(0).integers(1, 50, size=20_000)
    for step in np.cumsum(distances).tolist():
        rank.write(step)
        rank.manifest.dropped(step + 1, f"reason {step} " * 100)
        rank.manifest.lost(step, "csv", f"reason {step} " * 100)
        rank.manifest.note(f"note {step}", "text " * 1000)
        rank.failures.counts[f"failure {step} " * 100] += 1
    saved = rank.saved()
    assert (rank.directory / "manifest.json").stat().st_size < 700_000
    assert saved.steps.written.count == 20_000
    assert sum(steps.count for steps in saved.dropped.values()) == 20_000
    assert sum(steps.count for steps in saved.lost["csv"].values()) == 20_000
    assert saved.notes[MORE_NOTES] is True
    assert len(saved.notes) == MOST_NOTES + 1


def test_a_reader_finds_a_whole_manifest_at_any_moment_and_no_note_is_missing(rank):
    """The training thread leaves notes while the writer thread writes and saves and a third one reads."""
    rank.write(0, "h.0.weight")
    rank.manifest.save()

    def write():
        for step in range(1, 60):
            rank.write(step, "h.0.weight")
            rank.manifest.save()

    def train():
        for number in range(200):
            rank.manifest.note(f"note {number}", number)
            rank.manifest.dropped(1000 + number, "queue full")

    threads = [threading.Thread(target=write), threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(rank.read().steps.written.count)
        assert rank.series() == {"h.0.weight"}
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    saved = rank.saved()
    assert saved.notes == {f"note {number}": number for number in range(200)}
    assert ranges(saved.dropped["queue full"]) == [[1000, 1199, 1]]


def test_it_is_plain_json(rank):
    rank.write(0)
    rank.manifest.save()
    fields = json.loads((rank.directory / "manifest.json").read_text())
    assert fields["steps"]["written"] == {"count": 1, "ranges": [[0, 0, 1]], "rest": None}
