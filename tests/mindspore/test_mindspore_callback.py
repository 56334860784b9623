"""The monitor where ``mindspore.train.Model`` trains."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, footprint, steps_of, warnings_in, with_fixed_weights
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model
from training import array

from monitor.config import ConfigError, MonitorConfig
from monitor.mindspore import MonitorCallback, RunEnded
from monitor.report.checks import checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import GOOD

KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated")
STEPS = 4


class Layers(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 5)
        self.b = nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(ops.tanh(self.a(x)))


class Sometimes(nn.TrainOneStepCell):
    """Calls the optimizer once for so many batches, but leaves it out the second time, as loss scaling may."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, batches: int = 1) -> None:
        super().__init__(network, optimizer)
        self._batches = batches
        self._calls = 0

    def construct(self, *inputs: Tensor) -> Tensor:
        self._calls += 1
        loss = self.network(*inputs)
        gradients = self.grad_no_sens(self.network, self.weights)(*inputs)
        if self._calls % self._batches == 0 and self._calls != 2 * self._batches:
            self.optimizer(gradients)
        return loss


class Scaled(nn.TrainOneStepWithLossScaleCell):
    """Looks for overflows by operations that a CPU has."""

    def start_overflow_check(self, pre_cond: Tensor, compute_input: Any) -> tuple[Tensor, Any]:
        return pre_cond, compute_input

    def get_overflow_status(self, status: Tensor, compute_output: Any) -> Tensor:
        del status
        return Tensor(not all(np.isfinite(one.asnumpy()).all() for one in compute_output))


def data(steps: int = STEPS) -> GeneratorDataset:
    drawn = np.random.default_rng(0)
    items = [(drawn.normal(size=4).astype(np.float32), np.zeros(2, np.float32)) for _ in range(3 * steps)]
    return GeneratorDataset(items, ["x", "y"], shuffle=False).batch(3)


def written(output: Output, **config: Any) -> Path:
    path = output.base.parent / "config.json"
    path.write_text(json.dumps(EVERYTHING | config))
    return path


def model_of(net: nn.Cell, optimizer: nn.Cell) -> Model:
    return Model(net, nn.MSELoss(), optimizer)


def adam(net: nn.Cell) -> nn.Cell:
    return nn.Adam(net.trainable_params(), 0.01)


def trained(output: Output | None, **config: Any) -> list[bytes]:
    """The weights after training."""
    net = with_fixed_weights(Layers())
    callbacks: list[Callback] = [] if output is None else [MonitorCallback(written(output, **config))]
    model_of(net, adam(net)).train(1, data(), callbacks=callbacks, dataset_sink_mode=False)
    return [array(parameter).tobytes() for parameter in net.get_parameters()]


