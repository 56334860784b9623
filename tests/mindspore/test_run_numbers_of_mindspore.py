"""The run's own numbers in MindSpore: learning rates, the total norm of gradients, and what a loop logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import as_measured, attached, warnings_in
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim
from mindspore.train import Model
from reading_back import Output
from watching_cells import TwoLayers, batch, drawn, loss_of, train, written

from monitor.mindspore import MonitorCallback
from monitor.report.checks import checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import BAD, GOOD

STEPS = 3
NUMBERS = {"wg_distribution": True, "ops": ["norm"], "ndigits": 17, "run_numbers": None}


def numbers(output: Output) -> dict[tuple[str, int], float]:
    """By name and step."""
    rows = output.rows("run")
    found = {(row.name, row.step): row.values["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def of_name(output: Output, name: str) -> list[float]:
    found = numbers(output)
    return [found[place] for place in sorted(found, key=lambda place: place[1]) if place[0] == name]


def norm_of(gradients: Any) -> float:
    """In float64."""
    return float(np.sqrt(sum(np.square(one.asnumpy().astype(np.float64)).sum() for one in gradients)))


def stepped(
    output: Output, optimizer: Callable[[Any], nn.Cell], change: Callable[[Any], Any] | None = None, **config: Any
) -> Any:
    """Train, and return the norms of the gradients that each optimizer's call was given."""
    net = TwoLayers()
    stepping, norms = optimizer(net.trainable_params()), []
    gradients_of = ms.value_and_grad(loss_of(net), None, stepping.parameters)
    with attached(output, net, stepping, **NUMBERS | config) as monitor:
        for step in range(STEPS):
            loss, gradients = gradients_of(*map(Tensor, batch(step)))
            monitor.log(loss=loss, tokens=Tensor(3), other=np.float32(0.5))
            gradients = gradients if change is None else change(gradients)
            norms.append(norm_of(gradients))
            stepping(gradients)
    return norms


@pytest.mark.parametrize("is_logged", [True, False])
def test_an_overflow_is_no_fault_if_the_loop_logs_its_loss_scale(is_logged: bool, output: Output) -> None:
    net, scale = TwoLayers(), 2.0**10
    stepping, loss = nn.SGD(net.trainable_params(), 0.1), loss_of(net)
    gradients_of = ms.grad(lambda *given: loss(*given) * scale, None, stepping.parameters)
    rules = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
    with attached(output, net, stepping, **NUMBERS | rules | {"monitor_mbs_grad": True}) as monitor:
        for step in range(12):
            scale = 3e38 if step == 7 else 2.0**10
            gradients = gradients_of(*map(Tensor, batch(step)))
            if is_logged:
                monitor.log(loss_scale=scale)
            if all(np.isfinite(one.asnumpy()).all() for one in gradients):
                stepping(tuple(one / scale for one in gradients))
            monitor.batch_ended()
    assert output.manifest()["steps"]["skipped"]["ranges"] == [[7, 7, 1]]
    with facts_of(output.base) as facts:
        states = {one.name: one.state for one in checks_of(facts)}
    expected = GOOD if is_logged else BAD
    assert (states["Alert rules"], states["NaN and infinity"]) == (expected, expected)


def test_without_clipping_the_norm_is_that_of_all_gradients(output: Output) -> None:
    norms = stepped(output, lambda parameters: nn.SGD(parameters, 0.125))
    assert of_name(output, "grad_norm") == pytest.approx(norms, rel=1e-12)
    assert of_name(output, "grad_norm_clipped") == []
    assert of_name(output, "learning_rate.0") == [0.125] * STEPS
    assert (of_name(output, "tokens"), of_name(output, "other")) == ([3] * STEPS, [0.5] * STEPS)


@pytest.mark.parametrize(
    "change",
    [lambda gradients: ops.clip_by_global_norm(gradients, 0.1), lambda gradients: tuple(one / 2 for one in gradients)],
    ids=["clipped", "scaled"],
)
def test_of_changed_gradients_only_the_norm_that_the_optimizer_received_has_a_row(output: Output, change: Any) -> None:
    norms = stepped(output, lambda parameters: nn.SGD(parameters, 0.125), change)
    assert of_name(output, "grad_norm_clipped") == pytest.approx(norms, rel=1e-12)
    assert of_name(output, "grad_norm") == []


def test_gradients_that_the_optimizer_divides_by_a_loss_scale_have_no_norm(output: Output) -> None:
    stepped(output, lambda parameters: nn.Adam(parameters, 0.125, loss_scale=64.0))
    assert {name for name, _ in numbers(output)} == {"learning_rate.0", "loss", "tokens", "other"}


def in_groups(parameters: Any) -> nn.Cell:
    weights = [one for one in parameters if "weight" in one.name]
    biases = [one for one in parameters if "bias" in one.name]
    return nn.SGD([{"params": weights, "lr": 0.5}, {"params": biases}, {"order_params": parameters}], 0.25)


