"""From training to the ranking: what the rules have judged is counted, and what was not judged is never called well."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from switched import GRADIENTS, training
from torch.optim import SGD
from typer.testing import CliRunner
from watching import Output, attached, train, warnings_in

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.listeners import EventFiles
from monitor.anomalies.ranking.cli import app
from monitor.recording import run
from monitor.report.cli import app as report

RULES: dict[str, Any] = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
WEIGHTS: dict[str, Any] = {"wg_distribution": True, "param_distribution": True, "ops": ["norm"], **RULES}


def ranked(output: Output) -> tuple[int, str]:
    """Exit status and what was said, in one line."""
    result = CliRunner().invoke(app, ["-d", str(output.base / EVENTS_FOLDER)], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.split())


def trained(output: Output, steps: int = 3, start: int = 0, **config: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=1e-3)
    with attached(output, model, optimizer, start_iteration=start, **config):
        train(model, optimizer, steps, torch.ones(2, 3))


@pytest.mark.parametrize("config", [RULES, {**RULES, "targets": {"0": {}}}, {**RULES, "update_ratio": True}])
def test_rules_without_a_kind_to_judge_are_a_warning_and_a_ranking_that_has_not_looked(
    output: Output, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    trained(output, **config)
    assert any('"wg_distribution": true' in said for said in warnings_in(caplog))
    status, said = ranked(output)
    assert (status, "Not judged: no rank recorded a row" in said, "No event in" in said) == (1, True, False)


def test_a_healthy_run_is_reported_with_the_rows_that_were_recorded(output: Output) -> None:
    trained(output, steps=5, **WEIGHTS)
    kinds = {path.stem.rpartition("_")[0] for path in output.directory().glob("*.csv")}
    rows = sum(len(output.rows(kind)) for kind in kinds)
    assert rows == 5 * 4 * 4  # gradients before and after aggregation, weights before and after the step
    assert ranked(output) == (0, ranked(output)[1])
    assert ranked(output)[1].endswith(f"No event in {rows} rows of 1 rank in 5 steps.")


def test_a_run_whose_epochs_end_with_fewer_micro_batches_is_healthy_and_says_which_rows_are_missing(output: Output) -> None:
    """As where the number of batches is no multiple of gradient_accumulation_steps, and gradients are clipped by value."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=1e-3)
    with attached(output, model, optimizer, grad_acc_steps=3, **WEIGHTS):
        for micro_batches in (3, 3, 2, 3, 3, 1, 3, 3, 2, 3, 3, 1):
            for _ in range(micro_batches):
                model(torch.randn(2, 3)).square().mean().backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    told = CliRunner().invoke(report, [str(output.base), "-o", str(output.base.parent / "page.html")])
    said = " ".join(told.output.split())
    assert {row.step for row in output.rows("grad_unreduced")} == {0, 1, 3, 4, 6, 7, 9, 10}
    assert (told.exit_code, "Healthy: nothing wrong was found in" in said) == (0, True), said
    assert "In step 2, the last of the micro-batches of grad_acc_steps (3) did not reach 4 gradients, aggregated" in said


def test_of_gradients_that_were_clipped_together_none_is_called_the_cause(output: Output) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=1e-3)
    with attached(output, model, optimizer, wg_distribution=True, wg_reduced_only=True, format="parquet"):
        for step in range(5):
            model(torch.ones(2, 3)).sum().backward()
            if step == 3 and model[1].weight.grad is not None:
                model[1].weight.grad[0, 0] = torch.nan
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    told = CliRunner().invoke(report, [str(output.base), "-o", str(output.base.parent / "page.html")]).output
    assert "Gradients had been changed together before, as by clipping: any of them may be the cause." in " ".join(told.split())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"collect_times": 2}, "steps 12 to 16: collect_times is 2"),
        ({"start_step": 12}, "steps 10 to 11: start_step is 12"),
        ({"step_interval": 5}, "5 of the steps 11 to 16: step_interval is 5"),
    ],
)
def test_steps_that_the_schedule_leaves_out_are_said(output: Output, config: dict[str, Any], said: str) -> None:
    trained(output, steps=7, start=10, **WEIGHTS, **config)
    status, told = ranked(output)
    assert (status, f"Not judged: {said}." in told) == (1, True), told


def test_a_step_in_which_the_rules_fail_is_said(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.anomalies.scanner.own_columns", lambda _kind: 1 / 0)
    trained(output, steps=2, **WEIGHTS)
    status, told = ranked(output)
    assert (status, "Not judged: steps 0 to 1: the rules failed: ZeroDivisionError" in told) == (1, True), told


def ranked_with_rules_from_step_5_on(output: Output) -> str:
    """What the ranking says of a run that recorded four steps before its rules were switched on."""
    with training(output, **GRADIENTS) as one:
        one.train(4)
        one.edit(**GRADIENTS, **RULES)
        one.train(4)
    status, told = ranked(output)
    assert (status, "steps 1 to 4: they were recorded, but no alert rule was on or could judge them" in told) == (1, True), told
    return told


def test_steps_that_were_recorded_before_rules_were_switched_on_are_said(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    told = ranked_with_rules_from_step_5_on(output)
    assert "Not judged: step 0: monitoring was switched off, or had not begun." in told


def test_steps_before_the_rules_are_said_also_if_training_ends_before_the_writer_has_switched_them_on(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def late(*arguments: Any) -> EventFiles:
        assert ended.wait(20)
        return EventFiles(*arguments)

    trained = run.Run.trained

    def end(one: run.Run, first: int, last: int) -> None:
        trained(one, first, last)
        ended.set()

    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    monkeypatch.setattr(run, "EventFiles", late)
    monkeypatch.setattr(run.Run, "trained", end)
    ranked_with_rules_from_step_5_on(output)
