"""Compiled steps that measure nothing, beside others that do, have the weights and moments of the dynamic graph."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import (
    RECORDED,
    WHOLE,
    Deep,
    Rows,
    adam,
    assert_same,
    mode_of,
    of_state,
    plain,
    recorded,
    state_of,
    step_of,
    train,
)
from test_compiled_code_from_outside import read_from, steps_with
from test_falling_back_in_compiled_code import OfDynamicLength
from training import inputs

EARLIER = "the step was compiled before the monitor was attached"
NOTHING_INSIDE = "the monitor measures nothing inside"


@pytest.mark.parametrize("how", WHOLE)
def test_a_step_from_before_the_monitor_has_weights_and_moments_and_one_warning_names_the_others(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 4}, update_ratio=True)
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of(how, net, optimizer)
        losses = train(step, 1)
        with read_from(output) as rows, attached(output, net, optimizer, start_iteration=1, update_ratio=True, **RECORDED):
            losses += [step(inputs(number)).asnumpy().tobytes() for number in (1, 2, 3)]
        bits = losses + state_of(net, optimizer)
    assert bits == plain(how, Deep, steps=4)
    assert_same(rows, {key: values for key, values in of_state(expected).items() if key[2] > 0})
    (said,) = warnings_in(caplog)
    assert EARLIER in said
    assert "no rows: xy_distribution, wg_distribution." in said
    assert said.endswith(json.loads((output.directories()[-1] / "manifest.json").read_text())["notes"]["compiled_code"])


@pytest.mark.parametrize("how", WHOLE)
def test_a_step_from_before_the_monitor_misses_nothing_if_only_weights_are_recorded(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of(how, net, optimizer)
        train(step, 1)
        with read_from(output) as rows, attached(output, net, optimizer, param_distribution=True):
            train(step, 2)
    assert steps_with(rows, "param_origin") == steps_with(rows, "param_updated") == {0, 1}
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("how", WHOLE)
def test_steps_from_before_and_after_the_monitor_have_their_own_numbers(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 6})
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        early = step_of(how, net, optimizer)
        train(early, 1)
        with read_from(output) as rows, attached(output, net, optimizer, start_iteration=1, **RECORDED) as monitor:
            late = step_of(how, net, optimizer)
            for number in range(1, 6):
                (early if number in (1, 3, 4) else late)(inputs(number))
            monitor.batch_ended()
            assert monitor.step == 6
    assert steps_with(rows, "grad_reduced") == {2, 5}
    assert_same(of_state(rows), {key: values for key, values in of_state(expected).items() if key[2] > 0})
    assert_same(of_step(rows, 5), of_step(expected, 5))


def of_step(rows: Rows, step: int) -> Rows:
    return {key: values for key, values in rows.items() if key[2] == step}


@pytest.mark.usefixtures("not_on_request")
def test_steps_in_the_dynamic_graph_of_a_model_attached_in_graph_mode_have_weights_and_moments(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded("dynamic", Deep, output)
    caplog.clear()
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    with read_from(output) as rows:
        with mode_of("graph"):
            monitor = attached(output, net, optimizer, **RECORDED)
        with monitor:
            losses = train(step_of("jit", net, optimizer))
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
    assert losses + state_of(net, optimizer) == plain("jit", Deep)
    assert_same(rows, of_state(expected))
    (said,) = [one for one in warnings_in(caplog) if NOTHING_INSIDE in one or "Parts of the dynamic graph" in one]
    assert "last bits of training could change" in said


def test_a_step_that_does_not_compile_with_operators_is_counted_at_once_after_recording_was_switched_on(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = recorded("dynamic", OfDynamicLength, output, loop={"steps": 4})
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    net = with_fixed_weights(OfDynamicLength())
    optimizer = adam(net.trainable_params())
    config = {**RECORDED, "collect_times": 9}
    with read_from(output) as rows, attached(output, net, optimizer, **config, dynamic_on=False) as monitor:
        step = step_of("dynamic", net, optimizer)
        step(inputs(0))
        Path(monitor._config_path).write_text(json.dumps({**config, "dynamic_on": True}))
        monitor._recordings[0].switching._control._watching.turn()  # type: ignore[union-attr]
        step(inputs(1))
        compiled = step_of("jit", net, optimizer)
        for number in (2, 3):
            compiled(inputs(number))
    assert_same(of_state(rows), {key: values for key, values in of_state(expected).items() if key[2] > 1})
