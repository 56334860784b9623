"""A model that is not compiled needs nothing of what compiled code needs."""

from __future__ import annotations

from attaching import Output
from compiled_steps import RECORDED, Deep, adam, step_of, train
from watching_cells import written

from monitor.mindspore import TrainerMon
from monitor.mindspore.compiled.replay import program_of
from monitor.mindspore.tape import new_tape


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


def test_without_a_free_tape_compiled_code_has_no_rows_and_training_goes_on(output: Output) -> None:
    held = []
    while (tape := new_tape()) is not None:
        held.append(tape)
    net = Deep()
    optimizer = adam(net.trainable_params())
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
        train(step_of("jit", net, optimizer), 2)
    assert list(output.directory().glob("actv*.csv")) == []
