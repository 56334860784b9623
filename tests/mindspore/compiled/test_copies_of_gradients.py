"""On request, compiled code copies the gradients that an optimizer is given, and these have rows. Training sees no copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, steps_of, warnings_in, with_fixed_weights
from compiled_steps import (
    OUTSIDE,
    STEPS,
    WHOLE,
    Deep,
    Rows,
    adam,
    assert_same,
    by_model,
    mode_of,
    plain,
    recorded,
    step_of,
    train,
)
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph import api
from mindspore.nn.cell import _cell_graph_executor
from test_compiled_code_from_outside import choosing, of_two
from training import array, inputs

from monitor.mindspore.compiled import copies
from monitor.mindspore.tape import COMPILED_VARIABLE

GRADIENTS = {"wg_distribution": True, "wg_reduced_only": True, "ops": ["min", "max", "mean", "norm", "nans"], "ndigits": 12}


pytestmark = pytest.mark.usefixtures("without_the_operator")


class Shared(nn.Cell):
    """Calls a cell several times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = ops.tanh(self.a(x)) + x
        return self.b(x).sum()


class Infinite(nn.Cell):
    """Its gradients have NaNs and infinities beside finite elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor([1.0, 2.0, 3.0, 4.0], ms.float32), name="scale")
        self.factors = Tensor([np.nan, np.inf, -np.inf, 2.0], ms.float32)

    def construct(self, x: Tensor) -> Tensor:
        return (self.scale * self.factors + x.mean()).sum()


class Half(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 4, dtype=ms.float16)

    def construct(self, x: Tensor) -> Tensor:
        return self.a(x.astype(ms.float16)).astype(ms.float32).sum()


def momentum(parameters: list[Any]) -> nn.Cell:
    return nn.Momentum(parameters, 0.01, 0.9)


def with_decay(parameters: list[Any]) -> nn.Cell:
    return nn.Adam(parameters, 0.01, weight_decay=0.1)


def kinds_of(rows: Any) -> set[str]:
    return {kind for kind, *_ in rows}


def of_gradients(rows: Rows) -> Rows:
    return {key: values for key, values in rows.items() if key[0] == "grad_reduced"}


def executed(step: Any) -> list[str]:
    """The parameters of a cell's compiled code that are copies."""
    (phase,) = step.compile_cache
    parameters = _cell_graph_executor._graph_executor.get_params(phase).values()
    return [one.name for one in parameters if hasattr(one, copies._MARK)]


@pytest.mark.parametrize("how", WHOLE)
def test_rows_are_those_of_the_gradients_at_the_weights_before_the_step(how: str, output: Output) -> None:
    weights = []
    with mode_of(how):
        net = with_fixed_weights(Deep())
        names = [one.name for one in net.trainable_params()]
        optimizer = adam(net.trainable_params())
        with attached(output, net, optimizer, **GRADIENTS):
            step = step_of(how, net, optimizer)
            for number in range(STEPS):
                weights.append([array(one) for one in net.trainable_params()])
                step(inputs(number))
    expected = {}
    gradients_of = ms.value_and_grad(net, None, net.trainable_params())
    for number, of in enumerate(weights):
        for to, weight in zip(net.trainable_params(), of, strict=True):
            to.set_data(Tensor(weight))
        for name, x in zip(names, gradients_of(inputs(number))[1], strict=True):
            expected[name, number] = array(x).astype(np.float64)
    rows = {(row.name, row.step): [row.values[op] for op in GRADIENTS["ops"]] for row in output.rows("grad_reduced")}
    assert rows.keys() == expected.keys()
    for key, x in expected.items():
        assert np.allclose(rows[key], [x.min(), x.max(), x.mean(), np.linalg.norm(x), 0], 1e-5, 1e-7), key


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize(("make", "optimizer_of"), [(Infinite, momentum), (Half, momentum), (Shared, adam), (Deep, with_decay)])
def test_gradients_have_the_rows_of_the_dynamic_graph(
    how: str, make: Callable[[], nn.Cell], optimizer_of: Callable[[list[Any]], nn.Cell], output: Output
) -> None:
    _, expected = recorded("dynamic", make, output, optimizer_of, **GRADIENTS)
    bits, rows = recorded(how, make, output, optimizer_of, **GRADIENTS)
    assert bits == plain(how, make, optimizer_of)
    assert_same(of_gradients(rows), of_gradients(expected))
    assert len(of_gradients(rows)) == STEPS * len(make().trainable_params())


