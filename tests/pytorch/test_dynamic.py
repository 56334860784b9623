"""Dynamic start and stop in one process: the scenarios of the documentation, with real training and real files."""

from __future__ import annotations

import json

import pytest
import torch
from switched import GRADIENTS, training
from torch import nn
from watching import Output, warnings_in

from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.pytorch import TrainerMon
from monitor.sinks.csv import read_csv


@pytest.fixture(autouse=True)
def _dynamic_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


def test_without_the_variable_dynamic_on_is_ignored(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIC_MONITOR")
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        one.train(3)
    assert one.steps() == [0, 1, 2]
    assert one.log() == []


@pytest.mark.parametrize("config", [{"dynamic_on": False}, {}])
def test_nothing_is_recorded_while_dynamic_on_is_false_or_not_there(output: Output, config: dict[str, bool]) -> None:
    with training(output, wg_distribution=True, xy_distribution=True, **config) as one:
        one.train(4)
    assert list(output.directory().glob("*.csv")) == []
    assert one.log() == [("start", 1, False)]


def test_what_is_on_from_the_start_is_recorded_from_the_step_after_the_first_until_collect_times(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 3, "start_step": 100}) as one:
        one.train(8)
    assert one.steps() == [1, 2, 3]
    assert json.loads(one.path.read_text())["dynamic_on"] is False
    assert one.log() == [("start", 1, True)]


def test_switched_on_by_an_edit_it_counts_from_the_next_step_whatever_start_step_says(output: Output) -> None:
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        one.train(4)
        one.edit(**GRADIENTS, start_step=1000, step_interval=3, collect_times=3)
        one.train(12)
    assert one.steps() == [5, 8, 11]


def test_at_collect_times_the_file_says_so_and_is_otherwise_as_it_was(output: Output) -> None:
    text = '{\n  // cheap\n  "wg_distribution": true, "dynamic_on": true,  /* on */\n  "collect_times": 2,\n}\n'
    with training(output, text) as one:
        one.train(4)
        one.look()
        assert one.path.read_text() == text.replace('"dynamic_on": true', '"dynamic_on": false')
        one.train(3)
    assert one.steps() == [1, 2]


def test_changed_before_its_end_it_goes_over_to_other_kinds_ops_and_targets_and_counts_anew(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 4}) as one:
        one.train(2)
        targets = {"0": {}}
        one.edit(dynamic_on=True, xy_distribution=True, forward_only=True, ops=["max", "min"], targets=targets, collect_times=4)
        one.train(8)
    assert one.steps() == [1, 2]
    assert one.steps("actv") == [3, 4, 5, 6]
    assert one.steps("actv_grad") == []
    assert {row.name for row in output.rows("actv")} == {"0.input", "0.output"}
    assert {tuple(row.values) for row in output.rows("actv")} == {("max", "min")}
    assert {tuple(row.values) for row in output.rows("grad_reduced")} == {("norm",)}


def test_collect_times_0_stops_early(output: Output) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, collect_times=0)
        one.train(3)
    assert one.steps() == [1, 2]


def test_after_its_end_it_can_be_switched_on_again_and_counts_anew(output: Output) -> None:
    with training(output, **GRADIENTS | {"collect_times": 2}) as one:
        one.train(5)
        one.look()
        one.edit(**GRADIENTS, collect_times=3)
        one.train(8)
    assert one.steps() == [1, 2, 6, 7, 8]
    assert [since for _, since, _ in one.log()] == [1, 6]


def test_a_bad_edit_is_said_once_and_what_was_before_continues(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, step_interval=0)
        one.look(3)
        one.train(2)
    assert one.steps() == [1, 2, 3]
    (said,) = [line for line in warnings_in(caplog) if "stays in force" in line]
    assert "step_interval: 0 is not allowed" in said


def test_what_only_a_start_can_do_is_refused(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, print_struct=True)
        one.look(3)
        one.train(2)
    assert one.steps() == [1, 2, 3]
    assert "print_struct" in "".join(warnings_in(caplog))


