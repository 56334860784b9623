"""Without the operator in C, weights and moments of compiled steps have the rows of the dynamic graph. Nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, as_measured, attached, footprint, steps_of, warnings_in, with_fixed_weights
from compiled_steps import (
    RECORDED,
    STEPS,
    WHOLE,
    Deep,
    Rows,
    Sinking,
    Skipping,
    adam,
    assert_same,
    by_model,
    called,
    mode_of,
    of_state,
    plain,
    read_from,
    recorded,
    state_of,
    step_of,
    train,
)
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.nn.cell import _cell_graph_executor
from training import array, inputs
from watching_cells import written

from monitor.mindspore import TrainerMon, tape
from monitor.mindspore.compiled import outside
from monitor.mindspore.modules import refuse_graph_mode
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.report.checks import checks_of
from monitor.report.facts import facts_of
from monitor.report.findings import LOG
from monitor.report.spikes import SPIKES
from monitor.series import Series, SeriesTable

OF_STATE = {"param_distribution": True, "mv_distribution": True, "ops": ["min", "max", "mean", "norm"], "ndigits": 12}


pytestmark = pytest.mark.usefixtures("without_the_operator", "not_on_request")


def steps_with(rows: Rows, kind: str) -> set[int]:
    return {step for found, _, step, _ in rows if found == kind}


def as_in_the_dynamic_graph(how: str, output: Output, optimizer_of: Callable[[list[Any]], nn.Cell] = adam) -> None:
    _, expected = recorded("dynamic", Deep, output, optimizer_of)
    bits, rows = recorded(how, Deep, output, optimizer_of)
    assert bits == plain(how, Deep, optimizer_of)
    assert set(rows) == set(of_state(expected))
    assert_same(rows, of_state(expected))


@pytest.mark.parametrize("how", WHOLE)
def test_weights_and_moments_have_the_rows_of_the_dynamic_graph_and_one_warning_names_the_others(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    as_in_the_dynamic_graph(how, output)
    (said,) = (one for one in warnings_in(caplog) if not one.startswith("Code that calls a monitored cell is compiled"))
    assert "These cannot be read there and have no rows: xy_distribution, wg_distribution." in said
    notes = [json.loads((one / "manifest.json").read_text())["notes"] for one in output.directories()]
    (said,) = (one["compiled_code"] for one in notes if "compiled_code" in one)
    assert "xy_distribution, wg_distribution" in said


@pytest.mark.parametrize("how", ["dynamic", *WHOLE])
def test_the_report_advises_log_also_where_steps_are_compiled_as_a_whole(how: str, output: Output) -> None:
    """A loss that is logged after such a step belongs to it."""
    recorded(how, Deep, output, run_numbers=True)
    with facts_of(str(output.base)) as facts:
        loss, jumps = (one for one in checks_of(facts) if one.name in ("Loss", SPIKES))
    assert loss.finding.says.endswith("Pass it to log(loss=...).")
    assert jumps.finding.says.endswith("Pass the loss to log(loss=...).")
    assert (loss.look, jumps.look) == (LOG, LOG)


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda p: nn.SGD(p, 0.1, momentum=0.9),
        lambda p: nn.Momentum(p, 0.1, momentum=0.9),
        lambda p: nn.AdamWeightDecay(p, 0.01),
        lambda p: optim.Adam(p, 0.01),
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
    ],
    ids=["SGD", "Momentum", "AdamWeightDecay", "experimental Adam", "experimental SGD, which counts no steps"],
)
def test_other_optimizers_are_read(how: str, optimizer_of: Any, output: Output) -> None:
    as_in_the_dynamic_graph(how, output, optimizer_of)


@pytest.mark.parametrize("how", WHOLE)
def test_rows_are_those_of_the_weights_around_each_step(how: str, output: Output) -> None:
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        parameters = {one.name: one for one in net.trainable_params()}
        with attached(output, net, optimizer, **OF_STATE):
            step = step_of(how, net, optimizer)
            expected: dict[tuple[str, str, int], Any] = {}
            for number in range(STEPS):
                for kind in ("param_origin", "param_updated"):
                    if kind == "param_updated":
                        step(inputs(number))
                    expected |= {(kind, name, number): array(x).astype(np.float64) for name, x in parameters.items()}
    for (kind, name, number), x in expected.items():
        (row,) = (one for one in output.rows(kind) if (one.name, one.step) == (name, number))
        found = [row.values[op] for op in ("min", "max", "mean", "norm")]
        assert np.allclose(found, [x.min(), x.max(), x.mean(), np.linalg.norm(x)], 1e-9, 1e-9)


@pytest.mark.parametrize("how", WHOLE)
def test_update_ratios_have_the_rows_of_the_dynamic_graph(how: str, output: Output) -> None:
    def ratios(how: str) -> list[Any]:
        others = output.directories()
        recorded(how, Deep, output, update_ratio=True)
        (directory,) = set(output.directories()) - set(others)
        return [(row.name, row.step, row.values) for row in output.rows("update_ratio", directory)]

    found = ratios(how)
    assert len(found) == 6 * STEPS
    assert found == ratios("dynamic")


@pytest.mark.parametrize("sink", [False, True], ids=["not sunk", "sunk"])
def test_model_train_has_the_rows_of_the_dynamic_graph(sink: bool, output: Output) -> None:
    _, expected = by_model("dynamic", output, sink=False)
    bits, rows = by_model("graph", output, sink=sink)
    assert bits == by_model("graph", output, sink=sink, monitored=False)[0]
    assert steps_with(rows, "param_origin") == set(range(STEPS))
    assert_same(rows, of_state(expected))


@pytest.mark.parametrize("how", WHOLE)
def test_steps_that_are_not_due_are_counted_and_not_read(how: str, output: Output) -> None:
    chosen = {"start_step": 1, "step_interval": 2, "intervals": {"mv_distribution": 2}}
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 6}, **chosen)
    _, rows = recorded(how, Deep, output, loop={"steps": 6}, **chosen)
    assert steps_with(rows, "param_origin") == {1, 3, 5}
    assert steps_with(rows, "exp_avg") == {1, 5}
    assert_same(rows, of_state(expected))


def choosing(how: str, output: Output, chosen: list[int], grad_acc_steps: int, *, batches: bool) -> tuple[list[bytes], Rows]:
    """Makes a step in some calls of a cell only. The bits, which are those without a monitor, and the rows."""

    def run(monitor: TrainerMon | None) -> list[bytes]:
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        if monitor is not None:
            monitor.set_monitor(net, grad_acc_steps, optimizer)
        step = Skipping(net, optimizer)
        for number, apply in enumerate(chosen):
            step(inputs(number), Tensor([apply], ms.int32))
            if monitor is not None and batches:
                monitor.batch_ended()
        return state_of(net, optimizer)

    with mode_of(how):
        with read_from(output) as rows, TrainerMon(written(output, **RECORDED)) as monitor:
            bits = run(monitor)
        assert bits == run(None)
    return bits, rows


@pytest.mark.parametrize("batches", [False, True])
def test_an_optimizer_that_steps_in_every_second_call_has_the_rows_of_the_dynamic_graph(batches: bool, output: Output) -> None:
    called = [0, 1] * 3
    _, expected = choosing("dynamic", output, called, 2, batches=batches)
    _, rows = choosing("graph", output, called, 2, batches=batches)
    assert steps_with(rows, "param_updated") == {0, 1, 2}
    assert_same(rows, of_state(expected))


def test_a_skipped_step_has_a_number_and_no_rows(output: Output) -> None:
    called = [1, 0, 0, 1]
    _, expected = choosing("dynamic", output, called, 1, batches=True)
    _, rows = choosing("graph", output, called, 1, batches=True)
    assert steps_with(rows, "param_origin") == steps_with(rows, "param_updated") == {0, 3}
    assert_same(rows, of_state(expected))


def test_calls_that_make_no_step_leave_no_incomplete_step(output: Output) -> None:
    _, rows = choosing("graph", output, [1, 0], 1, batches=False)
    assert {step for _, _, step, _ in rows} == {0}
    assert [path.name for path in output.directory().glob("param_origin*")] == ["param_origin_0-0.csv"]


class Overflowing(Deep):
    """Its second argument makes the loss infinite."""

    def construct(self, x: Tensor, factor: Tensor) -> Tensor:
        return super().construct(x) * factor


class LossScaling(nn.TrainOneStepWithLossScaleCell):
    """Looks for overflows in gradients: MindSpore asks the device, which a CPU does not answer."""

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> Any:
        return pre_cond, compute_input

    def get_overflow_status(self, *given: Any) -> Tensor:
        return ops.logical_not(ops.isfinite(given[1][0].sum()))


def test_a_step_that_loss_scaling_skips_has_a_number_and_no_rows(output: Output) -> None:
    def run(monitor: TrainerMon | None) -> list[bytes]:
        net = with_fixed_weights(Overflowing())
        optimizer = nn.Momentum(net.trainable_params(), 0.01, momentum=0.9)
        step = LossScaling(net, optimizer, nn.DynamicLossScaleUpdateCell(4.0, 2, 100)).set_train(True)
        if monitor is not None:
            monitor.set_monitor(net, 1, optimizer)
        for number, factor in enumerate((1.0, np.inf, 1.0)):
            _, overflow, _ = step(inputs(number), Tensor(factor, ms.float32))
            assert bool(overflow.asnumpy()) == np.isinf(factor)
            if monitor is not None:
                monitor.batch_ended()
        return state_of(net, optimizer)

    found: dict[str, Rows] = {}
    for how in ("dynamic", "graph"):
        with mode_of(how):
            with read_from(output) as found[how], TrainerMon(written(output, **RECORDED)) as monitor:
                bits = run(monitor)
            assert bits == run(None)
    assert steps_with(found["graph"], "param_origin") == steps_with(found["graph"], "param_updated") == {0, 2}
    assert_same(found["graph"], of_state(found["dynamic"]))


class Both(nn.Cell):
    """One compiled step of two optimizers."""

    def __init__(self, net: Deep, optimizers: list[nn.Cell]) -> None:
        super().__init__()
        self.first, self.second = optimizers
        self.of_first = ms.value_and_grad(net, None, self.first.parameters)
        self.of_second = ms.value_and_grad(net, None, self.second.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.of_first(x)
        _, others = self.of_second(x)
        return ops.depend(loss, (self.first(gradients), self.second(others)))


def of_two(how: str, output: Output, *, together: bool) -> Rows:
    with mode_of(how):
        net = with_fixed_weights(Deep())
        parts = net.a.trainable_params(), [*net.body.trainable_params(), *net.b.trainable_params()]
        optimizers = [adam(parts[0]), nn.Momentum(parts[1], 0.01, 0.9)]
        with read_from(output) as rows, attached(output, net, optimizers, **RECORDED):
            steps = [Both(net, optimizers)] if together else [step_of(how, net, one) for one in optimizers]
            for number in range(STEPS):
                for step in steps:
                    step(inputs(number))
    return rows


@pytest.mark.parametrize("together", [True, False], ids=["one compiled step", "two"])
def test_two_optimizers_have_the_rows_of_the_dynamic_graph(together: bool, output: Output) -> None:
    expected = of_two("dynamic", output, together=together)
    rows = of_two("graph", output, together=together)
    assert steps_with(rows, "exp_avg") == {1, 2}
    assert_same(rows, of_state(expected))


def test_of_several_steps_in_one_call_the_first_and_the_last_have_rows(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with attached(output, net, optimizer, **OF_STATE) as monitor:
            train(Sinking(net, optimizer), 2)
            assert monitor.step == 6
    assert steps_of(output, "param_origin") == [0, 3]
    assert steps_of(output, "param_updated") == [2, 5]
    (said,) = warnings_in(caplog)
    assert "Compiled code has made 3 steps in one call" in said


@pytest.mark.parametrize("optimizer_of", [adam, lambda p: optim.Adam(p, 0.01)], ids=["whole", "in parts"])
def test_an_optimizer_that_python_calls_is_read_by_its_hooks_alone(optimizer_of: Any, output: Output) -> None:
    """MindSpore compiles the optimizer's own functions, which take its moments. Forward and backward are compiled, too."""

    def run(output: Output, *, compiled: bool) -> Rows:
        net = with_fixed_weights(Deep())
        optimizer = optimizer_of(net.trainable_params())
        gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
        gradients_of = ms.jit(gradients_of) if compiled else gradients_of
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
            for number in range(STEPS):
                optimizer(gradients_of(inputs(number))[1])
        return rows

    expected, rows = run(output, compiled=False), run(output, compiled=True)
    assert_same(of_state(rows), of_state(expected))
    assert steps_with(rows, "grad_reduced") == set(range(STEPS))


