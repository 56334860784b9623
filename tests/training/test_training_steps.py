"""What a loop may do around its steps: scale losses, skip steps, compile, fail. Numbers stay right or are not shown."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shown import scalars
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from monitor.failures import LOGGER
from monitor.pytorch.training import TrainingMetrics

YAML = """
monitor_config:
    monitor_on: true
    dump_path: {base}/dump
    step_interval: {every}
    local_loss_format: tensorboard
    local_norm_format: tensorboard
    device_local_norm_format: tensorboard
tensorboard: {{tensorboard_dir: {base}/board, log_timers_to_tensorboard: true, log_loss_scale_to_tensorboard: true}}
"""
Shown = dict[str, list[tuple[int, float]]]


@pytest.fixture
def yaml(tmp_path: Path) -> Callable[..., Path]:
    def write(every: int = 1) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(YAML.format(base=tmp_path, every=every))
        return path

    return write


@pytest.fixture
def shown(tmp_path: Path) -> Callable[[], Shown]:
    return lambda: scalars(tmp_path / "board" / "rank_0")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def rows(step: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def norm(model: nn.Module, scale: float = 1.0) -> float:
    gradients = [parameter.grad.double().numpy().ravel() / scale for parameter in model.parameters()]
    return float(np.linalg.norm(np.concatenate(gradients)))


class TestScales:
    @pytest.mark.parametrize("fused", [True, False])
    def test_norms_under_a_grad_scaler_are_those_without_it(
        self, model: nn.Module, yaml: Any, shown: Any, *, fused: bool
    ) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with TrainingMetrics(yaml(), model, optimizer) as metrics, metrics.step():
            scaler.scale(model(rows()).square().mean()).backward()
            expected = norm(model, 1024.0)
            scaler.step(optimizer)
            scaler.update()
        assert shown()["grad-norm"] == [(1, pytest.approx(expected, rel=1e-5))]
        assert shown()["device_local_norm"] == [(1, pytest.approx(expected, rel=1e-5))]

    def test_what_was_unscaled_before_is_not_divided_again(self, model: nn.Module, yaml: Any, shown: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with TrainingMetrics(yaml(), model, optimizer) as metrics, metrics.step():
            scaler.scale(model(rows()).square().mean()).backward()
            scaler.unscale_(optimizer)
            expected = norm(model)
            scaler.step(optimizer)
        assert shown()["grad-norm"] == [(1, pytest.approx(expected, rel=1e-5))]

    def test_local_norms_are_divided_by_the_scale_that_a_loop_tells(self, model: nn.Module, yaml: Any, shown: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        with TrainingMetrics(yaml(), model, optimizer) as metrics, metrics.step() as step:
            step.loss_scale = 8.0
            (model(rows()).square().mean() * 8).backward()
            expected = norm(model, 8.0)
            for parameter in model.parameters():
                parameter.grad.div_(8.0)
            optimizer.step()
        for tag in ("device_local_norm", "grad-norm"):
            assert shown()[tag] == [(1, pytest.approx(expected, rel=1e-5))]


class TestFlops:
    def count(self, model: nn.Module, yaml: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(yaml(), model, **options) as metrics:
            for _ in range(2):
                with metrics.step() as step:
                    step.loss = model(rows()).mean()
        return caplog.text

    def test_a_compiled_model_is_trained_and_not_counted(
        self, model: nn.Module, yaml: Any, shown: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        said = self.count(compiled, yaml, caplog, model_flops="measure")
        assert said.count("operations of a compiled model: pass model_flops as a number") == 1
        assert "model-flops-throughput-per-npu" not in shown()

    def test_so_is_one_with_a_part_that_is_compiled_in_place(
        self, model: nn.Module, yaml: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model.compile(backend="eager")
        assert "operations of a compiled model" in self.count(nn.Sequential(model), yaml, caplog, model_flops="measure")

    def test_that_nothing_was_counted_is_said(self, yaml: Any, shown: Any, caplog: pytest.LogCaptureFixture) -> None:
        assert "No floating point operations were counted" in self.count(nn.ReLU(), yaml, caplog, model_flops="measure")
        assert "model-flops-throughput-per-npu" not in shown()

    def test_a_step_that_fails_leaves_no_counter_and_the_next_one_is_counted(
        self, model: nn.Module, yaml: Any, shown: Any
    ) -> None:
        with TrainingMetrics(yaml(), model, model_flops="measure") as metrics:
            with pytest.raises(RuntimeError, match="shape"), metrics.step():
                model(rows()).reshape(7)
            assert _get_current_dispatch_mode_stack() == []
            with metrics.step():
                model(rows())
        seconds = shown()["iteration-time"][0][1]
        flops = shown()["model-flops-throughput-per-npu"][0][1]
        assert flops * seconds * 1e12 == pytest.approx(2 * 6 * 4, rel=1e-4)


class TestSteps:
    def test_norms_go_on_after_a_step_without_an_optimizer_step(self, model: nn.Module, yaml: Any, shown: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        with TrainingMetrics(yaml(every=2), model, optimizer, grad_norm_is_told=True) as metrics:
            for number in range(6):
                with metrics.step():
                    model(rows(number)).mean().backward()
                    if number != 2:
                        optimizer.step()
                    optimizer.zero_grad()
        assert [x for x, _ in shown()["device_local_norm"]] == [2, 4, 6]

    def test_a_step_that_is_shown_and_was_not_recorded_is_said_once(
        self, model: nn.Module, yaml: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name):
            optimizer = torch.optim.SGD(model.parameters())
            with TrainingMetrics(yaml(), model, optimizer, grad_norm_is_told=True) as metrics:
                for _ in range(2):
                    with metrics.step():
                        pass
        assert caplog.text.count("has no norms: the tensor monitor has not recorded this step") == 1

    def test_time_before_the_first_step_belongs_to_none(self, yaml: Any, shown: Any) -> None:
        with TrainingMetrics(yaml()) as metrics:
            metrics.attach(None)
            time.sleep(0.02)
            begun = time.monotonic()
            with metrics.step():
                pass
            ended = time.monotonic()
        assert shown()["iteration-time"][0][1] <= (ended - begun) * (1 + 1e-6)

    def test_a_local_loss_is_what_it_was_when_it_was_given(self, yaml: Any, shown: Any) -> None:
        loss = torch.tensor(1.0)
        with TrainingMetrics(yaml()) as metrics, metrics.step() as step:
            step.local_loss(loss)
            loss.fill_(2.0)
        assert shown()["local_loss"] == [(1, 1.0)]

    def test_a_step_that_has_ended_keeps_no_tensor(self, yaml: Any) -> None:
        with TrainingMetrics(yaml()) as metrics:
            with metrics.step() as step:
                step.loss = torch.ones(1, requires_grad=True) * 2
                gone = weakref.ref(step.loss)
                step.local_loss(step.loss)
            gc.collect()
            assert gone() is None


class TestSamples:
    def test_an_integer_of_numpy_is_one(self, yaml: Any, shown: Any) -> None:
        with TrainingMetrics(yaml()) as metrics, metrics.step(np.int64(6)):
            pass
        assert shown()["batch-size"] == [(1, 6.0)]

    @pytest.mark.parametrize("size", [4.0, "4", -1, 0, True, torch.tensor([1, 2])], ids=str)
    def test_what_can_be_no_number_of_samples_is_said_and_the_rest_is_shown(
        self, size: Any, yaml: Any, shown: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(yaml()) as metrics, metrics.step(size) as step:
            step.loss = 1.0
        assert "and must be an integer above 0" in caplog.text
        assert shown()["loss"] == [(1, 1.0)]
        assert "batch-size" not in shown()


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"model_flops": "measured"}, "model_flops is 'measured' and must be a number, \"measure\" or None"),
            ({"model_flops": -1}, "model_flops is -1 and must be a number above 0"),
            ({"samples": 1.5}, r"^samples is 1.5 and must be an integer\.$"),
            ({"model": "m"}, "model is a str: expected the model itself"),
            ({"model": nn.Linear(1, 1), "optimizer": "opt"}, "optimizer is a str: expected the optimizer itself"),
        ],
        ids=str,
    )
    def test_an_argument_that_cannot_be_used_is_named(self, options: dict[str, Any], said: str, yaml: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=said):
            TrainingMetrics(yaml(), **options)

    def test_routers_that_are_not_there_leave_nothing_attached(self, model: nn.Module, tmp_path: Path) -> None:
        (tmp_path / "train.yaml").write_text(
            f"tensorboard: {{tensorboard_dir: {tmp_path}/board, log_expert_load_to_tensorboard: true}}"
        )
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="there is no module 'nope'"):
            TrainingMetrics(tmp_path / "train.yaml", model, optimizer, routers=["nope"])
        assert not optimizer._optimizer_step_pre_hooks
        assert not model._forward_hooks

    def test_norms_without_an_optimizer_are_said_to_be_missing(
        self, model: nn.Module, yaml: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, LOGGER.name), TrainingMetrics(yaml(), model):
            pass
        assert "are not shown: they need the model and its optimizer" in caplog.text
