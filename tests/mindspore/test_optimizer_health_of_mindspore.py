"""The health of MindSpore's optimizers, against numpy in float64 and the bits of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, as_measured, attached, warnings_in, with_fixed_weights
from mindspore import Tensor, nn
from mindspore.experimental import optim
from training import Net, array, inputs

STEPS = 3
BETA1, BETA2, EPS = 0.9, 0.99, 1e-2
HEALTH: dict[str, Any] = {"optimizer_health": True, "ndigits": 17, "run_numbers": False}
Rows = dict[tuple[str, int], dict[str, float | None]]


class Rule:
    """How an optimizer uses gradients: their divisor, the decay added to them, and where it adds ``eps``."""

    def __init__(self, made: Callable[[Any], nn.Cell], *, divisor: float = 1.0, decay: float = 0.0, on_root: bool) -> None:
        self.made, self.divisor, self.decay, self.on_root = made, divisor, decay, on_root


def grouped(parameters: Any) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.02}]


RULES = {
    "nn.Adam": Rule(lambda p: nn.Adam(p, 0.01, BETA1, BETA2, EPS), on_root=True),
    "nn.Adam, decay and loss scale": Rule(
        lambda p: nn.Adam(p, 0.01, BETA1, BETA2, EPS, weight_decay=0.3, loss_scale=64.0), divisor=64.0, decay=0.3, on_root=True
    ),
    "nn.Adam, schedule and groups": Rule(
        lambda p: nn.Adam(grouped(p), nn.ExponentialDecayLR(0.1, 0.9, 2), BETA1, BETA2, EPS), on_root=True
    ),
    "nn.AdamWeightDecay": Rule(lambda p: nn.AdamWeightDecay(p, 0.01, BETA1, BETA2, EPS, weight_decay=0.1), on_root=True),
    "experimental.Adam": Rule(lambda p: optim.Adam(p, 0.01, (BETA1, BETA2), EPS, weight_decay=0.3), decay=0.3, on_root=True),
    "experimental.Adam, maximize": Rule(
        lambda p: optim.Adam(p, 0.01, (BETA1, BETA2), EPS, weight_decay=0.3, maximize=True), decay=-0.3, on_root=True
    ),
    "experimental.AdamW": Rule(lambda p: optim.AdamW(p, 0.01, (BETA1, BETA2), EPS, weight_decay=0.1), on_root=False),
}


def trained(net: nn.Cell, optimizer: nn.Cell, rule: Rule) -> Rows:
    """What each step must have recorded."""
    gradients_of, squares = ms.value_and_grad(net, None, optimizer.parameters), {}
    expected: Rows = {}
    for step in range(STEPS):
        _, gradients = gradients_of(inputs(step))
        given = [array(one).copy() for one in gradients]
        before = [array(one).copy() for one in optimizer.parameters]
        optimizer(gradients)
        for parameter, gradient, weight in zip(optimizer.parameters, given, before, strict=True):
            updated, same = gradient != 0, weight.view(np.int32) == array(parameter).view(np.int32)
            g = gradient.astype(np.float64) / rule.divisor + rule.decay * weight
            v = squares[parameter.name] = BETA2 * squares.get(parameter.name, 0.0) + (1 - BETA2) * g * g
            bias = 1 - BETA2 ** (step + 1)
            lowest = EPS**2 * (1.0 if rule.on_root else bias)
            expected[parameter.name, step] = {
                "swallowed": (updated & same).sum() / updated.sum(),
                "staleness": math.sqrt(np.mean(g * g / np.maximum(v, lowest)) * bias),
                "below_eps": np.mean(v < lowest),
            }
    return expected


def found(output: Output) -> Rows:
    return {(row.name, row.step): row.values for row in output.rows("optimizer_health")}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_step_is_recorded_as_it_was(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    output, net = as_measured(tmp_path, monkeypatch, there=there), Net()
    optimizer = RULES[name].made(net.trainable_params())
    with attached(output, net, optimizer, **HEALTH):
        expected = trained(net, optimizer, RULES[name])
    rows = found(output)
    assert sorted(rows) == sorted(expected)
    for place, values in expected.items():
        assert rows[place] == pytest.approx(values, rel=1e-5), place
    assert any(values["below_eps"] for values in expected.values())
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("there", [False, True])
def test_small_updates_of_low_precision_are_swallowed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    output, net = as_measured(tmp_path, monkeypatch, there=there), Net().to_float(ms.float16)
    for parameter in net.trainable_params():
        parameter.set_dtype(ms.float16)
    optimizer = optim.SGD(net.trainable_params(), 1e-6)
    with attached(output, net, optimizer, **HEALTH):
        ms.value_and_grad(net, None, optimizer.parameters)
        gradients = [Tensor(np.full(one.shape, 0.5), ms.float16) for one in optimizer.parameters]
        optimizer(gradients)
    rows = found(output)
    assert len(rows) == 4
    assert {(values["swallowed"], values["staleness"]) for values in rows.values()} == {(1.0, None)}


@pytest.mark.parametrize("there", [False, True])
def test_a_step_of_the_rate_zero_swallows_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    output, net = as_measured(tmp_path, monkeypatch, there=there), Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.0)
    with attached(output, net, optimizer, **HEALTH):
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        optimizer(gradients)
    rows = found(output).values()
    assert [values["swallowed"] for values in rows] == [None] * 4
    for values in rows:  # elements without a gradient are below eps
        assert values["staleness"] == pytest.approx(math.sqrt(1 - values["below_eps"]), rel=1e-5)


@pytest.mark.parametrize("there", [False, True])
def test_a_second_moment_that_underflows_gives_no_number(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """The square of 1e-25 is 0 in float32."""
    output, net = as_measured(tmp_path, monkeypatch, there=there), Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01, eps=1e-30)
    with attached(output, net, optimizer, **HEALTH):
        optimizer(tuple(Tensor(np.full(one.shape, 1e-25, np.float32)) for one in optimizer.parameters))
    assert [(row["staleness"], row["below_eps"]) for row in found(output).values()] == [(None, None)] * 4


def test_a_gradient_that_the_optimizer_changes_in_another_way_has_no_staleness(output: Output) -> None:
    net = Net()
    groups = [{"params": net.trainable_params(), "grad_centralization": True}]
    optimizer = nn.Adam(groups, 0.01)
    with attached(output, net, optimizer, **HEALTH):
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        optimizer(gradients)
    assert [values["staleness"] for values in found(output).values()] == [None] * 4
    assert [values["swallowed"] for values in found(output).values()] == [0.0] * 4


def test_an_optimizer_without_second_moment_has_no_staleness(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **HEALTH):
        for step in range(2):
            _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(step))
            optimizer(gradients)
    assert [values["staleness"] for values in found(output).values()] == [None] * 8
    (said,) = warnings_in(caplog)
    assert "staleness and below_eps need an Adam optimizer, and SGD is no known Adam" in said


def test_an_optimizer_that_computes_its_rate_has_updates(output: Output) -> None:
    net = Net()
    optimizer = nn.AdaFactor(net.trainable_params())
    with attached(output, net, optimizer, **HEALTH):
        optimizer(tuple(Tensor(np.ones(one.shape, np.float32)) for one in optimizer.parameters))
    assert [values["swallowed"] for values in found(output).values()] == [0.0] * 4


def test_training_has_the_same_bits(output: Output) -> None:
    ends = []
    for monitored in (False, True):
        net = with_fixed_weights(Net())
        optimizer = optim.AdamW(net.trainable_params(), 0.01)
        monitor = attached(output, net, optimizer, update_ratio=True, **HEALTH) if monitored else None
        for step in range(STEPS):
            loss, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(step))
            optimizer(gradients)
        if monitor is not None:
            monitor.close()
        ends.append([array(loss), *(array(one).copy() for one in net.trainable_params())])
    assert all(np.array_equal(plain, watched) for plain, watched in zip(*ends, strict=True))