def test_an_optimizer_that_is_compiled_apart_has_its_rows_beside_those_of_the_dynamic_graph(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", Deep, output, update_ratio=False)
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    @ms.jit
    def apply(gradients: Any) -> Any:
        return optimizer(gradients)

    with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
        for number in range(STEPS):
            apply(gradients_of(inputs(number))[1])
    assert_same(rows, {key: values for key, values in expected.items() if key[0] != "grad_reduced"})
    assert not any("more training forwards of the model" in said for said in warnings_in(caplog))
    (said,) = [said for said in warnings_in(caplog) if "A training step is compiled" in said]
    assert "have no rows: grad_reduced. " in said


@pytest.mark.parametrize("how", WHOLE)
def test_evaluations_are_no_steps(how: str, output: Output) -> None:
    _, expected = recorded(how, Deep, output)
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
            step, evaluate = step_of(how, net, optimizer), net if how == "graph" else ms.jit(called(net))
            for number in range(STEPS):
                step(inputs(number))
                evaluate(inputs(number))
    assert rows == expected


@pytest.mark.parametrize("how", WHOLE)
def test_a_model_can_be_attached_again_after_its_code_was_compiled(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 4})
    rows: Rows = {}
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        before = footprint(net, optimizer)
        step = step_of(how, net, optimizer)
        for number in range(4):
            if number == 1:  # not recorded
                step(inputs(number))
                continue
            with read_from(output) as found, attached(output, net, optimizer, start_iteration=number, **RECORDED):
                step(inputs(number))
            rows |= found
        assert footprint(net, optimizer) == before
    assert_same(rows, {key: values for key, values in of_state(expected).items() if key[2] != 1})