@pytest.mark.parametrize("how", WHOLE)
def test_without_a_request_nothing_is_copied_and_one_warning_says_what_to_do(
    how: str, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    _, rows = recorded(how, Deep, output)
    assert kinds_of(rows) == set(OUTSIDE)
    (said,) = [one for one in warnings_in(caplog) if "for grad_reduced" in one]
    assert f"before set_monitor set {COMPILED_VARIABLE}=1 for grad_reduced, or slowly operations for most," in said


@pytest.mark.parametrize("sink", [False, True], ids=["not sunk", "sunk"])
def test_model_train_has_the_rows_of_the_dynamic_graph(sink: bool, output: Output) -> None:
    _, expected = by_model("dynamic", output, sink=False)
    bits, rows = by_model("graph", output, sink=sink)
    assert bits == by_model("graph", output, sink=sink, monitored=False)[0]
    assert of_gradients(rows) != {}
    assert_same(of_gradients(rows), of_gradients(expected))


@pytest.mark.parametrize("together", [True, False])
def test_two_optimizers_have_the_rows_of_the_dynamic_graph(together: bool, output: Output) -> None:
    expected = of_gradients(of_two("dynamic", output, together=together))
    found = of_gradients(of_two("graph", output, together=together))
    assert found != {}
    assert_same(found, expected)


@pytest.mark.parametrize(("called", "grad_acc_steps"), [([1, 0, 0, 1], 1), ([0, 1] * 3, 2)], ids=["skipped", "accumulated"])
def test_gradients_of_calls_without_a_step_have_no_rows(called: list[int], grad_acc_steps: int, output: Output) -> None:
    _, expected = choosing("dynamic", output, called, grad_acc_steps, batches=True)
    _, rows = choosing("graph", output, called, grad_acc_steps, batches=True)
    assert of_gradients(rows) != {}
    assert_same(of_gradients(rows), of_gradients(expected))


@pytest.mark.parametrize("how", WHOLE)
def test_copies_are_read_in_steps_that_are_due(how: str, output: Output) -> None:
    chosen = {"start_step": 1, "step_interval": 2}
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 4}, **chosen)
    _, rows = recorded(how, Deep, output, loop={"steps": 4}, **chosen)
    assert {step for _, _, step, _ in of_gradients(rows)} == {1, 3}
    assert_same(of_gradients(rows), of_gradients(expected))


def test_training_sees_no_copy(output: Output, tmp_path: Path) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of("graph", net, optimizer)
        names = [one.name for one in step.get_parameters()]  # type: ignore[attr-defined]
        with attached(output, net, optimizer, **GRADIENTS):
            train(step)
            assert len(executed(step)) == 6
            assert [one.name for one in step.get_parameters()] == names  # type: ignore[attr-defined]
            assert list(step.parameters_dict()) == names  # type: ignore[attr-defined]
            assert [one.name for one in net.trainable_params()] == [one.name for one in optimizer.parameters]
            ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
        assert set(ms.load_checkpoint(str(tmp_path / "step.ckpt"))) == set(names)
        assert "_monitored_as" not in vars(optimizer)
        train(step)  # its code still copies


@pytest.mark.parametrize(
    ("config", "copied"),
    [({}, 6), ({"targets": {"a": {}}}, 2), ({"wg_distribution": False, "param_distribution": True}, 0)],
    ids=["all", "one of the targets", "gradients are off"],
)
def test_only_what_is_recorded_is_copied(config: dict[str, Any], copied: int, output: Output) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with attached(output, net, optimizer, **{**GRADIENTS, **config}):
            step = step_of("graph", net, optimizer)
            train(step)
            assert len(executed(step)) == copied
            assert ("_monitored_as" in vars(optimizer)) == bool(copied)


def test_code_that_does_not_compile_with_copies_is_compiled_without(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(copies, "_copying_to", fail)
    bits, rows = recorded("graph", Deep, output)
    assert bits == plain("graph", Deep)
    assert "grad_reduced" not in kinds_of(rows)
    assert "param_updated" in kinds_of(rows)
    assert any("has rows of weights and moments only" in said and "no kernel" in said for said in warnings_in(caplog))


def test_code_from_before_set_monitor_has_no_copies_and_one_warning_says_so(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of("graph", net, optimizer)
        train(step)
        with attached(output, net, optimizer, **GRADIENTS) as monitor:
            train(step)
            assert monitor.step == STEPS
    assert steps_of(output, "grad_reduced") == []
    assert sum("have no rows: wg_distribution" in said for said in warnings_in(caplog)) == 1


@pytest.mark.parametrize("how", WHOLE)
def test_the_direction_of_a_gradient_is_not_compared_with_the_momentum_after_the_step(how: str, output: Output) -> None:
    recorded(how, Deep, output, **{**GRADIENTS, "mg_direction": True})
    assert output.rows("mg_direction") == []


def test_gradients_of_dynamic_shape_are_not_copied(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with attached(output, net, optimizer, **GRADIENTS):
            step: Any = step_of("graph", net, optimizer)
            step.set_inputs(Tensor(shape=[None, 4], dtype=ms.float32))
            step(inputs(0))
            step(inputs(1))
    found = steps_of(output, "grad_reduced")
    assert found == [0, 1] or any("gradients of dynamic shape" in said for said in warnings_in(caplog))


def test_the_compile_cache_is_not_used(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "entry_script_path", __file__)
    ms.set_context(enable_compile_cache=True, compile_cache_path=str(tmp_path))
    try:
        assert "grad_reduced" in kinds_of(recorded("graph", Deep, output)[1])
        assert ms.get_context("enable_compile_cache") is True
    finally:
        ms.set_context(enable_compile_cache=False)
    assert list(tmp_path.rglob("*.mindir")) == []
    assert any("compile cache is not used" in said for said in warnings_in(caplog))
