"""What is said of events, and how little of very many."""

from __future__ import annotations

from pathlib import Path

import pytest
from rule_parts import NAN, Watched
from sink_rows import Measured

from monitor.anomalies.listeners import Alerts

UNRANKED = ' It may come from another tensor or rank: set "dump": true in "alert"; trainermon rank-anomalies finds the first.'


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Said:
    """A rank under both rules that says what it finds.

    Attributes:
        alerts: Who says it.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture, where: Path | None = None) -> None:
        self._caplog = caplog
        self.clock = Clock()
        self.watched = Watched(("AnomalyNan", None), ("AnomalyTurbulence", 0.5))
        self.alerts = Alerts(3, self.watched.rank.series, where, self.clock)
        self.watched.scanner._listeners = (self.watched, self.alerts)

    def step(self, nans: int = 0, **tensors: list[float]) -> list[str]:
        """What is said of a step with so many tensors of NaN, ``n0``, ``n1`` … and these."""
        self._caplog.clear()
        self.watched.step(**{f"n{i}": [NAN] for i in range(nans)}, **tensors)
        return self.lines()

    def lines(self) -> list[str]:
        """What was said since the last step, without how to rank it; each is a warning."""
        return [line.removesuffix(UNRANKED) for line in self.whole_lines()]

    def whole_lines(self) -> list[str]:
        """What was said since the last step; each is a warning."""
        said = [record.getMessage() for record in self._caplog.records if record.levelname == "WARNING"]
        assert len(said) == len(self._caplog.records)
        self._caplog.clear()
        return said


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    return Said(caplog)


def of_nan(name: str, step: int) -> str:
    tag = f"0:{name}/rank3/actv"
    return f"[rank 3] Rule AnomalyNan reports anomaly signal in ('{tag}', 'nans') at step {step}. Value 1."


def test_an_alert_says_step_rank_tensor_value_and_running_mean(said: Said) -> None:
    assert said.step(a=[10.0, 10.0]) == []
    assert said.step(a=[30.0, -10.0]) == [
        "[rank 3] Rule AnomalyTurbulence reports anomaly signal in ('0:a/rank3/actv', 'norm') at step 2. "
        "Value 31.6228, running mean 14.1421."
    ]


def test_of_a_nan_it_says_how_many(said: Said) -> None:
    assert said.step(nans=2) == [of_nan("n0", 1), of_nan("n1", 1)]


def test_of_very_many_the_earliest_ten_are_said_and_how_many_more_there_were(said: Said) -> None:
    *lines, rest = said.step(nans=1010)
    assert lines == [of_nan(f"n{i}", 1) for i in range(10)]
    assert rest == "[rank 3] … and 1,000 more of AnomalyNan (nans) in step 1, not shown."


@pytest.mark.parametrize("kind", ["param_origin", "replica"])
def test_the_weights_that_a_step_began_with_come_before_its_forward(kind: str, said: Said) -> None:
    """They are measured at the end of the step. A rank measures a replica of a weight that another rank writes."""
    name = "w" if kind == "param_origin" else "param_origin/w"
    others = [Measured("exp_avg/w", [NAN])] if kind == "replica" else []
    kinds = {"actv": [Measured(f"n{i}", [NAN]) for i in range(20)], kind: [*others, Measured(name, [NAN])]}
    said.watched.step(kinds)
    first, second, *_ = said.lines()
    assert f"{name}/rank3/{kind}'" in first
    assert "n0/rank3/actv'" in second


def test_it_is_said_where_they_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        Said(caplog, Path("out/anomaly_detected/rank3")).step(nans=11)[-1].endswith("not shown. See out/anomaly_detected/rank3")
    )


def test_lines_of_a_cause_that_are_left_are_said_in_the_steps_that_follow_and_then_no_more(said: Said) -> None:
    assert [len(said.step(nans=4)) for _ in range(5)] == [4, 4, 3, 0, 0]


def test_after_a_minute_what_was_passed_over_is_said_and_lines_are_said_again(said: Said) -> None:
    for _ in range(3):
        said.step(nans=20)
    said.clock.now += 60
    more, *lines, rest = said.step(nans=11)
    assert more == "[rank 3] 40 more of AnomalyNan (nans) in steps 2 to 3, not shown."
    assert lines == [of_nan(f"n{i}", 4) for i in range(10)]
    assert rest == "[rank 3] … and 1 more of AnomalyNan (nans) in step 4, not shown."


def test_what_was_passed_over_is_said_by_the_next_saving_after_the_minute_and_once(said: Said) -> None:
    said.step(nans=20)
    said.step(nans=20)
    said.alerts.save()
    assert said.lines() == []
    said.clock.now += 60
    said.alerts.save()
    said.alerts.save()
    said.alerts.close()
    assert said.lines() == ["[rank 3] 20 more of AnomalyNan (nans) in step 2, not shown."]


def test_nothing_passed_over_is_left_unsaid_at_the_end(said: Said) -> None:
    said.step(nans=10)
    said.step(nans=3)
    said.alerts.close()
    assert said.lines() == ["[rank 3] 3 more of AnomalyNan (nans) in step 2, not shown."]


def test_another_cause_has_lines_of_its_own(said: Said) -> None:
    said.step(nans=20, a=[10.0])
    assert len(said.step(nans=20, a=[100.0])) == 2


def test_an_alert_is_one_line_whatever_the_name_of_the_tensor(said: Said) -> None:
    [line] = said.step(**{"new\nline\x1b[2J": [NAN]})
    assert "'0:new\\nline\\x1b[2J/rank3/actv'" in line
    assert line.isprintable()


def rankings(said: Said, nans: int = 0, **tensors: list[float]) -> list[str]:
    """Of each line the end that says how to rank."""
    said.watched.step(**{f"n{i}": [NAN] for i in range(nans)}, **tensors)
    return [line.partition(" To find the first: ")[2] for line in said.whole_lines()]


def test_the_first_line_of_each_cause_names_the_command_that_ranks_and_its_directory(caplog: pytest.LogCaptureFixture) -> None:
    said = Said(caplog, Path("out/anomaly_detected/rank3"))
    command = "trainermon rank-anomalies out/anomaly_detected"
    assert rankings(said, nans=2, a=[1.0]) == [command, ""]
    assert rankings(said, nans=1, a=[9.0]) == ["", command, command]  # of the norm and of the mean
    assert rankings(said, nans=1) == [""]
    said.clock.now += 60
    assert rankings(said, nans=2) == [command, ""]


def test_the_directory_is_quoted_as_a_shell_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    assert rankings(Said(caplog, Path("my runs/anomaly_detected/rank3")), nans=1) == [
        "trainermon rank-anomalies 'my runs/anomaly_detected'"
    ]


def test_where_events_are_not_written_the_first_line_says_what_to_switch_on(said: Said) -> None:
    said.watched.step(n=[NAN])
    [line] = said.whole_lines()
    assert line.endswith(UNRANKED)