def test_a_record_that_is_open_when_the_ops_change_ends_there_and_each_header_fits(output: Output) -> None:
    with training(output, **GRADIENTS | {"step_count_per_record": 10}) as one:
        one.train(3)
        one.edit(**GRADIENTS | {"step_count_per_record": 10, "ops": ["min", "max"]})
        one.train(5)
    tables = [read_csv(path) for path in sorted(output.directory().glob("grad_reduced_*.csv"))]
    found = {tuple(table.column_names[3:]): sorted(set(table["step"].to_pylist())) for table in tables}
    assert found == {("norm",): [1, 2, 3], ("min", "max"): [4, 5, 6, 7]}


def test_another_length_of_records_and_number_of_digits_hold_from_the_switch_on(output: Output) -> None:
    with training(output, **GRADIENTS | {"ndigits": 12}) as one:
        one.train(3)
        one.edit(**GRADIENTS, ndigits=2, step_count_per_record=4)
        one.train(5)
    names = sorted(path.name for path in output.directory().glob("grad_reduced_*.csv"))
    assert names == [f"grad_reduced_{span}.csv" for span in ("1-1", "2-2", "3-3", "4-7")]
    digits = {row.step: max(len(f"{row.values['norm']!r}".split(".")[1]), 0) for row in output.rows("grad_reduced")}
    assert all(digits[step] > 2 for step in (1, 2, 3))
    assert all(digits[step] <= 2 for step in (4, 5, 6, 7))


@pytest.mark.parametrize("formats", [("csv", "hdf5"), ("hdf5", "csv"), ("tensorboard", "csv")])
def test_a_format_holds_from_the_switch_on_and_a_merge_finds_all_steps(output: Output, formats: tuple[str, ...]) -> None:
    before, after = formats
    with training(output, **GRADIENTS | {"format": before, "step_count_per_record": 10}) as one:
        one.train(3)
        one.edit(**GRADIENTS | {"format": after, "step_count_per_record": 10, "step_interval": 2})
        one.train(5)
        one.edit(**GRADIENTS | {"format": before, "step_count_per_record": 10})
        one.train(3)
    wanted = {"tensorboard": [4, 6, 8]}.get(before, [1, 2, 3, 4, 6, 8, 9, 10])
    report = merge(Wanted(output.base, output.base / "merged"))
    (merged,) = (output.base / "merged" / "per_rank").glob("grad_reduced_*")
    steps = sorted(read_merged(merged)["step"].to_pylist())
    assert steps == [step for step in wanted for _ in range(4)]
    assert report.clean or before == "tensorboard"
    assert output.manifest()["formats"] == [before, after]


def test_eps_is_that_of_each_step(output: Output) -> None:
    with training(output, **GRADIENTS | {"ops": ["zeros"]}) as one:
        one.train(1)
        one.edit(**GRADIENTS | {"ops": ["zeros"]}, eps=1e6)
        one.train(3)
    zeros = {(row.step, row.values["zeros"]) for row in output.rows("grad_reduced")}
    assert {(step, share) for step, share in zeros if step >= 2} == {(2, 1.0), (3, 1.0)}
    assert (1, 1.0) not in zeros


def test_activations_have_their_rows_in_the_step_of_the_switch_and_stacks_that_of_their_first_step(output: Output) -> None:
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        one.train(1)
        one.edit(dynamic_on=True, stack_info=True, xy_distribution=True, all_xy=True)
        one.train(4)
    (stacks,) = output.directory().glob("stack_info*.csv")
    assert len(stacks.read_text().splitlines()) > 3
    assert one.steps("actv") == one.steps("actv_grad") == [2, 3, 4]


def test_alert_rules_begin_and_end_with_a_configuration(output: Output) -> None:
    rules = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    with training(output, **GRADIENTS) as one:
        one.train(1)
        one.edit(**GRADIENTS, alert=rules)
        one.train(1)
        one.train(1, x=float("nan"))
        one.edit(**GRADIENTS)
        one.train(3)
    (events,) = output.base.glob("anomaly_detected/rank0/anomaly*.json")
    (judged,) = (json.loads(path.read_text()) for path in output.base.glob("anomaly_detected/rank0/judged*.json"))
    assert {event["step"] for event in json.loads(events.read_text()).values()} == {2, 3}
    assert (judged["steps"]["ranges"], judged["closed"]) == ([[2, 3, 1]], True)