def test_one_line_records_every_kind_of_every_step_and_changes_no_bit(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(output) == trained(None)
    assert {kind: steps_of(output, kind) for kind in KINDS} == {kind: list(range(STEPS)) for kind in KINDS}
    assert steps_of(output, "exp_avg") == steps_of(output, "exp_avg_sq") == list(range(1, STEPS))
    assert {row.name for row in output.rows("actv")} >= {"a.input", "a.output", "b.output"}
    assert output.manifest()["closed"] is True
    assert warnings_in(caplog) == []


def test_a_network_that_model_rewrites_for_mixed_precision_has_the_rows_of_other_networks(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # to which MindSpore writes the code of rewritten cells
    monkeypatch.setattr(sys, "path", [*sys.path])

    def weights(callbacks: list[Callback]) -> list[bytes]:
        net = with_fixed_weights(Layers())
        model = Model(net, nn.MSELoss(), adam(net), amp_level="O1")
        model.train(1, data(), callbacks=callbacks, dataset_sink_mode=False)
        return [array(parameter).tobytes() for parameter in net.get_parameters()]

    assert weights([MonitorCallback(written(output))]) == weights([])
    recorded = {row.name for row in output.rows("actv")}
    assert recorded == {f"{cell}.{side}" for cell in ("", "a", "b") for side in ("input", "output")}
    assert {row.name for row in output.rows("actv_grad")} == recorded - {".input", "a.input"}


def test_a_sequence_whose_class_was_imported_twice_has_the_rows_of_the_cells_that_it_calls(output: Output) -> None:
    """So MindSpore rewrites it, depending on what the process has imported before."""
    spec = importlib.util.spec_from_file_location("container", inspect.getfile(nn.SequentialCell))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    net = with_fixed_weights(again.SequentialCell(nn.Dense(4, 3), nn.Dense(3, 2)))
    called = nn.Dense(4, 3).set_train()
    called.weight, called.bias = net[0].weight, net[0].bias
    net.cell_list[0] = called
    optimizer = adam(net)
    with attached(output, net, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]):
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(
            Tensor(np.ones((2, 4), np.float32))
        )
        optimizer(gradients)
    recorded = {row.name for row in output.rows("actv")}
    assert recorded == {f"{cell}.{side}" for cell in ("", "0", "1") for side in ("input", "output")}


@pytest.mark.parametrize("calls_back", [True, False], ids=["callback", "set_monitor"])
def test_cells_of_a_sequence_that_model_rewrites_have_rows(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, calls_back: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    net = with_fixed_weights(nn.SequentialCell(nn.Dense(4, 3), nn.SequentialCell(nn.ReLU(), nn.Dense(3, 2))))
    optimizer = adam(net)
    model = Model(net, nn.MSELoss(), optimizer, amp_level="O1")
    callback = MonitorCallback(written(output))
    if not calls_back:
        callback.monitor.set_monitor(net, 1, optimizer)
    model.train(1, data(), callbacks=[callback] if calls_back else [], dataset_sink_mode=False)
    callback.monitor.close()
    cells = {"0", "1", "1.0", "1.1"} | ({""} if calls_back else set())
    recorded = {row.name for row in output.rows("actv")}
    assert recorded == {f"{cell}.{side}" for cell in cells for side in ("input", "output")}
    assert {row.name for row in output.rows("actv_grad")} == recorded - {".input", "0.input"}
    assert warnings_in(caplog) == []


def test_when_training_has_ended_no_hook_is_left(output: Output) -> None:
    net = with_fixed_weights(Layers())
    optimizer = adam(net)
    before = footprint(net, optimizer)
    model_of(net, optimizer).train(1, data(), callbacks=[MonitorCallback(written(output))], dataset_sink_mode=False)
    assert footprint(net, optimizer) == before


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_in_which_the_optimizer_is_not_called_is_one_that_was_skipped(
    output: Output, caplog: pytest.LogCaptureFixture, accumulated: int
) -> None:
    net = with_fixed_weights(Layers())
    optimizer = adam(net)
    step = Sometimes(nn.WithLossCell(net, nn.MSELoss()), optimizer, accumulated)
    callback = MonitorCallback(written(output), grad_acc_steps=accumulated)
    Model(step).train(1, data(4 * accumulated), callbacks=[callback], dataset_sink_mode=False)
    assert steps_of(output, "actv") == steps_of(output, "actv_grad") == [0, 1, 2, 3]
    assert steps_of(output, "grad_reduced") == steps_of(output, "param_updated") == [0, 2, 3]
    assert output.manifest()["steps"]["skipped"]["ranges"] == [[1, 1, 1]]
    assert {row.micro_step for row in output.rows("actv")} == set(range(accumulated))
    assert [said for said in warnings_in(caplog) if "has no row of grad_unreduced" not in said] == []


def test_an_overflow_of_the_loss_scale_is_no_fault(output: Output) -> None:
    net = with_fixed_weights(Layers())
    drawn = np.random.default_rng(0).normal(size=(STEPS, 3, 4)).astype(np.float32)
    labels = np.zeros((STEPS, 3, 2), np.float32)
    labels[2] = 1e3
    scale = nn.DynamicLossScaleUpdateCell(loss_scale_value=2.0**123, scale_factor=2, scale_window=1000)
    step = Scaled(nn.WithLossCell(net, nn.MSELoss()), adam(net), scale)
    rules = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
    callback = MonitorCallback(written(output, **rules))
    batches = GeneratorDataset(list(zip(drawn, labels, strict=True)), ["x", "y"], shuffle=False)
    Model(step).train(1, batches, callbacks=[callback], dataset_sink_mode=False)
    assert output.manifest()["steps"]["skipped"]["ranges"] == [[2, 2, 1]]
    with facts_of(output.base) as facts:
        assert facts.ranking is not None
        assert facts.ranking.events
        assert {one.name: one.state for one in checks_of(facts)}.items() >= {
            "Alert rules": GOOD,
            "NaN and infinity": GOOD,
        }.items()


def test_steps_that_are_not_collected_are_counted_though_they_were_skipped(output: Output) -> None:
    net = with_fixed_weights(Layers())
    optimizer = adam(net)
    step = Sometimes(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    callback = MonitorCallback(written(output, start_step=3))
    Model(step).train(1, data(5), callbacks=[callback], dataset_sink_mode=False)
    assert steps_of(output, "grad_reduced") == [3, 4]


def test_training_that_begins_again_is_recorded_anew_and_continues_counting(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net = with_fixed_weights(Layers())
    model = model_of(net, adam(net))
    callback = MonitorCallback(written(output), start_iteration=10)
    for _ in range(2):
        model.train(1, data(2), callbacks=[callback], dataset_sink_mode=False)
    recorded = [sorted({row.step for row in output.rows("grad_reduced", one)}) for one in output.directories()]
    assert sorted(recorded) == [[10, 11], [12, 13]]
    assert warnings_in(caplog) == []


def test_evaluating_while_training_has_no_rows(output: Output) -> None:
    net = with_fixed_weights(Layers())
    model = Model(net, nn.MSELoss(), adam(net), metrics={"loss"})
    model.fit(2, data(2), data(3), callbacks=[MonitorCallback(written(output))], dataset_sink_mode=False)
    assert steps_of(output, "actv") == [0, 1, 2, 3]
    assert {row.micro_step for row in output.rows("actv")} == {0}


def test_a_run_that_the_structure_ends_ends_model_train(output: Output) -> None:
    with pytest.raises(RunEnded):
        trained(output, print_struct=True)
    (structure,) = output.base.glob("module_struct/*/module_struct.json")
    assert set(json.loads(structure.read_text())) >= {"0:", "0:a", "0:b"}


def test_a_configuration_that_cannot_be_used_is_reported_before_training(output: Output) -> None:
    with pytest.raises(ConfigError, match="step_interval"):
        MonitorCallback(written(output, step_interval=0))


@pytest.mark.parametrize("given", [dict, MonitorConfig], ids=["dictionary", "MonitorConfig"])
def test_it_takes_a_configuration_that_is_no_file(given: Callable[..., Any], output: Output) -> None:
    net = with_fixed_weights(Layers())
    callback = MonitorCallback(given(param_distribution=True))
    model_of(net, adam(net)).train(1, data(), callbacks=[callback], dataset_sink_mode=False)
    assert steps_of(output, "param_origin") == list(range(STEPS))


def test_a_cell_that_trains_without_an_optimizer_is_reported(output: Output) -> None:
    net = with_fixed_weights(Layers())
    with pytest.raises(TypeError, match="optimizer is a NoneType: expected an optimizer"):
        Model(net).train(1, data(), callbacks=[MonitorCallback(written(output))], dataset_sink_mode=False)
