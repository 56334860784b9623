"""The program's own code is called with alerts in a loop of MindSpore, and what it raises reaches the loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from mindspore import Tensor, nn, value_and_grad
from watching_cells import TwoLayers

import monitor
from monitor.anomalies.callbacks import AlertEvent


class TooMuchError(Exception):
    pass


@pytest.mark.usefixtures("output")
def test_what_a_callback_raises_reaches_the_loop() -> None:
    net = TwoLayers()
    optimizer = nn.SGD(net.trainable_params(), 0.0)
    gradients_of = value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    rules = {"rules": [{"rule_name": "AnomalyNan"}]}

    def callback(events: Sequence[AlertEvent]) -> None:
        raise TooMuchError(f"{events[0].kind} of step {events[0].step}")

    fields = {"wg_distribution": True, "ops": ["norm", "nans"], "alert": rules}
    with monitor.watch(net, optimizer, None, micro_batches=1, **fields) as watching:
        watching.add_alert_callback(callback)

        def train() -> None:
            for step in range(500):
                batch = np.full((4, 4), np.nan if step == 2 else 1.0, np.float32)
                _, gradients = gradients_of(Tensor(batch))
                optimizer(gradients)
                time.sleep(0.01)

        with pytest.raises(TooMuchError, match=r"grad_.* of step 2"):
            train()


@pytest.mark.usefixtures("output")
def test_a_number_that_leaves_its_bound_is_an_event_of_that_step() -> None:
    net, found = TwoLayers(), list[AlertEvent]()
    optimizer = nn.SGD(net.trainable_params(), 0.0)
    gradients_of = value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    fields = {"wg_distribution": True, "ops": ["overflow_fp16"], "alert": {"rules": [{"rule_name": "AnomalyBounds"}]}}
    with monitor.watch(net, optimizer, None, micro_batches=1, **fields) as watching:
        watching.add_alert_callback(found.extend)
        for step in range(4):
            _, gradients = gradients_of(Tensor(np.full((4, 4), 1e30 if step >= 2 else 1.0, np.float32)))
            optimizer(gradients)
    assert {(one.step, one.rule, one.op) for one in found} == {(2, "AnomalyBounds", "overflow_fp16")}
    assert {one.kind for one in found} == {"grad_unreduced", "grad_reduced"}
