"""What ``set_monitor`` may be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, footprint, step_with, steps_of, warnings_in
from mindspore import Parameter, Tensor, nn
from training import Net, inputs

from monitor.mindspore import TrainerMon


def adam(net: nn.Cell) -> nn.Cell:
    return nn.Adam(net.trainable_params(), 0.01)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model": "net"}, TypeError, "model is a str: expected a mindspore.nn.Cell, or a list of model chunks."),
        ({"model": []}, ValueError, "model is an empty list: expected a mindspore.nn.Cell"),
        ({"model": [Net(), None]}, TypeError, "model is a NoneType"),
        ({"optimizer": None}, TypeError, "optimizer is a NoneType: expected an optimizer"),
        ({"optimizer": Net()}, TypeError, "optimizer is a Net: expected an optimizer"),
        ({"optimizer": Parameter(Tensor(np.zeros(1)))}, TypeError, "optimizer is a Parameter"),
        ({"grad_acc_steps": 0}, ValueError, "grad_acc_steps is 0 and must be at least 1."),
        ({"grad_acc_steps": 1.5}, TypeError, "grad_acc_steps is a float and must be an integer."),
        ({"grad_acc_steps": adam(Net())}, TypeError, "grad_acc_steps is a Adam and must be an integer. The order is"),
        ({"start_iteration": -1}, ValueError, "start_iteration is -1 and must be at least 0."),
        ({"dp_group": 3}, TypeError, "dp_group is a int: expected the name of a communication group"),
        ({"tp_group": "none"}, ValueError, "tp_group is 'none', but communication was not initialised yet"),
    ],
    ids=lambda one: "+".join(one) if isinstance(one, dict) else "",
)
def test_what_cannot_be_used_is_refused_in_one_sentence_and_nothing_is_attached(
    output: Output, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    net = Net()
    optimizer = adam(net)
    path = output.base.parent / "config.json"
    path.write_text(json.dumps(EVERYTHING))
    monitor = TrainerMon(path)
    given = {"model": net, "grad_acc_steps": 1, "optimizer": optimizer} | arguments
    with pytest.raises(error) as raised:
        monitor.set_monitor(**given)
    assert str(raised.value).startswith(said)
    assert footprint(net, optimizer) == {}
    monitor.set_monitor(net, 1, optimizer)
    step_with(net, optimizer)
    monitor.close()
    assert steps_of(output, "grad_reduced") == [0]


class OwnStep(nn.Cell):
    """A training cell that derives from none of MindSpore's."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.scale, self.updates = network, nn.Identity(), optimizer
        self.gradients_of = ms.value_and_grad(network, None, optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.updates(gradients)
        return self.scale(loss)


TRAINING_CELLS: dict[str, Callable[[nn.Cell, nn.Cell], nn.Cell]] = {
    "TrainOneStepCell": nn.TrainOneStepCell,
    "of one's own": OwnStep,
    "ForwardValueAndGrad": lambda net, optimizer: nn.ForwardValueAndGrad(net, optimizer.parameters, get_by_list=True),
}


@pytest.mark.parametrize("name", TRAINING_CELLS)
def test_a_training_cell_is_recorded_as_the_network_that_it_trains(
    output: Output, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    optimizer = adam(net)
    cell = TRAINING_CELLS[name](net, optimizer).set_train()
    with attached(output, cell, optimizer, **EVERYTHING):
        for number in range(2):
            result = cell(inputs(number))
            if isinstance(result, tuple):
                optimizer(result[1])
    activations = {f"{at}{side}" for at in (".", "a.", "b.") for side in ("input", "output")}
    weights = {"a.weight", "a.bias", "b.weight", "b.bias"}
    for kind, names in {"actv": activations, "grad_unreduced": weights, "param_origin": weights}.items():
        found = [(row.name, row.step) for row in output.rows(kind)]
        assert sorted(found) == sorted((one, step) for one in names for step in (0, 1))
    assert warnings_in(caplog) == []


def test_called_twice_it_attaches_anew_and_continues_counting(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = adam(net)
    with attached(output, net, optimizer, **EVERYTHING) as monitor:
        once = footprint(net, optimizer)
        step_with(net, optimizer)
        monitor.set_monitor(net, 1, optimizer)
        assert footprint(net, optimizer) == once
        step_with(net, optimizer, 1)
    assert steps_of(output, "actv") == steps_of(output, "grad_unreduced") == [0, 1]
    (said,) = warnings_in(caplog)
    assert "set_monitor was called again for the same model or optimizer" in said


def test_called_again_with_a_new_optimizer_it_warns_of_nothing(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with attached(output, net, adam(net), **EVERYTHING) as monitor:
        for number in range(2):
            optimizer = adam(net)
            monitor.set_monitor(net, 1, optimizer)
            step_with(net, optimizer, number)
    assert steps_of(output, "param_updated") == steps_of(output, "grad_reduced") == [0, 1]
    assert warnings_in(caplog) == []


def test_another_model_has_a_recording_of_its_own(output: Output) -> None:
    net, other = Net(), Net()
    optimizer, its_optimizer = adam(net), adam(other)
    with attached(output, net, optimizer, **EVERYTHING) as monitor:
        monitor.set_monitor(other, 1, its_optimizer)
        for number in range(2):
            step_with(net, optimizer, number)
        step_with(other, its_optimizer)
    found = [sorted({row.step for row in output.rows("actv_grad", one)}) for one in output.directories()]
    assert sorted(found) == [[0], [0, 1]]


def test_chunks_of_a_list_are_distinguished(output: Output) -> None:
    chunks = [nn.SequentialCell(nn.Dense(4, 4)).set_train(True), Net()]
    optimizer = nn.SGD([*chunks[0].trainable_params(), *chunks[1].trainable_params()], 0.1)
    with attached(output, chunks, optimizer, **EVERYTHING):
        _, gradients = ms.value_and_grad(lambda x: chunks[1](chunks[0](x)), None, optimizer.parameters)(inputs(0))
        optimizer(gradients)
    for kind, name in (("actv", "output"), ("actv_grad", "output"), ("grad_unreduced", "weight"), ("grad_reduced", "weight")):
        rows = {(row.chunk, row.name) for row in output.rows(kind)}
        assert {(0, f"0.{name}"), (1, f"a.{name}"), (1, f"b.{name}")} <= rows
        assert {chunk for chunk, _ in rows} == {0, 1}


def test_steps_are_counted_from_the_start_iteration(output: Output) -> None:
    net = Net()
    optimizer = adam(net)
    with attached(output, net, optimizer, start_iteration=40, **EVERYTHING | {"step_interval": 2, "start_step": 41}):
        for number in range(5):
            step_with(net, optimizer, number)
    assert steps_of(output, "param_origin") == [41, 43]
