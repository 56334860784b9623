"""Training metrics of ``mindspore.train.Model``: two ranks that ``msrun`` has started, and numpy beside them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, dataset, nn, ops
from mindspore.train import Callback, FixedLossScaleManager, Model, RunContext
from ranks import Ranks, run_ranks, running

from monitor.failures import LOGGER
from monitor.mindspore.features.choices import chosen_in, count_on_host
from monitor.mindspore.training import (
    MFLossMonitor,
    RunEnded,
    TopkBiasBalanceCallback,
    TrainingMetrics,
    TrainingMetricsCallback,
    TrainingStateMonitor,
)
from monitor.recording.features.reading import NotARouterError
from monitor.training.expert_load import combined

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

from shown import EVERYTHING as YAML, Points, scalars

STEPS = [1, 2, 3]
RUN = {"loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput"}
UNSCALED = RUN - {"loss-scale"}
ALONE = {"model-flops-throughput-per-npu", "B-samples-per-day"}
STATE = {"device_accum_local_loss", "device_local_norm", "weight_norm", "throughput_linearity", "local_loss"}
EXPERTS = {f"expert_load/gate/expert_{expert}" for expert in range(4)}
OF_PARAMETERS = {f"{one}/last.{which}" for one in ("local_norm", "adam_m_norm", "adam_v_norm") for which in ("weight", "bias")}


class Job(NamedTuple):
    """A job that has ended: what numpy makes of each rank, what it has in TensorBoard, what it said."""

    base: Path
    told: list[dict[str, Any]]
    shown: list[dict[str, Points]]
    ranks: Ranks

    def values(self, rank: int, tag: str) -> list[float]:
        points = self.shown[rank][tag]
        assert [x for x, _ in points] == STEPS
        return [value for _, value in points]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    base = tmp_path_factory.mktemp("job")
    (base / "train.yaml").write_text(YAML.format(base=base))
    ranks = run_ranks(2, "metrics_of_model.py", base / "run", base / "train.yaml", base)
    assert ranks.status == 0, [rank.said for rank in ranks.ranks]
    assert running(base / "run") == []
    told = [json.loads((base / f"rank{rank}.json").read_text()) for rank in range(2)]
    return Job(base, told, [scalars(base / "board" / f"rank_{rank}") for rank in range(2)], ranks)


def test_all_metrics_of_every_rank_are_in_tensorboard(job: Job) -> None:
    expected = {*RUN, *(f"{one}-vs-samples" for one in RUN), *ALONE, *STATE, *OF_PARAMETERS, *EXPERTS}
    for shown in job.shown:
        assert set(shown) == expected


def test_all_metrics_of_every_rank_are_in_the_log(job: Job) -> None:
    for number, rank in enumerate(job.ranks.ranks):
        lines = [line for line in rank.said.splitlines() if f"[rank {number}] step 3" in line]
        for metric in {*RUN, *ALONE, *STATE, "local_norm", "expert_load"}:
            assert any(f" {metric} " in line for line in lines), metric
        for metric in ("adam_m_norm", "adam_v_norm"):
            assert f"[rank {number}] step 2: {metric} last.weight " in rank.said
        assert rank.warnings == []


def test_losses_and_norms_are_numpys(job: Job) -> None:
    for rank, told in enumerate(job.told):
        for tag, expected in {
            "loss": "loss",
            "local_loss": "loss",
            "device_accum_local_loss": "loss",
            "device_local_norm": "local",
            "local_norm/last.weight": "local_weight",
            "weight_norm": "weights",
        }.items():
            assert job.values(rank, tag) == pytest.approx(told[expected], rel=1e-5), tag


def test_moments_stand_at_the_step_that_left_them(job: Job) -> None:
    for tag, expected in {"adam_m_norm/last.weight": "m", "adam_v_norm/last.weight": "v"}.items():
        points = job.shown[0][tag]
        assert [x for x, _ in points] == [1, 2]
        # 1 - 0.999 in single precision is off by more than the norm is.
        assert [value for _, value in points] == pytest.approx(job.told[0][expected][:2], rel=1e-4)


def test_the_gradient_norm_is_the_global_one(job: Job) -> None:
    for rank in range(2):
        assert job.values(rank, "grad-norm") == pytest.approx(job.told[0]["global"], rel=1e-5)


def test_the_loss_scale_is_that_of_the_optimizer(job: Job) -> None:
    assert job.values(0, "loss-scale") == [1024.0] * 3


def test_samples_are_those_of_all_ranks(job: Job) -> None:
    assert job.values(0, "batch-size") == [4, 4, 4]
    assert [x for x, _ in job.shown[0]["loss-vs-samples"]] == [4, 8, 12]


def test_experts_have_the_shares_that_their_counts_make_and_counts_add_up(job: Job) -> None:
    for rank, told in enumerate(job.told):
        for expert in range(4):
            assert job.values(rank, f"expert_load/gate/expert_{expert}") == [tokens[expert] / 2 for tokens in told["tokens"]]
    both = np.add(job.told[0]["tokens"], job.told[1]["tokens"]).tolist()
    assert combined(job.base / "dump") == {step: {"gate": both[step - 1]} for step in STEPS}


class TestOneRank:
    @pytest.fixture
    def model(self) -> Model:
        network = nn.Dense(2, 1)
        return Model(network, nn.MSELoss(), nn.Adam(network.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 1)))

    @pytest.fixture
    def batches(self) -> Any:
        x = np.ones((4, 2), np.float32)
        return dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(2)

    @pytest.fixture
    def yaml(self, tmp_path: Path) -> Callable[[str], Path]:
        def write(text: str) -> Path:
            path = tmp_path / "train.yaml"
            path.write_text(text.format(base=tmp_path))
            return path

        return write

    def test_each_callback_shows_its_own(self, model: Model, batches: Any, yaml: Any, tmp_path: Path) -> None:
        path = yaml(YAML)
        model.train(
            1,
            batches,
            callbacks=[MFLossMonitor(path), TrainingStateMonitor(path), TopkBiasBalanceCallback(path)],
            dataset_sink_mode=False,
        )
        shown = scalars(tmp_path / "board" / "rank_0")
        run = UNSCALED - {"grad-norm"}  # MFLossMonitor has no `monitor_on`, and records no gradients
        assert {tag.partition("/")[0] for tag in shown} == {
            *run,
            *(f"{one}-vs-samples" for one in run),
            "B-samples-per-day",
            *STATE,
            "local_norm",
            "adam_m_norm",
            "adam_v_norm",
        }
        assert [len(points) for points in shown.values()] == [1 if tag.startswith("adam") else 2 for tag in shown]

    def test_the_learning_rate_of_a_schedule_is_that_of_the_step(
        self, model: Model, batches: Any, yaml: Any, tmp_path: Path
    ) -> None:
        model.train(1, batches, callbacks=[MFLossMonitor(yaml(YAML))], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")["learning-rate"]
        assert shown == [(1, pytest.approx(0.1)), (2, pytest.approx(0.05))]

    def test_the_names_of_parameters_are_printed_and_end_the_run(
        self, model: Model, batches: Any, yaml: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        monitor = TrainingStateMonitor(yaml("monitor_config: {{monitor_on: true, print_struct: true}}"))
        with caplog.at_level(logging.INFO, LOGGER.name), pytest.raises(RunEnded):
            model.train(1, batches, callbacks=[monitor], dataset_sink_mode=False)
        assert "2 trainable parameters:\nweight\nbias" in caplog.text
        assert monitor.metrics is not None
        assert monitor.metrics.steps == 1

    def test_norms_under_a_fixed_loss_scale_are_those_without_it(self, yaml: Any, tmp_path: Path) -> None:
        scale, x = 1024.0, np.ones((2, 2), np.float32)
        network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        optimizer = nn.Adam(network.trainable_params(), 0.1, loss_scale=scale)
        manager = FixedLossScaleManager(scale, drop_overflow_update=False)
        model = Model(network, nn.MSELoss(), optimizer, loss_scale_manager=manager)
        batches = dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(2)
        model.train(1, batches, callbacks=[TrainingMetricsCallback(yaml(YAML))], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")
        expected = np.linalg.norm([2.0, 2.0, 2.0])  # each row is off by 1
        for tag in ("grad-norm", "device_local_norm"):
            assert shown[tag] == [(1, pytest.approx(expected, rel=1e-5))], tag
        assert shown["loss-scale"] == [(1, scale)]

    def test_a_cell_that_trains_by_itself_has_the_scale_that_its_step_began_with(self, yaml: Any, tmp_path: Path) -> None:
        class NeverOverflows(nn.TrainOneStepWithLossScaleCell):
            """On a CPU MindSpore cannot tell."""

            def get_overflow_status(self, *_: Any) -> Tensor:
                return Tensor(False)

        x = np.ones((6, 2), np.float32)
        network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        doubles = nn.DynamicLossScaleUpdateCell(1024, 2, 2)
        optimizer = nn.SGD(network.trainable_params(), 0.0)
        cell = NeverOverflows(nn.WithLossCell(network, nn.MSELoss()), optimizer, doubles)
        batches = dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(2)
        Model(cell).train(1, batches, callbacks=[TrainingMetricsCallback(yaml(YAML))], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")
        assert shown["loss-scale"] == [(1, 1024.0), (2, 1024.0), (3, 2048.0)]
        expected = np.linalg.norm([2.0, 2.0, 2.0])
        for tag in ("grad-norm", "device_local_norm"):
            assert [value for _, value in shown[tag]] == pytest.approx([expected] * 3, rel=1e-5), tag

    def test_the_last_batch_may_be_smaller(self, model: Model, yaml: Any, tmp_path: Path) -> None:
        x = np.ones((3, 2), np.float32)
        batches = dataset.NumpySlicesDataset({"x": x, "y": x[:, :1]}, shuffle=False).batch(2)
        model.train(1, batches, callbacks=[MFLossMonitor(yaml(YAML))], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")
        assert shown["batch-size"] == [(1, 2.0), (2, 1.0)]
        assert [x for x, _ in shown["loss-vs-samples"]] == [2, 3]

    def test_steps_of_earlier_epochs_count(self, model: Model, batches: Any, yaml: Any, tmp_path: Path) -> None:
        model.train(2, batches, callbacks=[TrainingMetricsCallback(yaml(YAML))], dataset_sink_mode=False, initial_epoch=1)
        shown = scalars(tmp_path / "board" / "rank_0")
        assert [x for x, _ in shown["loss"]] == [3, 4]
        assert [x for x, _ in shown["device_local_norm"]] == [3, 4]

    def test_a_training_that_follows_one_that_failed_begins_anew(
        self, model: Model, batches: Any, yaml: Any, tmp_path: Path
    ) -> None:
        class Fails(Callback):
            def on_train_step_begin(self, _: Any) -> None:
                raise ZeroDivisionError

        metrics = TrainingMetricsCallback(yaml(YAML))
        with pytest.raises(ZeroDivisionError):
            model.train(1, batches, callbacks=[metrics, Fails()], dataset_sink_mode=False)
        model.train(1, batches, callbacks=[metrics], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")
        assert [x for x, _ in shown["loss"]] == [x for x, _ in shown["device_local_norm"]] == [1, 2]

    def test_a_plain_loop_shows_its_steps(self, yaml: Any, tmp_path: Path) -> None:
        network = nn.Dense(2, 1)
        network.set_train(True)
        optimizer = nn.Adam(network.trainable_params(), 0.1)
        gradients_of = mindspore.value_and_grad(lambda x: network(x).square().mean(), None, optimizer.parameters)
        losses = []
        with TrainingMetrics(yaml(YAML), network, optimizer) as metrics:
            for _ in range(2):
                with metrics.step(batch_size=3) as step:
                    step.loss, gradients = gradients_of(Tensor(np.ones((3, 2), np.float32)))
                    optimizer(gradients)
                    losses.append(float(step.loss.asnumpy()))
        shown = scalars(tmp_path / "board" / "rank_0")
        assert [value for _, value in shown["loss"]] == pytest.approx(losses)
        assert [x for x, _ in shown["device_local_norm"]] == [1, 2]

    @pytest.mark.parametrize("replaces", [True, False])
    def test_a_rate_that_a_compiled_optimizer_does_not_use_is_not_shown(
        self, replaces: bool, yaml: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Changes(Callback):
            def on_train_step_end(self, context: RunContext) -> None:
                rate = context.original_args().optimizer.learning_rate
                rate.set_data(Tensor(0.5)) if replaces else ops.assign(rate, Tensor(0.5))

        network = nn.Dense(2, 1)
        model = Model(network, nn.MSELoss(), nn.Adam(network.trainable_params(), 0.1))
        batches = dataset.NumpySlicesDataset(dict.fromkeys("xy", np.ones((3, 2), np.float32)), shuffle=False).batch(1)
        # The rate changes before the metrics see the step's end.
        model.train(1, batches, callbacks=[Changes(), MFLossMonitor(yaml(YAML))], dataset_sink_mode=False)
        shown = scalars(tmp_path / "board" / "rank_0")["learning-rate"]
        later = [] if replaces else [(2, 0.5), (3, 0.5)]
        assert shown == [(1, pytest.approx(0.1)), *later]
        said = [one for one in caplog.messages if "of Adam were replaced after its first step" in one]
        assert len(said) == replaces

    @pytest.mark.parametrize("given", [list, tuple, lambda optimizers: {"first": optimizers[0]}])
    def test_a_rate_that_was_replaced_is_not_shown_of_the_first_of_several(self, given: Any, yaml: Any, tmp_path: Path) -> None:
        network = nn.Dense(2, 1)
        optimizer = nn.Adam(network.trainable_params(), 0.1)
        gradients_of = mindspore.value_and_grad(lambda x: network(x).square().mean(), None, optimizer.parameters)
        with TrainingMetrics(yaml(YAML), network, given([optimizer])) as metrics:
            for _ in range(2):
                with metrics.step(batch_size=3) as step:
                    step.loss, gradients = gradients_of(Tensor(np.ones((3, 2), np.float32)))
                    optimizer(gradients)
                optimizer.learning_rate.set_data(Tensor(0.5))
        assert scalars(tmp_path / "board" / "rank_0")["learning-rate"] == [(1, pytest.approx(0.1))]

    @pytest.mark.parametrize("make", [nn.Adam, nn.SGD])
    @pytest.mark.parametrize("replaces", [True, False])
    def test_a_compiled_step_shows_the_rate_until_it_is_replaced_and_warns_of_nothing_else(
        self, replaces: bool, make: type[nn.Cell], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "train.yaml").write_text(f"tensorboard: {{tensorboard_dir: {tmp_path / 'board'}}}\n")
        network = nn.Dense(2, 1)
        optimizer = make(network.trainable_params(), 0.1)

        def loss_of(x: Tensor) -> Tensor:
            return network(x).square().mean()

        gradients_of = mindspore.value_and_grad(loss_of, None, optimizer.parameters)

        @mindspore.jit
        def train(x: Tensor) -> Tensor:
            loss, gradients = gradients_of(x)
            optimizer(gradients)
            return loss

        with TrainingMetrics(tmp_path / "train.yaml", network, optimizer) as metrics:
            for _ in range(2):
                with metrics.step(batch_size=3) as step:
                    step.loss = train(Tensor(np.ones((3, 2), np.float32)))
                if replaces:
                    optimizer.learning_rate.set_data(Tensor(0.5))
        shown = scalars(tmp_path / "board" / "rank_0")["learning-rate"]
        assert shown == [(step, pytest.approx(0.1)) for step in ([1] if replaces else [1, 2])]
        said = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
        assert ["replaced after its first step" in one for one in said] == [True] * replaces


class Arguments(dict[str, Any]):
    """What ``Model`` gives to callbacks: a dict with attributes."""


def test_calls_in_which_a_device_runs_several_steps_are_not_shown_as_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU runs one step in a call. The callback is called here as ``Model`` calls it on a device."""
    (tmp_path / "train.yaml").write_text(f"tensorboard: {{tensorboard_dir: {tmp_path / 'board'}}}\n")
    training: Any = Arguments()
    training.network = training.train_network = nn.Dense(2, 1)
    training.optimizer = nn.SGD(training.network.trainable_params(), 0.1)
    training.train_dataset = dataset.NumpySlicesDataset({"x": np.ones((4, 2), np.float32)}, shuffle=False).batch(2)
    training.cur_step_num, training.net_outputs = 0, Tensor(1.0)
    context, callback = RunContext(training), TrainingMetricsCallback(tmp_path / "train.yaml")
    callback.on_train_begin(context)
    for advance in (1, 3, 3, 1):
        callback.on_train_epoch_begin(context)
        training.cur_step_num += advance
        callback.on_train_step_begin(context)
        callback.on_train_step_end(context)
    callback.on_train_end(context)
    assert scalars(tmp_path / "board" / "rank_0")["loss"] == [(1, 1.0)]
    assert [one.partition(":")[0] for one in caplog.messages if "in one call" in one] == [
        "[rank 0] The device runs 3 steps in one call, so their numbers and times are not known"
    ]


def test_a_token_without_an_expert_counts_for_none() -> None:
    assert count_on_host(np.array([[0, -1], [1, 2], [1, 0]]), 2).tolist() == [2, 2]


def test_of_several_tensors_of_integers_the_one_of_as_many_as_are_chosen_is_taken() -> None:
    cell = nn.Cell()
    cell.num_experts = 4
    found = Tensor(np.zeros((3, 2), np.int32)), Tensor(np.zeros((3, 5), np.int32))
    with pytest.raises(NotARouterError):
        chosen_in(cell, found)
    cell.top_k = 2
    assert chosen_in(cell, found)[0].shape == (3, 2)
