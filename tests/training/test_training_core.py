"""From what is known of steps to what is shown of them, without any framework."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

import pytest
from shown import scalars, texts as shown_texts

from monitor.failures import LOGGER, Failures
from monitor.training.config import TrainingConfig, training_config_in
from monitor.training.expert_load import ExpertCounts, combined, load
from monitor.training.norms import recorded
from monitor.training.reporting import EventWriter, LogWriter, MetricsWriter, Outputs, Reporting, texts
from monitor.training.step import (
    MOST_WAITING,
    Rates,
    RunScalars,
    Scalar,
    StateScalars,
    StepFacts,
    StepJoiner,
    StepNorms,
    ThroughputMeter,
)

BOARD = "tensorboard: {tensorboard_dir: tb, log_loss_scale_to_tensorboard: true, log_timers_to_tensorboard: true}\n"
BOTH = frozenset({"log", "tensorboard"})


def config(text: str = BOARD) -> TrainingConfig:
    return training_config_in("train.yaml", text)


def state(fields: str, board: str = BOARD) -> TrainingConfig:
    return config(f"monitor_config: {{monitor_on: true, {fields}}}\n{board}")


def facts(step: int = 3, **more: object) -> StepFacts:
    return StepFacts(step, ended=float(step), **more)


class TestPace:
    def test_rates_are_of_the_steps_since_they_were_last_asked_for(self) -> None:
        pace = ThroughputMeter(devices=4)
        pace.begin(10.0)
        pace.add(8, 1e12)
        pace.add(8, 1e12)
        assert pace.rates(14.0) == Rates(2.0, 16 / 4.0 / 4, 0.5, 16 / 4.0 * 86_400 / 1e9)
        pace.add(8, None)
        assert pace.rates(15.0) == Rates(1.0, 8 / 1.0 / 4, None, 8 * 86_400 / 1e9)

    def test_a_step_of_unknown_size_leaves_no_throughput(self) -> None:
        pace = ThroughputMeter(1)
        pace.begin(0.0)
        pace.add(8, None)
        pace.add(None, None)
        assert pace.rates(2.0) == Rates(1.0)


class TestJoining:
    def joined(self) -> tuple[StepJoiner, list[tuple[int, int | None]]]:
        whole: list[tuple[int, int | None]] = []
        return StepJoiner(lambda facts, norms: whole.append((facts.step, None if norms is None else norms.step))), whole

    def test_facts_wait_for_their_norms(self) -> None:
        joining, whole = self.joined()
        joining.facts(facts(1, measured=0))
        assert whole == []
        joining.norms(0, StepNorms(0))
        assert whole == [(1, 0)]

    def test_norms_that_come_first_wait_for_their_facts(self) -> None:
        joining, whole = self.joined()
        joining.norms(0, StepNorms(0))
        joining.facts(facts(1, measured=0))
        assert whole == [(1, 0)]

    def test_a_step_that_was_not_recorded_waits_for_nothing_but_those_before_it(self) -> None:
        joining, whole = self.joined()
        joining.facts(facts(1, measured=0))
        joining.facts(facts(2))
        assert whole == []
        joining.norms(0, None)
        assert whole == [(1, None), (2, None)]

    def test_norms_of_a_later_step_say_that_earlier_ones_are_lost(self) -> None:
        joining, whole = self.joined()
        joining.facts(facts(1, measured=0))
        joining.norms(1, StepNorms(1))
        joining.facts(facts(2, measured=1))
        assert whole == [(1, None), (2, 1)]

    def test_what_waits_is_bounded(self) -> None:
        joining, whole = self.joined()
        for step in range(MOST_WAITING + 2):
            joining.facts(facts(step, measured=step))
        assert whole == [(0, None), (1, None)]
        joining.pass_on_all()
        assert len(whole) == MOST_WAITING + 2


class TestRunScalars:
    def test_every_metric_stands_under_its_name(self) -> None:
        known = facts(samples=24, batch_size=8, loss=1.5, grad_norm=lambda: 2.5, loss_scale=1024.0, learning_rate=0.1)
        found = RunScalars(config()).of(known, None, Rates(0.5, 16.0, 3.0, 0.25))
        assert found == [
            Scalar("loss", 1.5, 3, BOTH, 24),
            Scalar("learning-rate", 0.1, 3, BOTH, 24),
            Scalar("batch-size", 8, 3, BOTH, 24),
            Scalar("loss-scale", 1024.0, 3, BOTH, 24),
            Scalar("grad-norm", 2.5, 3, BOTH, 24),
            Scalar("iteration-time", 0.5, 3, BOTH, 24),
            Scalar("throughput", 16.0, 3, BOTH, 24),
            Scalar("model-flops-throughput-per-npu", 3.0, 3, BOTH),
            Scalar("B-samples-per-day", 0.25, 3, BOTH),
        ]

    def test_timers_and_loss_scale_go_to_tensorboard_only_where_asked_for(self) -> None:
        plain = RunScalars(config("tensorboard: {tensorboard_dir: tb}"))
        found = plain.of(facts(batch_size=8, loss_scale=2.0), None, Rates(0.5, 16.0, None, 0.25))
        assert {one.tag for one in found if "tensorboard" not in one.where} == {
            "loss-scale",
            "iteration-time",
            "throughput",
            "B-samples-per-day",
        }

    def test_the_gradient_norm_that_somebody_computed_comes_before_that_of_rows(self) -> None:
        run = RunScalars(config())
        told = run.of(facts(grad_norm=2.0), StepNorms(2, gradient=1.0), Rates(1.0))
        rows = run.of(facts(), StepNorms(2, gradient=1.0, loss_scale=8.0), Rates(1.0))
        assert {one.tag: one.value for one in told}["grad-norm"] == 2.0
        assert {one.tag: one.value for one in rows}["grad-norm"] == 1.0
        assert {one.tag: one.value for one in rows}["loss-scale"] == 8.0

    def test_what_is_not_known_is_not_shown(self) -> None:
        assert [one.tag for one in RunScalars(config()).of(facts(), None, Rates(1.0))] == ["iteration-time"]


class TestStateScalars:
    norms = StepNorms(2, {"a": 3.0, "b": 4.0}, 5.0, {"a": 0.1, "b": 0.2}, {"a": 0.01, "b": 0.02}, 7.0)

    def shown(self, config: TrainingConfig, facts: StepFacts, throughput: float | None = None) -> dict[str, tuple[int, float]]:
        return {one.tag: (one.x, one.value) for one in StateScalars(config).of(facts, self.norms, throughput)}

    def test_nothing_is_shown_unless_asked_for(self) -> None:
        assert self.shown(state("step_interval: 1"), facts(local_losses=(1.0,)), 3.0) == {}

    def test_norms_of_gradients_and_weights_are_of_the_step_and_moments_of_the_one_before(self) -> None:
        wanted = ", ".join(
            f"{one}_format: log" for one in ("local_norm", "device_local_norm", "optimizer_state", "weight_state")
        )
        assert self.shown(state(wanted), facts()) == {
            "local_norm/a": (3, 3.0),
            "local_norm/b": (3, 4.0),
            "device_local_norm": (3, 5.0),
            "adam_m_norm/a": (2, 0.1),
            "adam_m_norm/b": (2, 0.2),
            "adam_v_norm/a": (2, 0.01),
            "adam_v_norm/b": (2, 0.02),
            "weight_norm": (3, 7.0),
        }

    @pytest.mark.parametrize(("invert", "names"), [("false", {"a"}), ("true", {"b"})])
    def test_targets_choose_parameters_of_local_norm_and_of_moments_alone(self, invert: str, names: set[str]) -> None:
        wanted = (
            f"target: ['^a$'], invert: {invert}, local_norm_format: log, optimizer_state_format: log, weight_state_format: log"
        )
        shown = self.shown(state(wanted), facts())
        assert {tag.partition("/")[2] for tag in shown if "/" in tag} == names
        assert shown["weight_norm"] == (3, 7.0)

    def test_losses_of_micro_batches_stand_apart_and_as_their_sum(self) -> None:
        wanted = state("local_loss_format: log, device_local_loss_format: log")
        assert self.shown(wanted, facts(local_losses=(1.0, lambda: 0.5))) == {
            "local_loss/micro_step_0": (3, 1.0),
            "local_loss/micro_step_1": (3, 0.5),
            "device_accum_local_loss": (3, 1.5),
        }

    def test_the_loss_of_a_step_without_micro_batches_has_the_plain_name(self) -> None:
        assert self.shown(state("local_loss_format: log"), facts(local_losses=(1.0,))) == {"local_loss": (3, 1.0)}

    def test_linearity_is_the_ratio_to_the_baseline_and_goes_everywhere(self) -> None:
        (found,) = StateScalars(state("throughput_baseline: 4")).of(facts(), None, 3.0)
        assert found == Scalar("throughput_linearity", 0.75, 3, BOTH)


class TestRecorded:
    def test_nothing_is_recorded_where_no_norm_is_wanted(self) -> None:
        assert recorded(config(), grad_norm_is_told=True) is None

    def test_the_norm_of_gradients_is_recorded_where_no_one_tells_it(self) -> None:
        wanted = recorded(state("local_loss_format: log"), grad_norm_is_told=False)
        assert wanted is not None
        assert (wanted.wg_distribution, wanted.mv_distribution, wanted.param_distribution) == (True, False, False)

    @pytest.mark.parametrize(
        "text",
        [
            "{}",
            "monitor_config: null",
            "monitor_config: {monitor_on: false, local_norm_format: log, optimizer_state_format: log}",
        ],
    )
    def test_nothing_is_recorded_while_the_monitor_is_off(self, text: str) -> None:
        assert recorded(training_config_in("train.yaml", text), grad_norm_is_told=False) is None

    def test_only_steps_that_are_shown_are_recorded(self) -> None:
        wanted = recorded(state("step_interval: 10, weight_state_format: log"), grad_norm_is_told=True)
        assert wanted is not None
        assert (wanted.start_step, wanted.step_interval) == (9, 10)
        assert (wanted.wg_distribution, wanted.param_distribution) == (False, True)


class TestEvents:
    def test_numbers_stand_against_steps_and_against_samples(self, tmp_path: Path) -> None:
        events = EventWriter(tmp_path, 10)
        events.scalars([Scalar("loss", 0.5, 3, BOTH, 24), Scalar("weight_norm", 2.0, 3, BOTH)])
        events.scalars([Scalar("loss", math.nan, 4, BOTH, 32)])
        events.close()
        found = scalars(tmp_path)
        assert {tag: [x for x, _ in points] for tag, points in found.items()} == {
            "loss": [3, 4],
            "loss-vs-samples": [24, 32],
            "weight_norm": [3],
        }
        assert found["loss"][0][1] == 0.5
        assert math.isnan(found["loss"][1][1])

    def test_events_are_held_up_to_the_size_of_the_queue(self, tmp_path: Path) -> None:
        events = EventWriter(tmp_path, 2)
        for step in (1, 2):
            events.scalars([Scalar("loss", 1.0, step, BOTH)])
        assert list(tmp_path.iterdir()) == []
        events.scalars([Scalar("loss", 1.0, 3, BOTH)])
        assert len(scalars(tmp_path)["loss"]) == 3
        events.close()

    def test_a_second_run_leaves_the_file_of_the_first(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("kept")
        for step in (1, 2):
            events = EventWriter(tmp_path, 1)
            events.scalars([Scalar("loss", 1.0, step, BOTH, 8 * step)])
            events.close()
        assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 1.0)], "loss-vs-samples": [(8, 1.0), (16, 1.0)]}
        assert (tmp_path / "mine.txt").read_text() == "kept"


class TestTexts:
    def test_each_key_is_a_text(self, tmp_path: Path) -> None:
        events = EventWriter(tmp_path, 1)
        events.texts(texts(config(BOARD + "seed: 0\noptimizer: {type: AdamW}\n")))
        events.close()
        found = shown_texts(tmp_path)
        assert (found["seed"], found["optimizer"]) == ("0", "```\ntype: AdamW\n```")
        assert "throughput_baseline: null" in found["monitor_config"]
        assert set(found) == {"seed", "optimizer", "monitor_config", "tensorboard"}

    @pytest.mark.parametrize(
        ("document", "hidden"),
        [
            ("resume_training: false\nignore_data_skip: true", {"ignore_data_skip"}),
            ("resume_training: true\nignore_data_skip: true\ndata_skip_steps: 3", {"data_skip_steps"}),
            ("resume_training: true\nignore_data_skip: false\ndata_skip_steps: 3", set()),
            (
                "load_checkpoint: ''\nauto_trans_ckpt: true\ntransform_process_num: 2",
                {"auto_trans_ckpt", "transform_process_num"},
            ),
            ("load_checkpoint: x\nauto_trans_ckpt: true\ntransform_process_num: 2", set()),
            ("profile: false\nprofile_level: 1", {"profile_level"}),
            ("do_eval: true\neval_dataset: x", set()),
            ("lr_scale: false\nlr_scale_factor: 2", {"lr_scale_factor"}),
        ],
    )
    def test_what_another_key_makes_void_is_left_out(self, document: str, hidden: set[str]) -> None:
        read = config(document)
        assert set(read.document) - set(texts(read)) == hidden


class TestLog:
    def test_a_step_is_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, LOGGER.name):
            LogWriter(2, total=9).run(3, [Scalar("loss", 1.5, 3, BOTH), Scalar("iteration-time", 0.25, 3, BOTH)], 0.5)
        assert [one.getMessage() for one in caplog.records] == [
            "[rank 2] step 3 of 9: loss 1.5, iteration-time 0.25 s; 0.5 s since the last step"
        ]

    def test_what_is_not_finite_is_shown_and_its_reason_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        log = LogWriter(0)
        poisoned = [Scalar("loss", math.nan, 3, BOTH), Scalar("grad-norm", 1.0, 3, BOTH)]
        for step in (3, 4):
            reasons = log.reasons(step, poisoned, {"a": 1.0, "b": math.nan}, skipped=False)
        with caplog.at_level(logging.INFO, LOGGER.name):
            log.run(4, poisoned, 0.5, reasons)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == (
            "[rank 0] step 4: loss nan, grad-norm 1; 0.5 s since the last step; loss is nan, since step 3; "
            "these gradients are not finite: b"
        )

    def test_since_when_is_not_forgotten_in_steps_that_do_not_show_it(self) -> None:
        log = LogWriter(0)
        loss, other = Scalar("loss", math.nan, 2, BOTH), Scalar("device_local_norm", 1.0, 3, BOTH)
        log.reasons(2, [loss], {}, skipped=False)
        log.reasons(3, [other], {}, skipped=False)
        assert log.reasons(4, [loss], {}, skipped=False) == ["loss is nan, since step 2"]
        log.reasons(5, [Scalar("loss", 1.0, 5, BOTH)], {}, skipped=False)
        assert log.reasons(6, [loss], {}, skipped=False) == ["loss is nan, since step 6"]

    def test_a_metric_of_many_parameters_is_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, LOGGER.name):
            LogWriter(0).state([Scalar("local_norm/a", 1.0, 3, BOTH), Scalar("local_norm/b", 2.0, 3, BOTH)])
        assert [one.getMessage() for one in caplog.records] == ["[rank 0] step 3: local_norm a 1, b 2"]

    def test_the_shares_of_experts_are_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, LOGGER.name):
            LogWriter(0).load(3, {"a": [3, 0, 1], "b": [1, 1], "idle": [0, 0]})
        assert [one.getMessage() for one in caplog.records] == ["[rank 0] step 3: expert_load a 0.75 0 0.25; b 0.5 0.5"]

    def test_of_many_experts_the_least_and_the_greatest_share_is_recorded(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, LOGGER.name):
            LogWriter(0).load(3, {"a": [2] * 8 + [1] + [2] * 8 + [7]})
        (record,) = caplog.records
        assert record.getMessage().endswith("expert_load a of 18 experts from 0.025 (expert_8) to 0.175 (expert_17)")


class TestExpertLoad:
    def test_shares_sum_to_one(self) -> None:
        assert load([3, 0, 1]) == [0.75, 0.0, 0.25]
        assert load([0, 0]) == []

    def test_counts_of_ranks_add_up_and_shares_do_not(self, tmp_path: Path) -> None:
        for rank, tokens in enumerate(([3, 1], [0, 12])):
            counts = ExpertCounts(tmp_path / f"rank_{rank}", 2)
            counts.read(facts(1, tokens={"gate": lambda tokens=tokens: tokens}))
            counts.close()
        assert combined(tmp_path) == {1: {"gate": [3, 13]}}

    def count(self, base: Path, rank: int, world: int, steps: tuple[int, ...], tokens: list[int]) -> None:
        counts = ExpertCounts(base / f"rank_{rank}", world)
        for step in steps:
            counts.read(facts(step, tokens={"gate": lambda: tokens}))
        counts.close()

    def test_a_torn_line_spoils_no_line_of_the_run_that_follows(self, tmp_path: Path) -> None:
        self.count(tmp_path, 0, 1, (1,), [1, 0])
        with (tmp_path / "rank_0" / "expert_counts.jsonl").open("a") as file:
            file.write('{"step": 2, "tok')
        self.count(tmp_path, 0, 1, (2,), [0, 1])
        assert combined(tmp_path) == {1: {"gate": [1, 0]}, 2: {"gate": [0, 1]}}

    def test_an_earlier_run_of_more_ranks_and_more_steps_is_not_mixed_in(self, tmp_path: Path) -> None:
        for rank in range(3):
            self.count(tmp_path, rank, 3, (1, 2, 3), [5, 5])
        for rank in range(2):
            self.count(tmp_path, rank, 2, (1, 2), [1, 0])
        assert combined(tmp_path) == {1: {"gate": [2, 0]}, 2: {"gate": [2, 0]}}

    def test_a_job_that_was_resumed_with_fewer_ranks_keeps_its_earlier_steps(self, tmp_path: Path) -> None:
        for rank in range(2):
            self.count(tmp_path, rank, 2, (1, 2), [1, 1])
        self.count(tmp_path, 0, 1, (2, 3), [1, 0])
        assert combined(tmp_path) == {1: {"gate": [2, 2]}, 2: {"gate": [1, 0]}, 3: {"gate": [1, 0]}}

    def test_a_step_that_a_rank_lacks_and_a_torn_line_are_left_out(self, tmp_path: Path) -> None:
        for rank, steps in enumerate(((1, 2), (1,))):
            counts = ExpertCounts(tmp_path / f"rank_{rank}", 2)
            for step in steps:
                counts.read(facts(step, tokens={"gate": lambda: [1, 1]}))
            counts.close()
        with (tmp_path / "rank_1" / "expert_counts.jsonl").open("a") as file:
            file.write('{"step": 2, "tok')
        assert combined(tmp_path) == {1: {"gate": [2, 2]}}


class TestWriting:
    def writing(self, directory: Path, failures: Failures) -> MetricsWriter:
        reporting = Reporting(config(), 1, Outputs(LogWriter(0), EventWriter(directory, 1)), failures)
        return MetricsWriter(reporting, failures)

    def test_numbers_are_read_by_a_thread_of_its_own(self, tmp_path: Path) -> None:
        writing, read_by = self.writing(tmp_path, Failures()), []

        def loss() -> float:
            read_by.append(threading.current_thread().name)
            return 0.5

        writing.facts(facts(1, loss=loss))
        assert writing.close()
        assert read_by == ["monitor-training-rank0"]
        assert scalars(tmp_path)["loss"] == [(1, 0.5)]

    def test_what_waits_for_norms_is_shown_when_it_closes(self, tmp_path: Path) -> None:
        writing = self.writing(tmp_path, Failures())
        writing.facts(facts(1, loss=0.5, measured=0))
        writing.close()
        assert scalars(tmp_path)["loss"] == [(1, 0.5)]

    def test_a_number_that_cannot_be_read_is_said_once_and_the_next_step_is_shown(self, tmp_path: Path) -> None:
        failures = Failures()
        writing = self.writing(tmp_path, failures)

        def broken() -> float:
            raise RuntimeError("no such device")

        for step in (1, 2):
            writing.facts(facts(step, loss=broken))
        writing.facts(facts(3, loss=0.5))
        writing.close()
        assert dict(failures.counts) == {"reading what training reports: RuntimeError": 2}
        assert scalars(tmp_path)["loss"] == [(3, 0.5)]

    def test_a_directory_that_cannot_be_written_is_said_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        failures = Failures()
        writing = self.writing(tmp_path / "file", failures)
        for step in (1, 2, 3, 4):
            writing.facts(facts(step, loss=1.0))
        assert writing.close()
        assert dict(failures.counts) == {"writing to TensorBoard: NotADirectoryError ENOTDIR": 2}
