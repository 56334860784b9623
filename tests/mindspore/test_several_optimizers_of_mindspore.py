"""One net, several optimizers of MindSpore: every parameter is measured around the step of the optimizer that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, warnings_in
from mindspore import nn
from training import STEPS, Net, array, inputs

EVERYTHING_OF_STEPS: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "ops": ["norm"],
    "ndigits": 17,
}
Norms = dict[tuple[str, str, int], float]


class Held:
    """Holds optimizers, as containers of trainers do."""

    def __init__(self, *optimizers: nn.Cell) -> None:
        self.optimizers = optimizers


WAYS: dict[str, Callable[[nn.Cell, nn.Cell], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (b, a),
    "dictionary": lambda a, b: {"first": a, "second": b},
    "container": Held,
}


def pair(net: Net) -> tuple[nn.Cell, nn.Cell]:
    momentum = nn.Momentum(net.a.trainable_params(), 0.1, momentum=0.9)
    return momentum, nn.Adam(net.b.trainable_params(), 0.01, eps=1e-3)


def moments_of(optimizer: nn.Cell) -> dict[str, Sequence[Any]]:
    if isinstance(optimizer, nn.Adam):
        return {"exp_avg": optimizer.moment1, "exp_avg_sq": optimizer.moment2}
    return {"exp_avg": optimizer.moments}


def train(net: Net, optimizers: Sequence[nn.Cell], turns: Sequence[Sequence[int]]) -> Norms:
    """One backward for each of ``turns``, then a step of the optimizers that it names; what has to be recorded of it."""
    expected: Norms = {}
    parameters = [p for one in optimizers for p in one.parameters]
    gradients_of = ms.value_and_grad(net, None, parameters)
    for step, turn in enumerate(turns):
        _, gradients = gradients_of(inputs(step))
        given = dict(zip([p.name for p in parameters], gradients, strict=True))
        for place in turn:
            optimizer = optimizers[place]
            for index, p in enumerate(optimizer.parameters):
                expected["param_origin", p.name, step] = norm(p)
                expected["grad_reduced", p.name, step] = norm(given[p.name])
                for kind, of in moments_of(optimizer).items() if step else ():
                    expected[kind, p.name, step] = norm(of[index])
            optimizer(tuple(given[p.name] for p in optimizer.parameters))
            expected |= {("param_updated", p.name, step): norm(p) for p in optimizer.parameters}
    return expected


def norm(x: Any) -> float:
    return float(np.linalg.norm(array(x).astype(np.float64)))


def recorded(output: Output) -> Norms:
    kinds = ("param_origin", "param_updated", "grad_reduced", "exp_avg", "exp_avg_sq")
    return {(kind, row.name, row.step): row.values["norm"] for kind in kinds for row in output.rows(kind)}


@pytest.mark.parametrize("way", WAYS)
def test_every_parameter_is_measured_around_its_own_step(output: Output, way: str) -> None:
    net = Net()
    optimizers = pair(net)
    with attached(output, net, WAYS[way](*optimizers), **EVERYTHING_OF_STEPS):
        expected = train(net, optimizers, [(0, 1)] * STEPS)
    assert recorded(output) == pytest.approx(expected, rel=1e-6)
    assert output.manifest()["steps"]["written"]["count"] == STEPS
    updates = {(row.name, row.step): row.values["update_norm"] for row in output.rows("update_ratio")}
    assert all(value > 0 for value in updates.values())
    assert len(updates) == 4 * STEPS


def test_a_step_ends_before_an_optimizer_that_has_stepped_takes_another_turn(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    optimizers = pair(net)
    with attached(output, net, optimizers, **EVERYTHING_OF_STEPS):
        expected = train(net, optimizers, [(0, 1), (0,), (0, 1)])
    found = recorded(output)
    assert {step for _, _, step in found} == {0, 1, 2}
    assert found == pytest.approx(expected, rel=1e-6)
    assert any("the step ended between the two" in said for said in warnings_in(caplog))


def test_what_no_optimizer_holds_has_no_rows_and_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    first, second = pair(net)
    with attached(output, net, first, **EVERYTHING_OF_STEPS):
        train(net, [first, second], [(0, 1)] * STEPS)
    assert {name for _, name, _ in recorded(output)} == {"a.weight", "a.bias"}
    (said,) = [one for one in warnings_in(caplog) if "no optimizer that was passed to set_monitor" in one]
    assert "2 of 4 parameters" in said
    assert "b.weight, b.bias" in said


def test_training_is_the_same_bit_for_bit(output: Output) -> None:
    net, twin = Net(), Net()
    ours, theirs = pair(net), pair(twin)
    with attached(output, net, ours, ur_distribution=True, mg_direction=True, format="hdf5", **EVERYTHING_OF_STEPS):
        train(net, ours, [(0, 1)] * STEPS)
    train(twin, theirs, [(0, 1)] * STEPS)
    assert all(np.array_equal(array(p), array(q)) for p, q in zip(net.trainable_params(), twin.trainable_params(), strict=True))


def test_something_in_a_list_that_is_no_optimizer_is_named(output: Output) -> None:
    net = Net()
    with pytest.raises(TypeError, match=r"optimizer\[1\] is a Net: expected an optimizer of mindspore\.nn"):
        attached(output, net, [nn.SGD(net.trainable_params(), 0.1), net], **EVERYTHING_OF_STEPS)