@pytest.mark.parametrize("how", WHOLE)
def test_recording_begins_while_training_runs_and_then_one_warning_names_what_is_missing(
    how: str, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        config = {**OF_STATE, "xy_distribution": True, "run_numbers": False, "collect_times": 2}
        with attached(output, net, optimizer, **config, dynamic_on=False) as monitor:
            step = step_of(how, net, optimizer)
            train(step, 2)
            assert not any("is compiled (GRAPH_MODE or @jit), and" in said for said in warnings_in(caplog))
            Path(monitor._config_path).write_text(json.dumps({**config, "dynamic_on": True}))
            monitor._recordings[0].switching._control._watching.turn()  # type: ignore[union-attr]
            train(step, 6)
            assert monitor.step == 8
    steps = steps_of(output, "param_origin")
    assert len(steps) == 2
    assert steps_of(output, "param_updated") == steps_of(output, "exp_avg") == steps
    assert sum("no rows: xy_distribution." in said for said in warnings_in(caplog)) == 1
    assert not any("has no row of actv" in said for said in warnings_in(caplog))


def test_on_a_device_the_kernels_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = recorded("graph", Deep, as_measured(tmp_path, monkeypatch, there=False))
    there = recorded("graph", Deep, as_measured(tmp_path, monkeypatch, there=True))
    assert there[0] == here[0]
    assert_same(there[1], here[1], 1e-5)


class Stopped(nn.Cell):
    """A parameter below ``stop_gradient``: with a hook, MindSpore would not compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 1)
        self.scale = Parameter(Tensor([2.0], ms.float32), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(ops.stop_gradient(self.scale) * self.a(x))).sum()


def test_nothing_is_added_to_what_is_compiled_in_graph_mode(output: Output) -> None:
    bits, rows = recorded("graph", Stopped, output)
    assert bits == plain("graph", Stopped)
    assert {name for kind, name, *_ in rows if kind == "param_origin"} >= {"scale", "a.weight"}


def test_a_failing_read_does_not_reach_training(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> int:
        raise RuntimeError("cannot be read")

    monkeypatch.setattr(outside, "_number", fail)
    bits, rows = recorded("graph", Deep, output)
    assert bits == plain("graph", Deep)
    assert rows == {}
    assert any("reading before compiled code failed: RuntimeError('cannot be read')" in said for said in warnings_in(caplog))


def test_an_execution_that_raises_leaves_no_rows(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED) as monitor:
            step = step_of("graph", net, optimizer)
            train(step, 1)
            with monkeypatch.context() as patched:
                patched.setattr(type(_cell_graph_executor), "_exec_pip", fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    train(step, 1)
            assert not any(one.is_outside for one in monitor._recordings[0].attachment.watch.framework.stepped.values())
    assert {step for _, _, step, _ in rows} == {0}


@pytest.mark.parametrize("histograms", [False, True])
def test_rows_that_are_forgotten_are_absent_until_they_are_written_again(histograms: bool) -> None:
    recorder = Recorder(MindSporeTensorReader(SeriesTable(), 1e-8, magnitudes=histograms))
    series = [RecordedSeries(Series("param_origin", 0, name)) for name in "abc"]

    def names() -> list[str]:
        rows = recorder.kinds_now().get("param_origin")
        return [] if rows is None else [recorder.table.series[index].name for index in rows.series.tolist()]

    for one in series:
        recorder.record(one, inputs(0))
    recorder.forget(2, 2)
    assert names() == ["a", "c"]
    assert recorder.has_rows
    recorder.forget(3, 3)
    recorder.forget(1, 1)
    assert names() == []
    assert not recorder.has_rows
    recorder.record(series[1], inputs(0))
    assert names() == ["b"]
    assert recorder.has_rows


def test_graph_mode_is_refused_if_nothing_has_rows_there(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    with mode_of("graph"):
        before = footprint(net, optimizer)
        with pytest.raises(ValueError, match=r"turn on one of param_distribution, mv_distribution, update_ratio, which have"):
            attached(output, net, optimizer, xy_distribution=True, wg_distribution=True)
        monkeypatch.setenv(tape.COMPILED_VARIABLE, "0")
        with pytest.raises(ValueError, match="MONITOR_COMPILED_CODE is 0"):
            attached(output, net, optimizer, **RECORDED)
        with pytest.raises(ValueError, match="MONITOR_COMPILED_CODE is 0"):
            refuse_graph_mode(outside=True)
        assert footprint(net, optimizer) == before
    assert output.directories() == []


def test_a_user_who_wants_no_compiled_code_recorded_gets_none_of_jit(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tape.COMPILED_VARIABLE, "0")
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    with attached(output, net, optimizer, **RECORDED) as monitor:
        train(step_of("jit", net, optimizer))
        assert monitor.step == 0
    assert list(output.directory().glob("*.csv")) == []