def test_set_monitor_called_again_continues_with_what_is_in_force_and_its_count(output: Output) -> None:
    with training(output, **GRADIENTS) as one:
        one.train(2)
        one.edit(**GRADIENTS, start_step=50, step_interval=2, collect_times=3)
        one.train(3)
        one.attach()
        one.train(6)
    assert one.steps() == [1, 2, 3, 5, 7]
    assert json.loads(one.path.read_text())["dynamic_on"] is False


def test_two_recordings_in_one_process_follow_the_same_file_each_for_itself(output: Output) -> None:
    with training(output, **GRADIENTS | {"dynamic_on": False}) as one:
        other = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        one.monitor.set_monitor(other, 1, optimizer)
        one.train(1)
        for step in range(5):
            other(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == 1:
                one.path.write_text(json.dumps(GRADIENTS))
                for recording in one.monitor._recordings:
                    recording.switching._control._watching.turn()
        one.train(2)
    recorded = {tuple(sorted({row.step for row in output.rows("grad_reduced", found)})) for found in output.directories()}
    assert recorded == {(2,), (3, 4)}


@pytest.mark.parametrize("trained", [0, 1, 3])
@pytest.mark.parametrize("config", [{"dynamic_on": False}, GRADIENTS])
def test_closed_in_any_state_it_leaves_whole_files_and_no_thread(
    output: Output, trained: int, config: dict[str, object]
) -> None:
    with training(output, **config) as one:
        one.train(trained)
        one.monitor.close()
        one.monitor.close()
        one.train(2)
    assert output.manifest()["closed"] is True
    assert one.steps() == (list(range(1, trained)) if config is GRADIENTS else [])


def test_in_a_context_that_ends_at_once_nothing_is_left(output: Output) -> None:
    path = output.base.parent / "config.json"
    path.write_text(json.dumps(GRADIENTS))
    with TrainerMon(path):
        pass
    assert output.directories() == []


def test_updates_and_histograms_are_switched_on_and_off_like_everything_else(output: Output) -> None:
    deep = {"update_ratio": True, "mg_direction": True, "ops": ["norm", "underflow_fp16"]}
    with training(output, **GRADIENTS) as one:
        one.train(3)
        one.edit(**GRADIENTS | deep)
        one.train(3)
        one.edit(**GRADIENTS)
        one.train(3)
    assert one.steps("update_ratio") == [4, 5, 6]
    assert one.steps("other") == [4, 5, 6]
    with_shares = [path.stem for path in output.directory().glob("grad_reduced_*.csv") if "underflow" in path.read_text()]
    assert sorted(with_shares) == ["grad_reduced_4-4", "grad_reduced_5-5", "grad_reduced_6-6"]
    cells = [row.values["underflow_fp16"] for row in output.rows("grad_reduced") if "underflow_fp16" in row.values]
    assert len(cells) == 12
    assert None not in cells


@pytest.mark.parametrize("changed", [{"ops": ["norm", "max"]}, {"dynamic_on": False}, {"run_numbers": False}])
def test_a_loss_after_the_optimizer_belongs_to_the_step_before_a_change(output: Output, changed: dict[str, object]) -> None:
    """Also together with one that was logged before the optimizer: the mean of both is recorded."""
    config = GRADIENTS | {"run_numbers": True}
    with training(output, **config) as one:
        for step in range(6):
            loss = one.model(torch.ones(2, 3)).square().sum()
            loss.backward()
            one.monitor.log(loss=step)
            if step == 3:
                one.edit(**config | changed)
            one.optimizer.step()
            one.monitor.log(loss=3 * step)
    losses = {row.step: row.values["value"] for row in output.rows("run") if row.name == "loss"}
    recorded = [1, 2, 3] if "ops" not in changed else [1, 2, 3, 4, 5]
    assert losses == {step: 2 * step for step in recorded}
