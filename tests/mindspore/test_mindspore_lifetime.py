"""Who keeps whom alive, and what a closed monitor leaves behind: nothing."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
from attaching import EVERYTHING, Output, attached, footprint, step_with, steps_of, warnings_in
from mindspore import nn
from training import Net, inputs

ALL: dict[str, Any] = EVERYTHING | {
    "update_ratio": True,
    "mg_direction": True,
    "ur_distribution": True,
    "stack_info": True,
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": ["a", "b"], "attention_hook": ["a"], "moe_router_logit_hook": ["b"]},
    "format": ["csv", "hdf5"],
}


def trained(output: Output, steps: int = 3) -> tuple[Any, Net, nn.Cell]:
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = attached(output, net, optimizer, **ALL)
    for number in range(steps):
        step_with(net, optimizer, number)
    return monitor, net, optimizer


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_closed_monitor_leaves_no_hook_anywhere(output: Output, steps: int) -> None:
    monitor, net, optimizer = trained(output, steps)
    assert {place.split()[0] for place in footprint(net, optimizer)} == {
        "hooks",
        "_lazy_forward_hook",
        "_lazy_forward_hook_with_kwargs",
        "_lazy_forward_pre_hook_with_kwargs",
    }
    monitor.close()
    assert footprint(net, optimizer) == {}


def test_one_that_is_closed_within_a_step_leaves_no_hook_either(output: Output) -> None:
    monitor, net, optimizer = trained(output)
    net(inputs(0))
    monitor.close()
    assert footprint(net, optimizer) == {}


def test_hooks_do_not_grow_in_number_while_training_continues(output: Output) -> None:
    monitor, net, optimizer = trained(output, 1)
    after_one = footprint(net, optimizer)
    for number in range(5):
        step_with(net, optimizer, number)
    assert footprint(net, optimizer) == after_one
    monitor.close()


def test_a_model_that_is_released_is_collected_though_it_is_monitored(output: Output) -> None:
    monitor, net, optimizer = trained(output)
    alive = [weakref.ref(one) for one in (monitor, net, net.a, optimizer)]
    del monitor, net, optimizer
    gc.collect()
    assert [one() for one in alive] == [None] * 4


def test_a_monitor_that_no_one_holds_continues_while_the_model_lives(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    monitor, net, optimizer = trained(output, 1)
    monitor_is_there = weakref.ref(monitor)
    del monitor
    gc.collect()
    for number in range(1, 4):
        step_with(net, optimizer, number)
    monitor_is_there().close()
    assert steps_of(output, "actv_grad") == steps_of(output, "grad_unreduced") == [0, 1, 2, 3]
    assert [line for line in warnings_in(caplog) if "Features that have no row" not in line] == []


def test_after_it_was_closed_training_continues_without_rows(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    monitor, net, optimizer = trained(output, 1)
    monitor.close()
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        step_with(net, optimizer)
    assert steps_of(output, "actv") == [0]
    assert caplog.records == []
