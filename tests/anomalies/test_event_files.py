"""``anomaly.json`` and ``judged.json``: what is in them, when they are written, and what becomes of them when that fails."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rule_parts import INF, NAN, Watched, facts, read
from sink_rows import Measured

from monitor.anomalies.events import Event, ScanSummary
from monitor.anomalies.listeners import EventFiles
from monitor.coordinator.manifest import RankFacts
from monitor.failures import Failures

FIELDS = ["rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id", "tag_name", "message", "group_mates"]


class Clock:
    """Seconds that pass when the test says so, and ``tick`` of them from one look at it to the next: so long a write takes."""

    now, tick = 1000.0, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Recorded:
    """A rank under both rules that writes what it finds."""

    def __init__(self, base: Path, what: RankFacts | None = None, directory: str = "Dec03-rank0-12345678") -> None:
        what = what or facts()
        self.clock, self.failures = Clock(), Failures()
        self.watched = Watched(("AnomalyNan", None), ("AnomalyTurbulence", 0.5))
        self.files = EventFiles(base, directory, what, self.watched.rank.series, self.failures, self.clock)
        self.watched.scanner._listeners = (self.watched, self.files)
        self.folder = base / "anomaly_detected" / f"rank{what.rank}"
        self.step, self.scanner = self.watched.step, self.watched.scanner

    def events(self, name: str = "anomaly.json") -> dict[str, Any]:
        return read(self.folder / name)

    def judged(self, name: str = "judged.json") -> ScanSummary:
        return ScanSummary.model_validate_json((self.folder / name).read_bytes())


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_an_event_stands_in_the_file_as_soon_as_its_step_was_judged(recorded: Recorded) -> None:
    recorded.step(b=[1.0], a=[NAN, 1.0])
    assert recorded.events() == {
        "0:a/rank0/actv_step_1_call_1": {
            "rank": 0,
            "step": 1,
            "micro_step": -1,
            "pp_stage": 0,
            "vpp_stage": 0,
            "call_id": 1,
            "tag_name": "0:a/rank0/actv",
            "message": "Rule AnomalyNan reports anomaly signal in ('0:a/rank0/actv', 'nans') at step 1. Value 1.",
            "group_mates": [0],
        }
    }


def test_two_jobs_that_write_to_one_output_directory_are_told_that_events_are_replaced(
    recorded: Recorded, tmp_path: Path
) -> None:
    """As the processes of Hogwild without a process group, or two experiments that were started in one directory."""
    other = Recorded(tmp_path, directory="Dec03-rank0-87654321")
    for one in (recorded, recorded, other, recorded, recorded):
        one.clock.now += 100
        one.step(a=[NAN])
    for one in (recorded, other):
        assert list(one.failures.counts) == ["events of two jobs"]
    assert "Give each job an output directory of its own (MONITOR_OUTPUT_DIR)." in other.failures.messages["events of two jobs"]


def test_an_event_has_exactly_the_fields_that_scripts_read(recorded: Recorded) -> None:
    recorded.step(a=[NAN])
    assert [list(value) for value in recorded.events().values()] == [FIELDS]


def test_micro_step_stage_and_group_are_those_of_the_row_and_the_rank(tmp_path: Path) -> None:
    """Peers, fault 5: the micro-step was always 0."""
    recorded = Recorded(tmp_path, facts(5, pp=(1, 5)))
    recorded.step({"actv": [Measured("a", [1.0], 0), Measured("a", [NAN], 2, vpp_stage=1)]})
    [(key, event)] = recorded.events().items()
    assert key == "1:a:2/rank5/actv_step_1_call_1"
    assert [event[field] for field in FIELDS[:7]] == [5, 1, 2, 1, 1, 1, "1:a:2/rank5/actv"]
    assert event["group_mates"] == [1, 5]


def test_a_rank_outside_the_group_that_it_was_given_is_on_its_own(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, facts(5, pp=(0, 1)))
    recorded.step(a=[NAN])
    [event] = recorded.events().values()
    assert (event["pp_stage"], event["group_mates"]) == (0, [5])


def test_283_alerts_are_283_entries(recorded: Recorded) -> None:
    """Peers, fault 5: 283 alerts became 112 entries, since several statistics of a tensor had one key."""
    recorded.step(**{f"t{i}": [1.0] for i in range(141)})
    found = recorded.step(**{f"t{i}": [9.0] for i in range(141)}, new=[NAN])
    assert len(found) == 283
    events = recorded.events()
    assert len(events) == recorded.judged().events == 283
    assert [key for key in events if "t140/" in key] == [
        "0:t140/rank0/actv_step_2_call_140",
        "0:t140/rank0/actv_step_2_call_140_mean",
    ]
    for key, event in events.items():
        read_back = Event.model_validate_json(Event(**event | {"group_mates": (0,)}).model_dump_json())
        assert key.removesuffix("_mean") == read_back.key
        assert read_back.signal.op in ("norm", "mean", "nans")


def test_what_rules_saw_can_be_read_back(recorded: Recorded) -> None:
    for values in ([2.0], [8.0], [INF]):
        recorded.step(a=values)
    signals = [Event.model_validate({**event, "group_mates": (0,)}).signal for event in recorded.events().values()]
    assert [(one.rule, one.op, one.value, one.mean) for one in signals] == [
        ("AnomalyTurbulence", "norm", 8.0, 2.0),
        ("AnomalyTurbulence", "mean", 8.0, 2.0),
        ("AnomalyNan", "infs", 1.0, None),
    ]


def test_names_that_hold_quotes_and_newlines_survive(recorded: Recorded) -> None:
    recorded.step({"actv": [Measured('a"\\\n,ä', [NAN])]})
    [(key, event)] = recorded.events().items()
    assert event["tag_name"] == '0:a"\\\n,ä/rank0/actv'
    assert key == event["tag_name"] + "_step_1_call_0"


def test_without_events_there_is_the_word_of_that_and_nothing_else(recorded: Recorded) -> None:
    for _ in range(3):
        recorded.step(a=[1.0])
    recorded.scanner.save()
    assert [path.name for path in recorded.folder.iterdir()] == ["judged.json"]
    found = recorded.judged()
    assert (found.events, found.steps.ranges, found.closed) == (0, ((1, 3, 1),), False)


def test_it_says_whose_events_they_are(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, facts(3))
    recorded.scanner.close()
    found = recorded.judged()
    assert (found.job_id, found.rank, found.directory, found.recording) == ("job", 3, "Dec03-rank0-12345678", 0)
    assert (found.host, found.closed) == (socket.gethostname(), True)


def test_a_further_recording_of_the_process_has_files_of_its_own(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, facts(recording=2))
    recorded.step(a=[NAN])
    assert sorted(path.name for path in recorded.folder.iterdir()) == ["anomaly-2.json", "judged-2.json"]
    assert len(recorded.events("anomaly-2.json")) == recorded.judged("judged-2.json").events == 1


def test_steps_that_were_lost_before_they_were_judged_are_listed_by_reason(recorded: Recorded) -> None:
    recorded.step(a=[1.0])
    for step in (2, 3, 5):
        recorded.scanner.dropped(step, "queue full")
    recorded.scanner.dropped(4, "could not be read")
    recorded.scanner.save()
    not_judged = {reason: list(steps.steps()) for reason, steps in recorded.judged().not_judged.items()}
    assert not_judged == {"queue full": [2, 3, 5], "could not be read": [4]}


def test_of_a_flood_the_first_of_a_step_are_kept_and_the_rest_is_counted_by_rule(recorded: Recorded) -> None:
    recorded.step(**{f"t{i}": [1.0] for i in range(1500)})
    recorded.step(**{f"t{i}": [9.0] if i % 3 else [NAN] for i in range(1500)})
    recorded.scanner.save()
    events, judged = recorded.events(), recorded.judged()
    rules = [Event.model_validate({**event, "group_mates": (0,)}).signal.rule for event in events.values()]
    assert (rules.count("AnomalyNan"), rules.count("AnomalyTurbulence")) == (500, 1000)
    assert (judged.events, judged.not_kept) == (1500, {"AnomalyTurbulence": 1000})
    places = [event["call_id"] for event in events.values()]
    assert places == sorted(places)


def test_a_stream_of_harmless_events_does_not_push_out_the_nan_that_comes_after_it(recorded: Recorded) -> None:
    for value in [1.0, 1e3] * 30:
        recorded.step(**{f"t{i}": [value] for i in range(500)})
    recorded.step(t1=[NAN])
    recorded.scanner.close()
    assert recorded.judged().not_kept.keys() == {"AnomalyTurbulence"}
    assert list(recorded.events())[-1] == "0:t1/rank0/actv_step_61_call_0"


def test_after_a_write_twenty_times_its_duration_passes_before_the_next(recorded: Recorded) -> None:
    recorded.clock.tick = 1.0
    recorded.step(a=[NAN])
    recorded.clock.tick = 0.0
    for seconds, expected in ((0.0, 1), (19.0, 1), (1.1, 4)):
        recorded.clock.now += seconds
        recorded.step(a=[NAN])
        assert len(recorded.events()) == expected


def test_saving_writes_what_has_yet_to_be_written_at_once(recorded: Recorded) -> None:
    recorded.clock.tick = 1.0
    recorded.step(a=[NAN])
    recorded.step(a=[NAN])
    recorded.scanner.save()
    assert len(recorded.events()) == 2


def test_what_could_not_be_written_is_written_when_it_can_be_again(recorded: Recorded) -> None:
    recorded.folder.parent.write_text("in the way")
    with pytest.raises(OSError, match="rank0"):
        recorded.step(a=[NAN])
    recorded.step(a=[NAN])  # too soon to be tried again
    with pytest.raises(OSError, match="rank0"):
        recorded.scanner.save()
    recorded.folder.parent.unlink()
    recorded.clock.now += 1.0
    recorded.step(b=[1.0])
    recorded.step(a=[NAN])
    assert len(recorded.events()) == recorded.judged().events == 3


def test_a_forked_child_writes_nothing(recorded: Recorded) -> None:
    child = os.fork()
    if not child:
        try:
            recorded.step(a=[NAN])
            recorded.scanner.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not recorded.folder.exists()


def test_no_draft_is_left(recorded: Recorded) -> None:
    for _ in range(3):
        recorded.step(a=[NAN])
        recorded.scanner.save()
    assert sorted(path.name for path in recorded.folder.iterdir()) == ["anomaly.json", "judged.json"]


def test_a_step_whose_events_could_not_be_kept_does_not_count_as_judged(recorded: Recorded) -> None:
    recorded.files._formatter.series = {}
    with pytest.raises(KeyError):
        recorded.step(a=[NAN])
    recorded.scanner.save()
    assert recorded.judged().steps.count == 0