class Halving(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, global_step: Tensor) -> Tensor:
        return 0.5 ** (global_step + 1.0)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda parameters: nn.SGD(parameters, [0.5, 0.25, 0.125, 0.0625]), [[0.5, 0.25, 0.125]]),
        (lambda parameters: nn.Adam(parameters, Halving()), [[0.5, 0.25, 0.125]]),
        (in_groups, [[0.5] * STEPS, [0.25] * STEPS]),
        (lambda parameters: optim.SGD(parameters, 0.5), [[0.5] * STEPS]),
        (nn.AdaFactor, [[pytest.approx(0.01)] * STEPS]),
        (lambda parameters: nn.AdaFactor(parameters, warmup_init=True), [[pytest.approx(1e-6 * step) for step in (1, 2, 3)]]),
    ],
    ids=["list", "schedule", "groups", "experimental", "relative", "relative with warm-up"],
)
def test_learning_rates_are_those_of_the_step(output: Output, optimizer: Any, expected: list[list[float]]) -> None:
    stepped(output, optimizer)
    found = [of_name(output, f"learning_rate.{group}") for group in range(len(expected) + 1)]
    assert sorted(found[:-1]) == sorted(expected)
    assert found[-1] == []


def test_the_rate_of_a_scheduler_that_sets_it_is_that_of_the_step(output: Output) -> None:
    net = TwoLayers()
    optimizer = optim.SGD(net.trainable_params(), 0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with attached(output, net, optimizer, **NUMBERS):
        for step in range(STEPS):
            train(net, optimizer, range(step, step + 1))
            scheduler.step()
    assert of_name(output, "learning_rate.0") == [0.5, 0.25, 0.125]


def test_several_calls_bad_numbers_and_late_ones(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = TwoLayers()
    optimizer = nn.SGD(net.trainable_params(), 0.125)
    gradients_of = ms.value_and_grad(loss_of(net), None, optimizer.parameters)
    with attached(output, net, optimizer, grad_acc_steps=2, **NUMBERS) as monitor:
        for micro_step in range(2):
            loss, gradients = gradients_of(*map(Tensor, batch(micro_step)))
            monitor.log(loss=Tensor(float(micro_step)), tokens=4, bad=Tensor([1.0, 2.0]), worse="loss")
        optimizer(gradients)
        monitor.log(late=loss)
    assert (of_name(output, "loss"), of_name(output, "tokens")) == ([0.5], [8])
    assert {name for name, _ in numbers(output)}.isdisjoint({"bad", "worse", "late"})
    assert output.manifest()["failures"]["logging a number: TypeError"] == 4
    assert sum("Call log before optimizer.step()" in said for said in warnings_in(caplog)) == 1


@pytest.mark.parametrize("train", [True, False])
def test_a_loss_after_the_optimizer_belongs_to_the_step_that_has_ended(
    output: Output, caplog: pytest.LogCaptureFixture, train: bool
) -> None:
    """Also where the training flag is off, as it is by default: gradients alone show that a step has begun."""
    net = TwoLayers().set_train(train)
    optimizer = nn.SGD(net.trainable_params(), 0.125)
    gradients_of = ms.value_and_grad(loss_of(net), None, optimizer.parameters)
    expected = []
    with attached(output, net, optimizer, **NUMBERS) as monitor:
        for step in range(STEPS):
            loss, gradients = gradients_of(*map(Tensor, batch(step)))
            optimizer(gradients)
            monitor.log(loss=loss, tokens=step)
            expected.append(float(loss.asnumpy()))
    assert of_name(output, "loss") == pytest.approx(expected, rel=1e-7)
    assert of_name(output, "tokens") == list(range(STEPS))
    assert not [said for said in warnings_in(caplog) if "log(" in said]


@pytest.mark.parametrize("optimizer", [lambda parameters: nn.Adam(parameters, Halving()), in_groups])
def test_training_has_the_same_bits(output: Output, optimizer: Callable[[Any], nn.Cell]) -> None:
    results = []
    for monitored in (False, True):
        net = TwoLayers()
        stepping = optimizer(net.trainable_params())
        if monitored:
            with attached(output, net, stepping, **NUMBERS):
                losses = train(net, stepping)
        else:
            losses = train(net, stepping)
        results.append([*losses, *(one.asnumpy().tobytes() for one in stepping.get_parameters())])
    assert results[0] == results[1]
    assert of_name(output, "grad_norm")


def test_numbers_of_a_device_are_those_of_the_host(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for there in (False, True):
        output = as_measured(tmp_path, monkeypatch, there=there)
        stepped(output, lambda parameters: nn.Adam(parameters, Halving()))
        found.append(numbers(output))
    assert found[1] == pytest.approx(found[0], rel=2e-6)
    assert len(found[0]) == STEPS * 5


def test_the_callback_logs_the_loss_of_the_step(output: Output) -> None:
    net = TwoLayers()
    optimizer = nn.SGD(net.trainable_params(), 0.125)
    data = GeneratorDataset([(drawn(step, 4), drawn(10 + step, 2)) for step in range(STEPS)], ["x", "y"], shuffle=False).batch(
        1
    )
    losses: list[float] = []

    class Watch(ms.train.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    callbacks = [MonitorCallback(written(output, **NUMBERS)), Watch()]
    Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    assert of_name(output, "loss") == losses
    assert len(losses) == STEPS
