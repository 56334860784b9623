"""When MindSpore's optimizers step, and what they are handed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from training import OPTIMIZERS, STEPS, Net, array, grouped, inputs, train

from monitor.failures import Failures
from monitor.mindspore.optimizer_steps import MindSporeOptimizerSteps
from monitor.mindspore.tape import COMPILED_VARIABLE


@pytest.fixture(autouse=True)
def _by_hooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is not read: that needs an attachment."""
    monkeypatch.setenv(COMPILED_VARIABLE, "0")


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.gradients: list[Sequence[Tensor | None]] = []

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients.append(gradients)

    def call_ended(self) -> None:
        """Nothing depends on it here."""

    def end_step(self) -> None:
        """They are kept here."""

    def before_step(self, _optimizer: nn.Cell) -> None:
        self.told.append("before")

    def gradients_ready(self, _optimizer: nn.Cell) -> None:
        self.told.append("ready")

    def after_step(self, _optimizer: nn.Cell, *, skipped: bool = False) -> None:
        self.told.append("skipped" if skipped else "after")


def outcome(name: str, groups: bool, hooked: bool) -> tuple[list[bytes], Listener]:
    net, listener = Net(), Listener()
    optimizer = OPTIMIZERS[name](grouped(net) if groups else net.trainable_params())
    if hooked:
        MindSporeOptimizerSteps([(optimizer, listener)], listener, Failures())
    losses = train(net, optimizer)
    return [x.tobytes() for x in (*losses, *map(array, net.trainable_params()))], listener


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("name", ["nn.Adam", "nn.AdamWeightDecay", "nn.SGD momentum", "experimental.AdamW"])
def test_an_optimizer_that_is_listened_to_trains_to_the_same_bits(name: str, groups: bool) -> None:
    plain, _ = outcome(name, groups, hooked=False)
    hooked, listener = outcome(name, groups, hooked=True)
    assert hooked == plain
    assert listener.told == ["before", "ready", "after"] * STEPS


def test_the_gradients_are_those_that_were_passed_in_the_order_of_the_optimizer_s_parameters() -> None:
    net, listener = Net(), Listener()
    optimizer = nn.SGD(grouped(net), 0.1)
    MindSporeOptimizerSteps([(optimizer, listener)], listener, Failures())
    _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
    expected = [g.asnumpy().copy() for g in gradients]
    optimizer(gradients)
    for seen, gradient in zip(listener.gradients[0], expected, strict=True):
        np.testing.assert_array_equal(seen.asnumpy(), gradient)
    assert [one.shape for one in listener.gradients[0]] == [p.shape for p in optimizer.parameters]


def test_a_cell_that_trains_calls_the_optimizer_once_a_step() -> None:
    net, listener = Net(), Listener()
    optimizer = nn.Adam(net.trainable_params())
    MindSporeOptimizerSteps([(optimizer, listener)], listener, Failures())
    step = nn.TrainOneStepCell(net, optimizer)
    for number in range(STEPS):
        step(inputs(number))
    assert listener.told == ["before", "ready", "after"] * STEPS


def test_a_step_that_loss_scaling_skips_is_no_step() -> None:
    net, listener = Net(), Listener()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    MindSporeOptimizerSteps([(optimizer, listener)], listener, Failures())
    scaler = ms.amp.DynamicLossScaler(scale_value=2.0, scale_factor=2, scale_window=10)
    for finite in (True, False, True):
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        if finite:
            optimizer(scaler.unscale(gradients))
        scaler.adjust(Tensor(finite))
    assert listener.told.count("after") == 2


def test_after_it_is_removed_it_is_called_no_more() -> None:
    net, listener = Net(), Listener()
    optimizer = nn.Adam(net.trainable_params())
    steps = MindSporeOptimizerSteps([(optimizer, listener)], listener, Failures())
    steps.remove()
    steps.remove()
    train(net, optimizer)
    assert listener.told == []


def test_a_listener_that_fails_neither_ends_training_nor_hides_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Listener):
        def before_step(self, _optimizer: nn.Cell) -> None:
            raise KeyError("of ours")

    net, listener = Net(), Failing()
    optimizer = nn.Adam(net.trainable_params())
    failures = Failures()
    MindSporeOptimizerSteps([(optimizer, listener)], listener, failures)
    with caplog.at_level(logging.WARNING, "monitor"):
        train(net, optimizer)
    assert listener.told == ["ready", "after"] * STEPS
    assert failures.counts == {"reading before the step: KeyError": STEPS}
