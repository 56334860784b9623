"""Other sinks and watchers from some step on: each step goes to those that were there when it was submitted."""

from __future__ import annotations

import pytest
from pipeline_parts import FileJournal, HangingSink, Onlooker, RecordSink, pipeline_of, record


@pytest.fixture
def journal(tmp_path):
    return FileJournal(tmp_path / "manifest.json")


@pytest.fixture
def sinks(tmp_path):
    return RecordSink(tmp_path / "first", 10), RecordSink(tmp_path / "second", 10)


def steps(sink: RecordSink) -> list[int]:
    return [int(line) for line in sink.path.read_text().splitlines()]


def test_a_step_goes_to_the_sinks_that_were_there_when_it_was_submitted(journal, sinks):
    first, second = sinks
    pipeline = pipeline_of({"a": first}, journal)
    record(pipeline, 0)
    pipeline.rearrange(lambda: ({"b": second}, {}))
    record(pipeline, 1)
    assert pipeline.close()
    assert (steps(first), steps(second)) == ([0], [1])


def test_a_sink_that_is_no_longer_there_is_closed_and_one_that_stays_continues(journal, sinks):
    first, second = sinks
    pipeline = pipeline_of({"a": first, "b": second}, journal)
    record(pipeline, 0)
    pipeline.rearrange(lambda: ({"b": second}, {}))
    record(pipeline, 1)
    assert pipeline.flush(20)
    assert (first.closed, second.closed) == (True, False)
    assert (steps(first), steps(second)) == ([0], [0, 1])
    assert pipeline.close()


def test_a_watcher_that_is_no_longer_there_is_saved_and_not_closed(journal, sinks):
    before, after = Onlooker(), Onlooker()
    pipeline = pipeline_of({"a": sinks[0]}, journal, watchers={"rules": before})
    record(pipeline, 0)
    pipeline.rearrange(lambda: ({"a": sinks[0]}, {"rules": after}))
    record(pipeline, 1)
    assert pipeline.close()
    assert [one for one in before.told if one != "save"] == [0]
    assert "save" in before.told
    assert [one for one in after.told if one != "save"] == [1, "close"]


def test_where_others_cannot_be_made_it_continues_as_before(journal, sinks):
    def arranged():
        raise OSError("no such place")

    pipeline = pipeline_of({"a": sinks[0]}, journal)
    record(pipeline, 0)
    pipeline.rearrange(arranged)
    record(pipeline, 1)
    assert pipeline.close()
    assert steps(sinks[0]) == [0, 1]


def test_rearranging_waits_for_nothing_while_a_sink_hangs(journal, sinks):
    hanging = HangingSink()
    pipeline = pipeline_of({"hangs": hanging}, journal)
    record(pipeline, 0)
    assert hanging.hanging.wait(20)
    pipeline.rearrange(lambda: ({"a": sinks[0]}, {}))
    record(pipeline, 1)
    hanging.release.set()
    assert pipeline.close()
    assert (hanging.steps, steps(sinks[0])) == ([0], [1])


def test_after_closing_nothing_is_rearranged(journal, sinks):
    pipeline = pipeline_of({"a": sinks[0]}, journal)
    record(pipeline, 0)
    assert pipeline.close()
    pipeline.rearrange(lambda: pytest.fail("asked"))
    assert pipeline.close()
