"""What a step does to the weights, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, warnings_in
from mindspore import nn
from mindspore.experimental import optim
from training import Net, array, inputs

STEPS = 3
BETA1, BETA2, EPS = 0.9, 0.99, 1e-3
UPDATES: dict[str, Any] = {
    "update_ratio": True,
    "mg_direction": True,
    "ur_distribution": True,
    "format": ["csv", "hdf5"],
    "ops": ["min", "max", "mean", "norm"],
    "ndigits": 17,
}
Values = dict[tuple[str, int], dict[str, float]]


@dataclass
class Reference:
    """Adam's moments, kept in float64 beside a loop, and what follows from them in each step."""

    eps_on_root: bool
    mean: dict[str, np.ndarray] = field(default_factory=dict)
    square: dict[str, np.ndarray] = field(default_factory=dict)
    update: Values = field(default_factory=dict)
    ratio: Values = field(default_factory=dict)
    change: Values = field(default_factory=dict)
    agreement: Values = field(default_factory=dict)

    def step(self, number: int, name: str, gradient: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        g = gradient.astype(np.float64)
        m, v = self.mean.get(name), self.square.get(name, 0.0)
        agree = 1.0 if m is None else np.mean(np.sign(g) == np.sign(m))
        m = self.mean[name] = BETA1 * (0.0 if m is None else m) + (1 - BETA1) * g
        v = self.square[name] = BETA2 * v + (1 - BETA2) * g * g
        a, b = 1 - BETA1 ** (number + 1), 1 - BETA2 ** (number + 1)
        root = (np.sqrt(v) + EPS) / np.sqrt(b) if self.eps_on_root else np.sqrt(v / b) + EPS
        self.update[name, number] = statistics(m / a / root)
        self.ratio[name, number] = statistics(np.divide(m / a, np.sqrt(v / b), out=np.zeros_like(m), where=v != 0))
        self.agreement[name, number] = dict.fromkeys(("min", "max", "mean", "norm"), agree)
        update, weight = (np.linalg.norm(one.astype(np.float64)) for one in (after.astype(np.float64) - before, before))
        self.change[name, number] = {"update_ratio": update / weight, "update_norm": update, "weight_norm": weight}


def statistics(x: np.ndarray) -> dict[str, float]:
    return {"min": x.min(), "max": x.max(), "mean": x.mean(), "norm": np.linalg.norm(x)}


def trained(optimizer: nn.Cell, net: Net, reference: Reference | None = None) -> None:
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
    for number in range(STEPS):
        _, gradients = gradients_of(inputs(number))
        before = [array(parameter) for parameter in optimizer.parameters]
        arrays = [array(gradient) for gradient in gradients]
        optimizer(gradients)
        for parameter, gradient, weight in zip(net.trainable_params(), arrays, before, strict=True):
            if reference is not None:
                reference.step(number, parameter.name, gradient, weight, array(parameter))


ADAMS: dict[str, tuple[Callable[[Any], nn.Cell], bool]] = {
    "nn.Adam": (lambda p: nn.Adam(p, 0.01, BETA1, BETA2, EPS), True),
    "experimental.AdamW": (lambda p: optim.AdamW(p, 0.01, (BETA1, BETA2), EPS, weight_decay=0.1), False),
}


@pytest.mark.parametrize("adam", ADAMS)
def test_every_step_of_adam_is_recorded_as_it_was(output: Output, adam: str, caplog: pytest.LogCaptureFixture) -> None:
    made, eps_on_root = ADAMS[adam]
    net, reference = Net(), Reference(eps_on_root)
    optimizer = made(net.trainable_params())
    with attached(output, net, optimizer, **UPDATES):
        trained(optimizer, net, reference)
    for kind, expected, tolerance in (
        ("adam_update", reference.update, 1e-5),
        ("adam_ratio", reference.ratio, 1e-5),
        ("other", reference.agreement, 1e-12),
        ("update_ratio", reference.change, 1e-6),
    ):
        found = {(row.name.removesuffix(".mg_direction"), row.step): row.values for row in output.rows(kind)}
        assert sorted(found) == sorted(expected)
        for place, values in expected.items():
            assert found[place] == pytest.approx(values, rel=tolerance, abs=1e-6), (kind, place)
    assert warnings_in(caplog) == []


def test_the_update_of_what_is_no_adam_is_not_made_up(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **UPDATES):
        trained(optimizer, net)
    assert {kind: len(output.rows(kind)) for kind in ("adam_update", "adam_ratio", "other", "update_ratio")} == {
        "adam_update": 0,
        "adam_ratio": 0,
        "other": 0,
        "update_ratio": 4 * STEPS,
    }
    (said,) = warnings_in(caplog)
    assert "SGD is no known Adam" in said


@pytest.mark.parametrize("in_time", [False, True])
def test_weights_loaded_after_the_optimizers_first_step_are_not_trained_and_rows_show_it(output: Output, in_time: bool) -> None:
    """MindSpore itself does this, also without a monitor."""
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    if not in_time:
        trained(optimizer, net)
    ms.load_param_into_net(net, {one.name: ms.Parameter(array(one), name=one.name) for one in net.get_parameters()})
    with attached(output, net, optimizer, update_ratio=True):
        trained(optimizer, net)
    assert {row.values["update_ratio"] > 0 for row in output.rows("update_ratio")} == {in_time}


def test_moments_that_are_loaded_after_the_monitor_was_attached_have_rows_before_the_first_step(output: Output) -> None:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, mv_distribution=True):
        for one in (*optimizer.moment1, *optimizer.moment2):
            one.set_data(ms.Tensor(np.full(one.shape, 0.5, np.float32)))
        trained(optimizer, net)
    for kind in ("exp_avg", "exp_avg_sq"):
        first = [row.values["norm"] for row in output.rows(kind) if row.step == 0]
        assert first == pytest.approx([0.5 * one.size**0.5 for one in optimizer.parameters])
