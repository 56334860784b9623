"""Training metrics of a plain loop in PyTorch: what is shown equals what numpy makes of the same tensors."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shown import scalars
from torch import nn

from monitor.config import ConfigError
from monitor.coordinator.output import OutputError
from monitor.failures import LOGGER
from monitor.pipeline.process import PROCESS
from monitor.pytorch import TrainerMon
from monitor.pytorch.training import RunEnded, TrainingMetrics

STEPS = 4
SCALE = 2.0
EVERYTHING = """
monitor_config:
    monitor_on: true
    dump_path: {base}/dump
    local_loss_format: tensorboard
    device_local_loss_format: tensorboard
    local_norm_format: [log, tensorboard]
    device_local_norm_format: [log, tensorboard]
    optimizer_state_format: tensorboard
    weight_state_format: tensorboard
    throughput_baseline: 10
tensorboard:
    tensorboard_dir: {base}/board
    log_loss_scale_to_tensorboard: true
    log_timers_to_tensorboard: true
"""
RUN = """
monitor_config: {{dump_path: {base}/dump}}
tensorboard: {{tensorboard_dir: {base}/board}}
"""
Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A file with a configuration that writes below the test's directory."""

    def write(text: str) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(text.format(base=tmp_path))
        return path

    return write


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def norm(tensors: Any) -> float:
    return float(np.linalg.norm(np.concatenate([one.detach().double().numpy().ravel() for one in tensors])))


