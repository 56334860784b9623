"""Evaluations, and forwards without a backward, neither fill memory nor change the rows of training."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, STEPS, WHOLE, Deep, adam, called, mode_of, plain, recorded, rows_in, state_of, step_of
from evidence import in_turn
from mindspore import Tensor
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon
from monitor.mindspore.compiled.program import MOST_FORWARDS, Program
from monitor.mindspore.compiled.replay import program_of
from monitor.mindspore.tape import Tape, follow_operator
from monitor.stats.partials import COLUMNS

MANY = 300
PER_FORWARD = 20
"""More than the entries of one forward of ``Deep``."""


@pytest.mark.parametrize(("training", "how"), in_turn([False, True], WHOLE))
def test_forwards_without_a_backward_leave_few_entries_and_the_rows_of_training(
    how: str, training: bool, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded(how, Deep, output)
    before = output.directories()
    left = []
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        monitor = TrainerMon(written(output, **RECORDED))
        monitor.set_monitor(net, 1, optimizer)
        step = step_of(how, net, optimizer)
        evaluate = net if how == "graph" else ms.jit(called(net))
        losses = []
        for number in range(STEPS):
            losses.append(step(inputs(number)).asnumpy().tobytes())
            net.set_train(training)
            for _ in range(MANY):
                evaluated = evaluate(inputs(number))
            evaluated.asnumpy()
            net.set_train(True)
            if number == STEPS - 1:
                program = program_of(net)
                assert program is not None
                assert program.tape is not None
                left = program.tape.drain().ids.tolist()
        monitor.close()
    assert len(left) <= 2 * MOST_FORWARDS * PER_FORWARD
    assert losses + state_of(net, optimizer) == plain(how, Deep)
    (directory,) = set(output.directories()) - set(before)
    rows = rows_in(output, directory)
    last = {key: values for key, values in expected.items() if key[2] < STEPS - 1}
    assert {key: values for key, values in rows.items() if key[2] < STEPS - 1} == last
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("how", WHOLE)
def test_gradients_of_several_steps_that_are_replayed_together_are_not_confused(
    how: str, output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the training flag off, no forward separates them."""
    monkeypatch.setattr(Program, "follow", lambda _: None)
    before = output.directories()
    with mode_of(how):
        net = with_fixed_weights(Deep()).set_train(False)
        optimizer = adam(net.trainable_params())
        with TrainerMon(written(output, **RECORDED)) as monitor:
            monitor.set_monitor(net, 1, optimizer)
            step = step_of(how, net, optimizer)
            for number in range(STEPS):
                step(inputs(number))
    (directory,) = set(output.directories()) - set(before)
    steps = [step for kind, name, step, _ in rows_in(output, directory) if (kind, name) == ("grad_unreduced", "a.weight")]
    assert steps == list(range(STEPS))
    assert [said for said in warnings_in(caplog) if "several gradients of one parameter" in said] == []


# --- Orders of execution, entry by entry.


class Entries:
    """Makes entries as compiled code does, by operators of the dynamic graph."""

    def __init__(self, most: int = 0) -> None:
        self.tape = Tape()
        self.tape.set_up(0.0, higher=False, check_sums=False, magnitudes=False)
        self.tape.bound(most)
        self._follow = follow_operator()
        self._x = Tensor(np.ones(3, np.float32))

    def make(self, number: int, call: int = 0, **flags: bool) -> int:
        """The number of an entry: that of a call, if it begins a forward."""
        slot = self.tape.slot(number, **flags)
        return int(self._follow(self._x, slot, Tensor(np.array([call], np.int64))).asnumpy()[0])


def test_the_oldest_forwards_without_a_backward_are_dropped_and_no_others() -> None:
    entries = Entries(most=2)
    first = entries.make(0, forward=True)
    entries.make(1, call=first, backward=True)
    numbers = [entries.make(number, forward=True) for number in range(10, 14)]
    found = entries.tape.drain()
    assert found.ids.tolist() == [0, 1, 12, 13]
    assert found.dropped == numbers[1]


def test_copied_elements_are_dropped_with_their_forward() -> None:
    entries = Entries(most=1)
    for number in (0, 10):
        entries.make(number, forward=True)
        for place in (1, 2):
            entries._x = Tensor(np.full(3, number + place, np.int32))
            entries.make(number + place)
    found = entries.tape.drain()
    assert found.ids.tolist() == [10, 11, 12]
    assert found.rows[1:, COLUMNS.index("max")].tolist() == [11.0, 12.0]
