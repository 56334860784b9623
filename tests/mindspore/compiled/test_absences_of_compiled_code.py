"""What compiled code has no rows of, and the dynamic graph has, is said once. Nothing is said where nothing is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, WHOLE, Deep, WithLoss, adam, mode_of, recorded, rows_in, samples, step_of, train
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from training import inputs
from watching_cells import written

from monitor.mindspore import MonitorCallback
from monitor.report.checks import checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import NOT_LOOKED_AT

LATE = "compiled before the monitor was attached"
TAKEN = "Another monitor observes cells of this model"
REPLACED = "A later monitor of the same model"
UNREACHED = "computes no gradients of"
NO_RATES = "learning_rate"
NO_LOSS = "returns no loss of one element"


def said_of(what: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [said for said in warnings_in(caplog) if what in said]


def made() -> tuple[nn.Cell, nn.Cell]:
    net = with_fixed_weights(Deep())
    return net, adam(net.trainable_params())


def test_a_report_does_not_call_a_run_bad_for_what_compiled_code_cannot_have(output: Output) -> None:
    with mode_of("graph"):
        net, optimizer = made()
        with attached(output, net, optimizer, **RECORDED | {"run_numbers": True, "update_ratio": True}):
            train(step_of("graph", net, optimizer))
    with facts_of(str(output.base)) as facts:
        (found,) = [one.finding for one in checks_of(facts) if one.name == "Monitoring itself"]
    assert found.state == NOT_LOOKED_AT
    assert NO_RATES in found.says


# --- Attached after compilation.


@pytest.mark.parametrize("how", WHOLE)
def test_a_step_that_was_compiled_before_the_monitor_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net, optimizer = made()
        step = step_of(how, net, optimizer)
        train(step, 1)
        with attached(output, net, optimizer, **RECORDED):
            train(step)
    assert len(said_of(LATE, caplog)) == 1


@pytest.mark.parametrize("how", WHOLE)
def test_a_step_that_an_earlier_monitor_saw_compiled_has_rows_and_nothing_is_said(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net, optimizer = made()
        step = step_of(how, net, optimizer)
        for _ in range(2):
            with attached(output, net, optimizer, **RECORDED):
                train(step)
    assert [len(rows_in(output, one)) > 0 for one in output.directories()] == [True, True]
    assert warnings_in(caplog) == []


def compiled_half(net: nn.Cell, optimizer: nn.Cell, half: str) -> Callable[[Tensor], Tensor]:
    """A step of which one half is compiled."""
    gradients_of: Any = ms.value_and_grad(net, None, optimizer.parameters)
    apply: Any = optimizer

    def gradients(x: Tensor) -> Any:
        return gradients_of(x)

    def applied(given: Any) -> Any:
        return optimizer(given)

    if half == "backward":
        return stepping(ms.jit(gradients), apply)
    return stepping(gradients_of, with_mutable(ms.jit(applied)))


def with_mutable(applied: Any) -> Callable[[Any], Any]:
    """MindSpore would compile every call anew."""
    return lambda gradients: applied(ms.mutable(gradients))


def stepping(gradients_of: Any, apply: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss, gradients = gradients_of(x)
        apply(gradients)
        return loss

    return step


@pytest.mark.parametrize("half", ["backward", "optimizer"])
def test_half_a_step_that_was_compiled_before_the_monitor_is_said_once(
    half: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = made()
    step = compiled_half(net, optimizer, half)
    train(step, 1)
    with attached(output, net, optimizer, **RECORDED):
        train(step)
    assert len(said_of(LATE, caplog)) == 1
    (directory,) = output.directories()
    notes = json.loads((directory / "manifest.json").read_text())["notes"]
    assert len([said for said in notes.values() if LATE in said]) == 1


class Compiled(nn.Cell):
    """A compiled cell in the dynamic graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Around(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.b = Compiled(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.block(x)).sum()


def test_a_cell_that_was_compiled_before_the_monitor_is_said_once(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = with_fixed_weights(Around())
    optimizer = adam(net.trainable_params())
    step = step_of("dynamic", net, optimizer)
    train(step, 1)
    with attached(output, net, optimizer, **RECORDED):
        train(step)
    assert len(said_of(LATE, caplog)) == 1


def test_an_optimizer_and_evaluations_that_were_compiled_before_miss_nothing(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """``nn.Adam`` compiles its own step, and Python sees it."""
    net, optimizer = made()
    step = step_of("dynamic", net, optimizer)

    def call(x: Tensor) -> Tensor:
        return net(x)

    evaluate = ms.jit(call)
    train(step, 1)
    evaluate(inputs(0))
    with attached(output, net, optimizer, **RECORDED):
        for number in range(2):
            step(inputs(number))
            evaluate(inputs(number))  # in training mode, without a backward
    assert warnings_in(caplog) == []


# --- Several monitors.


@pytest.mark.parametrize("how", WHOLE)
def test_a_monitor_of_cells_that_another_one_observes_says_once_that_it_has_no_rows(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net, optimizer = made()
        with attached(output, net, optimizer, **RECORDED), attached(output, net.body, optimizer, **RECORDED):
            train(step_of(how, net, optimizer))
    assert sorted(len(rows_in(output, one)) > 0 for one in output.directories()) == [False, True]
    (said,) = warnings_in(caplog)
    assert TAKEN in said


@pytest.mark.parametrize("how", WHOLE)
def test_a_monitor_whose_model_gets_another_monitor_says_once_that_it_has_no_rows(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net, optimizer = made()
        with attached(output, net, optimizer, **RECORDED), attached(output, net, optimizer, **RECORDED):
            train(step_of(how, net, optimizer))
    assert sorted(len(rows_in(output, one)) > 0 for one in output.directories()) == [False, True]
    assert len(said_of(REPLACED, caplog)) == 1


def test_two_monitors_in_the_dynamic_graph_miss_nothing(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = made()
    with attached(output, net, optimizer, **RECORDED), attached(output, net, optimizer, **RECORDED):
        train(step_of("dynamic", net, optimizer))
    first, second = (rows_in(output, one) for one in output.directories())
    assert first == second
    (said,) = warnings_in(caplog)
    assert "An earlier monitor of this model still records" in said


# --- Gradients that are not computed.


class Spare(nn.Cell):
    """Never calls one of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.spare, self.b = nn.Dense(4, 5), nn.Dense(5, 5), nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.a(x))).sum()


@pytest.mark.parametrize("how", WHOLE)
def test_parameters_of_cells_that_are_never_called_are_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", Spare, output)
    assert warnings_in(caplog) == []
    _, rows = recorded(how, Spare, output)
    missing = set(expected) - set(rows)
    assert {key[:2] for key in missing} == {("grad_unreduced", "spare.weight"), ("grad_unreduced", "spare.bias")}
    (said,) = warnings_in(caplog)
    assert UNREACHED in said
    assert "2 parameters" in said
    caplog.clear()
    recorded(how, Spare, output, wg_distribution=False)
    assert warnings_in(caplog) == []


def test_a_compiled_backward_says_once_what_it_does_not_compute(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = with_fixed_weights(Spare())
    optimizer = adam(net.trainable_params())
    with attached(output, net, optimizer, **RECORDED):
        train(compiled_half(net, optimizer, "backward"))
    assert len(said_of(UNREACHED, caplog)) == 1


# --- Numbers of the run.


@pytest.mark.parametrize("how", [*WHOLE, "dynamic"])
def test_learning_rates_of_compiled_steps_are_said_once(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    recorded(how, Deep, output, run_numbers=True)
    there = [row.name for row in output.rows("run") if row.name.startswith(NO_RATES)]
    assert bool(there) == (how == "dynamic")
    assert len(said_of(NO_RATES, caplog)) == (how != "dynamic")
    lacking = [cause for cause in output.manifest()["failures"] if cause.endswith(" in compiled code")]
    assert [cause for cause in lacking if cause.startswith("nothing of  ")] == []


class TwoLosses(WithLoss):
    """The training cell returns a loss for each of two samples."""

    def construct(self, x: Any, y: Any) -> Any:
        return ops.stack((self.net(x) * y.mean(), self.net(x)))


def test_a_compiled_model_train_that_returns_no_single_loss_says_so_once(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net, optimizer = made()
        model = ms.train.Model(TwoLosses(net).set_train(True), optimizer=optimizer)
        data = GeneratorDataset(samples, ["x", "y"], shuffle=False)
        model.train(
            1, data, callbacks=[MonitorCallback(written(output, **RECORDED | {"run_numbers": True}))], dataset_sink_mode=False
        )
    assert len(said_of(NO_LOSS, caplog)) == 1
    assert [row.step for row in output.rows("run") if row.name == "loss"] == []