class Seen:
    """What a loop itself knows of its steps, one entry a step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, float]] = []
        self.total: list[float] = []
        self.first: list[dict[str, float]] = []
        self.second: list[dict[str, float]] = []
        self.weights: list[float] = []


def train(model: nn.Module, metrics: TrainingMetrics | None, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Seen:
    seen = Seen()

    def one_step(number: int) -> torch.Tensor:
        loss = model(batch(number)).square().mean()
        (loss * SCALE).backward()
        named = dict(model.named_parameters())
        for parameter in named.values():
            parameter.grad.div_(SCALE)
        seen.losses.append(loss.item())
        seen.gradients.append({name: norm([parameter.grad]) for name, parameter in named.items()})
        seen.total.append(norm([parameter.grad for parameter in named.values()]))
        optimizer.step()
        seen.first.append({name: norm([optimizer.state[parameter]["exp_avg"]]) for name, parameter in named.items()})
        seen.second.append({name: norm([optimizer.state[parameter]["exp_avg_sq"]]) for name, parameter in named.items()})
        seen.weights.append(norm(named.values()))
        optimizer.zero_grad()
        return loss

    for number in range(steps):
        if metrics is None:
            one_step(number)
        else:
            with metrics.step(batch_size=6) as step:
                step.loss = one_step(number)
                step.loss_scale = SCALE
    return seen


Run = tuple[Seen, dict[str, Any], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    base = tmp_path_factory.mktemp("run")
    (base / "train.yaml").write_text(EVERYTHING.format(base=base))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with TrainingMetrics(base / "train.yaml", model, optimizer, model_flops="measure") as metrics:
        seen = train(model, metrics, optimizer)
    return seen, scalars(base / "board" / "rank_0"), base


class TestEverything:
    def values(self, shown: dict[str, Any], tag: str) -> list[float]:
        return [value for _, value in shown[tag]]

    def test_training_has_the_same_bits(self, run: Run) -> None:
        model = network()
        plain = train(model, None, torch.optim.AdamW(model.parameters(), lr=0.01))
        assert (plain.losses, plain.weights) == (run[0].losses, run[0].weights)

    @pytest.mark.parametrize(
        "tag", ["loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput"]
    )
    def test_a_metric_stands_against_steps_and_samples(self, run: Run, tag: str) -> None:
        shown = run[1]
        assert [x for x, _ in shown[tag]] == [1, 2, 3, 4]
        assert [x for x, _ in shown[f"{tag}-vs-samples"]] == [6, 12, 18, 24]
        assert self.values(shown, tag) == self.values(shown, f"{tag}-vs-samples")

    @pytest.mark.parametrize("tag", ["model-flops-throughput-per-npu", "B-samples-per-day", "weight_norm"])
    def test_others_stand_against_steps_alone(self, run: Run, tag: str) -> None:
        assert [x for x, _ in run[1][tag]] == [1, 2, 3, 4]
        assert f"{tag}-vs-samples" not in run[1]

    def test_loss_and_learning_rate_are_those_of_the_loop(self, run: Run) -> None:
        seen, shown, _ = run
        for tag in ("loss", "local_loss", "device_accum_local_loss"):
            assert self.values(shown, tag) == pytest.approx(seen.losses, rel=1e-7)
        assert self.values(shown, "learning-rate") == pytest.approx([0.01] * STEPS, rel=1e-6)
        assert self.values(shown, "loss-scale") == [2.0] * STEPS

    def test_norms_of_gradients_are_numpys(self, run: Run) -> None:
        seen, shown, _ = run
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            expected = [one[name] for one in seen.gradients]
            assert self.values(shown, f"local_norm/{name}") == pytest.approx(expected, rel=1e-6)
        for tag in ("device_local_norm", "grad-norm"):
            assert self.values(shown, tag) == pytest.approx(seen.total, rel=1e-6)

    def test_norms_of_moments_stand_at_the_step_that_left_them(self, run: Run) -> None:
        seen, shown, _ = run
        for tag, moments in (("adam_m_norm", seen.first), ("adam_v_norm", seen.second)):
            found = shown[f"{tag}/2.weight"]
            assert [x for x, _ in found] == [1, 2, 3]
            assert [value for _, value in found] == pytest.approx([one["2.weight"] for one in moments[:3]], rel=1e-6)

    def test_the_norm_of_weights_is_numpys(self, run: Run) -> None:
        assert self.values(run[1], "weight_norm") == pytest.approx(run[0].weights, rel=1e-6)

    def test_rates_agree_with_each_other(self, run: Run) -> None:
        shown = run[1]
        seconds = self.values(shown, "iteration-time")
        assert self.values(shown, "throughput") == pytest.approx([6 / one for one in seconds], rel=1e-5)
        assert self.values(shown, "throughput_linearity") == pytest.approx([0.6 / one for one in seconds], rel=1e-5)
        assert self.values(shown, "B-samples-per-day") == pytest.approx([6 / one * 86400 / 1e9 for one in seconds], rel=1e-5)

    def test_flops_are_those_of_the_matrix_products(self, run: Run) -> None:
        shown = run[1]
        products = 2 * 6 * (4 * 8 + 8 * 1)  # forward; as many again for the weights, and of the second layer for its input
        flops = products + products + 2 * 6 * 8
        seconds = self.values(shown, "iteration-time")
        expected = [flops / one / 1e12 for one in seconds]
        assert self.values(shown, "model-flops-throughput-per-npu") == pytest.approx(expected, rel=1e-5)

    def test_the_recording_is_kept_below_dump_path(self, run: Run) -> None:
        (directory,) = (path for path in (run[2] / "dump").iterdir() if "-rank0" in path.name)
        assert {path.suffix for path in directory.iterdir()} >= {".json", ".h5"}


class TestOneAtATime:
    def test_the_norm_that_a_loop_tells_is_shown(self, written: Written, tmp_path: Path) -> None:
        model = network()
        with TrainingMetrics(written(RUN), model, grad_norm_is_told=True) as metrics, metrics.step() as step:
            step.grad_norm = torch.tensor(3.5)
        assert scalars(tmp_path / "board" / "rank_0")["grad-norm"] == [(1, 3.5)]
        assert not (tmp_path / "dump").exists()

    def test_every_so_many_steps_are_shown(self, written: Written, tmp_path: Path) -> None:
        text = RUN + "callbacks: [{{type: MFLossMonitor, per_print_times: 2}}]\n"
        with TrainingMetrics(written(text)) as metrics:
            for number in range(5):
                with metrics.step(batch_size=1) as step:
                    step.loss = float(number)
        assert scalars(tmp_path / "board" / "rank_0")["loss"] == [(2, 1.0), (4, 3.0)]

    def test_a_run_continues_counting(self, written: Written, tmp_path: Path) -> None:
        with TrainingMetrics(written(RUN), start_step=10, samples=80) as metrics, metrics.step(batch_size=8) as step:
            step.loss = 1.0
        shown = scalars(tmp_path / "board" / "rank_0")
        assert (shown["loss"], shown["loss-vs-samples"]) == ([(11, 1.0)], [(88, 1.0)])

    def test_a_step_that_raises_is_not_shown(self, written: Written, tmp_path: Path) -> None:
        with TrainingMetrics(written(RUN)) as metrics:
            with pytest.raises(ZeroDivisionError), metrics.step():
                raise ZeroDivisionError
            with metrics.step() as step:
                step.loss = 1.0
        assert scalars(tmp_path / "board" / "rank_0")["loss"] == [(1, 1.0)]

    def test_a_number_is_what_it_was_when_the_step_ended(self, written: Written, tmp_path: Path) -> None:
        loss = torch.tensor(1.0)
        with TrainingMetrics(written(RUN)) as metrics:
            with metrics.step() as step:
                step.loss = loss
            loss.fill_(2.0)
        assert scalars(tmp_path / "board" / "rank_0")["loss"] == [(1, 1.0)]

    def test_what_is_no_number_is_said_and_the_rest_is_shown(
        self, written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(written(RUN)) as metrics, metrics.step() as step:
            step.loss = torch.zeros(3)
            step.grad_norm = 1.0
        assert "expected a number or a tensor of one element, got a tensor of shape (3,)" in caplog.text
        shown = scalars(tmp_path / "board" / "rank_0")
        assert "loss" not in shown
        assert shown["grad-norm"] == [(1, 1.0)]

    def test_each_number_that_is_none_is_named(self, written: Written, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(written(RUN)) as metrics:
            for _ in range(2):
                with metrics.step() as step:
                    step.loss = torch.zeros(3)
                    step.grad_norm = "big"
                    step.local_loss(None)
                    step.local_loss("small")
        names = ("loss", "grad_norm", "local_loss")
        assert [caplog.text.count(f"reading {name} of a step failed") for name in names] == [1, 1, 1]

    def test_what_a_step_does_not_have_is_said_once(
        self, written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(written(RUN)) as metrics:
            for _ in range(2):
                with metrics.step() as step:
                    step.loss, step.grad_nrm = 1.0, 3.0  # type: ignore[attr-defined]
        assert caplog.text.count("A step has no attribute 'grad_nrm'") == 1
        assert scalars(tmp_path / "board" / "rank_0")["loss"] == [(1, 1.0), (2, 1.0)]

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ("target: ['layers.0']", "target ['layers.0'] selects no parameter"),
            ("target: ['weight|bias'], invert: true", "target ['weight|bias'] with invert selects no parameter"),
            ("target: ['0.weight']", ""),
            ("target: ['layers.0'], monitor_on: false", ""),
        ],
    )
    def test_a_target_that_selects_nothing_is_said(
        self, fields: str, said: str, written: Written, caplog: pytest.LogCaptureFixture
    ) -> None:
        on = "" if "monitor_on" in fields else "monitor_on: true, "
        section = f"monitor_config: {{{{{on}dump_path: {{base}}/dump, {fields}, optimizer_state_format: log}}}}"
        model = network()
        with (
            caplog.at_level(logging.WARNING, LOGGER.name),
            TrainingMetrics(written(section), model, torch.optim.Adam(model.parameters())),
        ):
            pass
        assert ("selects no parameter" in caplog.text) == bool(said)
        assert said in caplog.text
        assert ("adam_m_norm and adam_v_norm are not shown. Its parameters have names like '0.weight'" in caplog.text) == bool(
            said
        )

    @pytest.mark.parametrize("field", ["monitor_config.dump_path", "tensorboard.tensorboard_dir"])
    def test_a_directory_that_cannot_be_made_is_refused_by_the_name_of_its_field(
        self, field: str, written: Written, tmp_path: Path
    ) -> None:
        (tmp_path / field.split(".")[0].replace("monitor_config", "dump").replace("tensorboard", "board")).touch()
        model = network()
        with pytest.raises(OutputError, match=f"name another one in {field}"):
            TrainingMetrics(written(EVERYTHING), model, torch.optim.Adam(model.parameters()))

    def test_the_names_of_parameters_are_printed_and_end_the_run(
        self, written: Written, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = network()
        model[0].bias.requires_grad_(False)
        metrics = TrainingMetrics(written("monitor_config: {{monitor_on: true, print_struct: true}}"), model)
        with caplog.at_level(logging.INFO, LOGGER.name), pytest.raises(RunEnded), metrics.step():
            pass
        assert "3 trainable parameters:\n0.weight\n2.weight\n2.bias" in caplog.text

    def test_norms_are_read_from_a_monitor_that_there_is(
        self, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
        (tmp_path / "monitor.json").write_text('{"wg_distribution": true, "ops": ["norm"]}')
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        monitor = TrainerMon(tmp_path / "monitor.json", params_have_main_grad=False)
        monitor.set_monitor(model, 1, optimizer)
        with monitor, TrainingMetrics(written(EVERYTHING), model, optimizer, monitor=monitor) as metrics:
            seen = train(model, metrics, optimizer)
        shown = scalars(tmp_path / "board" / "rank_0")
        assert [value for _, value in shown["device_local_norm"]] == pytest.approx(seen.total, rel=1e-6)
        assert "weight_norm" not in shown
        assert not (tmp_path / "dump").exists()

    def test_metrics_that_are_not_referenced_keep_no_model(self, written: Written) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        metrics = TrainingMetrics(written(EVERYTHING), model, optimizer)
        train(model, metrics, optimizer, 2)
        gone = weakref.ref(model)
        del model, optimizer, metrics
        gc.collect()
        assert gone() is None
        PROCESS.close_all()  # what the interpreter does at its exit

    def test_a_second_model_is_refused(self, written: Written) -> None:
        model = network()
        with (
            TrainingMetrics(written(EVERYTHING), model, torch.optim.AdamW(model.parameters())) as metrics,
            pytest.raises(RuntimeError, match=r"have a model already\. Create new ones for another model"),
        ):
            metrics.attach(network())

    def test_a_configuration_is_refused_before_anything_is_attached(self, written: Written) -> None:
        with pytest.raises(ConfigError, match="expected true or false"):
            TrainingMetrics(written("monitor_config: {{monitor_on: 3}}"), network())

    def test_a_copy_of_a_watched_model_is_free(self, written: Written) -> None:
        model = network()
        with TrainingMetrics(written(EVERYTHING), model, torch.optim.AdamW(model.parameters())):
            copied = copy.deepcopy(model)
        assert copied(batch(0)).shape == (6, 1)
