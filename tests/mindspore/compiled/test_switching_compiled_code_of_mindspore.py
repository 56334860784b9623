"""Recording starts and stops after MindSpore has compiled a step, which it does not compile again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attaching import Output, with_fixed_weights
from compiled_steps import KINDS, RECORDED, WHOLE, Deep, adam, assert_same, mode_of, plain, recorded, rows_in, state_of, step_of
from hanging import until
from mindspore import nn
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon
from monitor.mindspore.compiled.program import Program


class Compilations:
    """Counts what the compiler asks the monitor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        asked = Program.observes

        def observes(program: Program, number: int) -> bool:
            self.count += 1
            return asked(program, number)

        monkeypatch.setattr(Program, "observes", observes)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    return Compilations(monkeypatch)


def attached(output: Output, net: nn.Cell, optimizer: nn.Cell, **config: Any) -> TrainerMon:
    monitor = TrainerMon(written(output, **{**RECORDED, **config}))
    monitor.set_monitor(net, 1, optimizer)
    return monitor


def new_directory(output: Output, before: list[Path]) -> Path:
    (found,) = set(output.directories()) - set(before)
    return found


@pytest.mark.parametrize("how", WHOLE)
def test_a_closed_monitor_records_nothing_and_another_one_records_again_without_compiling(
    how: str, output: Output, compilations: Compilations
) -> None:
    expected_bits = plain(how, Deep, steps=6)
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 6})
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of(how, net, optimizer)
        losses = []
        found: dict[tuple[Any, ...], Any] = {}
        for monitored in (True, False, True):
            before, asked = output.directories(), compilations.count
            monitor = attached(output, net, optimizer) if monitored else None
            start = len(losses)
            losses += [step(inputs(number)).asnumpy().tobytes() for number in range(start, start + 2)]
            if monitor is not None:
                monitor.close()
                of = rows_in(output, new_directory(output, before))
                found |= {(*key[:2], key[2] + start, key[3]): values for key, values in of.items()}
            assert (compilations.count > asked) == (start == 0)
    assert losses + state_of(net, optimizer) == expected_bits
    assert_same(found, {key: values for key, values in expected.items() if key[2] not in (2, 3)})


@pytest.mark.parametrize("how", WHOLE)
def test_steps_that_are_not_collected_are_counted(how: str, output: Output) -> None:
    config = {"start_step": 1, "step_interval": 2}
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 5}, **config)
    bits, rows = recorded(how, Deep, output, loop={"steps": 5}, **config)
    assert bits == plain(how, Deep, steps=5)
    assert {step for _, _, step, _ in rows} == {1, 3}
    assert_same(rows, expected)


def test_dynamic_monitoring_switches_graph_mode_without_compiling(
    output: Output, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 8})
    before = output.directories()
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    path = output.base.parent / "config.json"
    path.write_text(json.dumps({**RECORDED, "run_numbers": False, "dynamic_on": False}))
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        monitor = TrainerMon(path)
        monitor.set_monitor(net, 1, optimizer)
        step = step_of("graph", net, optimizer)
        losses = [step(inputs(number)).asnumpy().tobytes() for number in range(2)]
        asked = compilations.count
        for wanted in (True, False):
            assert until(partial(has_taken, monitor, len(losses)), 60.0), "a thread takes the steps of compiled code"
            path.write_text(json.dumps({**RECORDED, "run_numbers": False, "dynamic_on": wanted}))  # which a thread may read now
            look_at_file(monitor)
            losses += [step(inputs(number)).asnumpy().tobytes() for number in range(len(losses), len(losses) + 3)]
        monitor.close()
    assert compilations.count == asked > 0
    assert losses + state_of(net, optimizer) == plain("graph", Deep, steps=8)
    rows = rows_in(output, new_directory(output, before))
    steps = sorted({step for _, _, step, _ in rows})
    assert {kind for kind, *_ in rows} == set(KINDS)
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[0] in (2, 3), "the monitor takes the steps of compiled code a little later"
    assert_same(rows, {key: values for key, values in expected.items() if key[2] in steps})


def has_taken(monitor: TrainerMon, steps: int) -> bool:
    return monitor.step == steps


def look_at_file(monitor: TrainerMon) -> None:
    """As the thread does once a second."""
    switching = monitor._recordings[0].switching
    assert switching is not None
    assert switching._control is not None
    assert switching._control._watching is not None
    switching._control._watching.turn()
