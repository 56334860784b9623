"""Exports, copies, and what the user does to a cell while it is observed."""

from __future__ import annotations

import copy
from pathlib import Path

import mindspore as ms
import pytest
from attaching import Output, with_fixed_weights
from compiled_steps import RECORDED, WHOLE, Deep, adam, assert_same, mode_of, recorded, rows_in, step_of, train
from mindspore import Tensor
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon


@pytest.mark.parametrize("how", WHOLE)
def test_an_export_of_an_observed_model_has_no_operator_of_the_monitor(how: str, output: Output, tmp_path: Path) -> None:
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with TrainerMon(written(output, **RECORDED)) as monitor:
            monitor.set_monitor(net, 1, optimizer)
            train(step_of(how, net, optimizer), 2)
            ms.export(net, inputs(0), file_name=str(tmp_path / "net"), file_format="MINDIR")
    content = (tmp_path / "net.mindir").read_bytes()
    assert b"follow_tensor" not in content
    assert b"_tape" not in content


@pytest.mark.parametrize("how", WHOLE)
def test_a_copy_of_an_observed_model_can_be_recorded(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", Deep, output)
    before = output.directories()
    with mode_of(how):
        net = with_fixed_weights(Deep())
        with TrainerMon(written(output, **RECORDED)) as monitor:
            monitor.set_monitor(net, 1, adam(net.trainable_params()))
            other = copy.deepcopy(net)
        first = set(output.directories()) - set(before)
        optimizer = adam(other.trainable_params())
        with TrainerMon(written(output, **RECORDED)) as monitor:
            monitor.set_monitor(other, 1, optimizer)
            train(step_of(how, other, optimizer))
    (directory,) = set(output.directories()) - set(before) - first
    assert_same(rows_in(output, directory), expected)


def test_a_construct_that_the_user_has_set_stays_and_works_after_the_monitor(output: Output) -> None:
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    steps = []
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
        inner = net.construct

        def around(x: Tensor) -> Tensor:
            steps.append(1)
            return inner(x)

        net.construct = around
        train(step_of("dynamic", net, optimizer), 2)
    assert vars(net)["construct"] is around
    net(inputs(0))
    assert len(steps) == 3
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
        train(step_of("dynamic", net, optimizer), 1)
    assert len(steps) == 4
