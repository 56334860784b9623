"""Compiled code of many models is recorded one after the other. A process has a limited number of tapes."""

from __future__ import annotations

import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import KINDS, RECORDED, WHOLE, Deep, adam, mode_of, plain, rows_in, state_of, step_of, train
from mindspore import nn
from watching_cells import written

from monitor.mindspore import TrainerMon
from monitor.mindspore.compiled.replay import program_of
from monitor.mindspore.tape import Tape, new_tape


def all_tapes() -> list[Tape]:
    """All that are free."""
    held = []
    while (tape := new_tape()) is not None:
        held.append(tape)
    return held


def made() -> tuple[nn.Cell, nn.Cell]:
    net = with_fixed_weights(Deep())
    return net, adam(net.trainable_params())


def test_models_that_were_never_compiled_hold_no_tape(output: Output) -> None:
    net = Deep()
    optimizer = adam(net.trainable_params())
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
        train(step_of("dynamic", net, optimizer), 1)
        program = program_of(net)
        assert program is not None
        assert program.tape is None
        train(step_of("jit", net, optimizer), 1)
        assert program.tape is not None


@pytest.mark.parametrize("how", WHOLE)
def test_without_a_free_tape_compiled_code_has_no_rows_and_the_same_bits_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    held = all_tapes()
    with mode_of(how):
        net, optimizer = made()
        with attached(output, net, optimizer, **RECORDED):
            bits = train(step_of(how, net, optimizer))
    held.clear()
    assert bits + state_of(net, optimizer) == plain(how, Deep)
    assert list(output.directory().glob("actv*.csv")) == []
    (said,) = (one for one in warnings_in(caplog) if "too many models" in one)
    assert "Close monitors of other models" in said


@pytest.mark.parametrize("how", WHOLE)
def test_closed_monitors_leave_their_tapes_to_later_models(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    held = all_tapes()
    for tape in held[:2]:
        tape.close()
    models = []
    with mode_of(how):
        for _ in range(4):
            net, optimizer = made()
            models.append((net, optimizer))  # as MindSpore, which keeps some models for ever
            with attached(output, net, optimizer, **RECORDED):
                train(step_of(how, net, optimizer), 1)
    first, *others = (rows_in(output, one) for one in output.directories())
    assert {kind for kind, *_ in first} >= {"actv_grad", "param_updated"}
    assert all(one == first for one in others)
    assert warnings_in(caplog) == []


def test_a_model_whose_tape_another_one_has_taken_has_only_weights_and_moments_of_earlier_code_and_one_warning(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = made()
    step = step_of("jit", net, optimizer)
    with attached(output, net, optimizer, **RECORDED):
        train(step, 1)
    (before,) = output.directories()
    all_tapes()  # which are freed at once
    with attached(output, net, optimizer, **RECORDED):
        train(step, 1)
        train(step_of("jit", net, optimizer), 1)
    (after,) = set(output.directories()) - {before}
    assert {step for _, _, step, _ in rows_in(output, before)} == {0}
    steps = {kind: {step for found, _, step, _ in rows_in(output, after) if found == kind} for kind in KINDS}
    assert steps["param_origin"] == {0, 1}
    assert steps["actv"] == steps["grad_reduced"] == {1}
    assert len([said for said in warnings_in(caplog) if "compiled before the monitor was attached" in said]) == 1
