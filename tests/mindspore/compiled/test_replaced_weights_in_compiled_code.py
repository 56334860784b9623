"""Weights that are replaced after compilation: rows are those of the weights that MindSpore trains, or missing."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, WHOLE, Deep, Rows, adam, assert_same, mode_of, of_state, recorded, state_of, step_of
from mindspore import Parameter, Tensor, nn, ops
from test_compiled_code_from_outside import read_from, steps_with
from training import inputs

Replacing = Callable[[nn.Cell], object]
STEPS = 4
REPLACED_AFTER = 2


def halved(parameter: Parameter) -> Tensor:
    return Tensor(parameter.asnumpy() / 2)


def by_set_data(net: nn.Cell) -> None:
    for parameter in net.trainable_params():
        parameter.set_data(halved(parameter))


def by_loading(net: nn.Cell) -> None:
    ms.load_param_into_net(net, {one.name: Parameter(halved(one), name=one.name) for one in net.trainable_params()})


def in_place(net: nn.Cell) -> None:
    for parameter in net.trainable_params():
        ops.assign(parameter, halved(parameter))


def replacing(how: str, replace: Replacing, output: Output) -> tuple[list[bytes], Rows]:
    """The bits, which are those without a monitor, and the rows."""

    def run(*, monitored: bool) -> list[bytes]:
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        monitor = attached(output, net, optimizer, **RECORDED) if monitored else None
        step = step_of(how, net, optimizer)
        losses = []
        for number in range(STEPS):
            if number == REPLACED_AFTER:
                replace(net)
            losses.append(step(inputs(number)).asnumpy().tobytes())
        if monitor is not None:
            monitor.close()
        return losses + state_of(net, optimizer)

    with mode_of(how):
        with read_from(output) as rows:
            bits = run(monitored=True)
        assert bits == run(monitored=False)
    return bits, rows


@pytest.mark.parametrize("how", WHOLE)
def test_weights_that_are_assigned_in_place_have_the_rows_of_the_dynamic_graph(how: str, output: Output) -> None:
    _, expected = replacing("dynamic", in_place, output)
    _, rows = replacing(how, in_place, output)
    assert_same(rows, expected)


@pytest.mark.parametrize("replace", [by_set_data, by_loading])
def test_measured_code_has_the_rows_of_the_weights_that_it_trains(replace: Replacing, output: Output) -> None:
    """MindSpore goes on with the earlier tensors in a ``@jit`` function, and with the new ones in ``GRAPH_MODE``."""
    _, of_earlier = recorded("jit", Deep, output, loop={"steps": STEPS})
    _, rows = replacing("jit", replace, output)
    assert rows == of_earlier
    _, of_new = replacing("dynamic", in_place, output)
    _, rows = replacing("graph", replace, output)
    assert_same(rows, of_new)


@pytest.mark.usefixtures("without_the_operator")
class TestWithoutTheOperator:
    @pytest.mark.parametrize("how", WHOLE)
    def test_weights_that_are_assigned_in_place_have_the_rows_of_the_dynamic_graph(self, how: str, output: Output) -> None:
        _, expected = replacing("dynamic", in_place, output)
        _, rows = replacing(how, in_place, output)
        assert_same(of_state(rows), of_state(expected))

    @pytest.mark.parametrize("replace", [by_set_data, by_loading])
    def test_code_that_trains_weights_that_python_does_not_see_has_no_rows_and_one_warning_says_so(
        self, replace: Replacing, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, of_earlier = recorded("jit", Deep, output, loop={"steps": REPLACED_AFTER})
        caplog.clear()
        _, rows = replacing("jit", replace, output)
        assert_same(rows, of_earlier)
        (said,) = [one for one in warnings_in(caplog) if "param_origin" in one]
        assert "were replaced (set_data, load_param_into_net)" in said

    @pytest.mark.parametrize("replace", [by_set_data, by_loading])
    def test_graph_mode_trains_what_python_sees(self, replace: Replacing, output: Output) -> None:
        _, expected = replacing("dynamic", in_place, output)
        _, rows = replacing("graph", replace, output)
        assert steps_with(rows, "param_origin") == set(range(STEPS))
        assert_same(of_state(rows), of_state(expected))

    def test_steps_of_code_that_python_does_not_see_are_counted(self, output: Output) -> None:
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED) as monitor:
            earlier, later = step_of("jit", net, optimizer), step_of("jit", net, optimizer)
            for number in range(STEPS):
                if number == 1:
                    by_set_data(net)
                (later if number == STEPS - 1 else earlier)(inputs(number))
            assert monitor.step == STEPS
            weight = np.linalg.norm(net.a.weight.asnumpy().astype(np.float64))
        assert steps_with(rows, "param_updated") == {0, STEPS - 1}
        (row,) = [row for key, row in rows.items() if key[:3] == ("param_updated", "a.weight", STEPS - 1)]
        assert np.isclose(row["norm"], weight)
