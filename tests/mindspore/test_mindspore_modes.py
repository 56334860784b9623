"""MindSpore's modes, and which cells take hooks in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from training import Net, train

from monitor.failures import Failures
from monitor.mindspore import tape
from monitor.mindspore.modules import TrainingFlag, chunks_of, compiled, observable, refuse_graph_mode
from monitor.mindspore.tape import COMPILED_VARIABLE


class Compiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SequentialCell(nn.Dense(4, 4))

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Partly(nn.Cell):
    """Has a compiled cell, one whose ``construct`` was compiled on its own, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Compiled()
        self.lone = nn.Dense(4, 4)
        self.lone.construct = ms.jit(self.lone.construct)
        self.plain = nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.plain(self.lone(self.block(x))).sum()


class Around(nn.Cell):
    """Compiled, with a compiled cell inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Compiled()

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.block(x).sum()


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.usefixtures("graph_mode")
def test_graph_mode_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "0")
    to_do = r"call mindspore\.set_context\(mode=mindspore\.PYNATIVE_MODE\) .*, or unset MONITOR_COMPILED_CODE\.$"
    expected = f"^mode is GRAPH_MODE, .*MONITOR_COMPILED_CODE is 0: {to_do}"
    with pytest.raises(ValueError, match=expected):
        refuse_graph_mode()


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("value", [None, "1"])
def test_without_the_operator_no_value_of_the_variable_is_advised(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(COMPILED_VARIABLE, value)
    monkeypatch.setattr(tape, "_follow", lambda: None)
    with pytest.raises(ValueError, match="the operator for compiled code cannot be used here: call mindspore") as refusal:
        refuse_graph_mode()
    assert COMPILED_VARIABLE not in str(refusal.value)


@pytest.mark.usefixtures("graph_mode")
def test_graph_mode_is_accepted_where_operators_can_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE, raising=False)
    refuse_graph_mode()


def test_the_default_mode_is_not_refused() -> None:
    refuse_graph_mode()


@pytest.mark.parametrize("value", ["true", "2"])
def test_a_value_without_a_meaning_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, value)
    with pytest.raises(ValueError, match=f"^MONITOR_COMPILED_CODE is '{value}': 1 records all .*, 0 none"):
        chunks_of(nn.Dense(2, 2))


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_values_with_a_meaning_are_accepted(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, value)
    assert len(chunks_of(nn.Dense(2, 2))) == 1


def test_cells_inside_compiled_ones_take_no_hooks_and_are_reported() -> None:
    found = observable(Partly())
    assert [name for name, _ in found.cells] == ["", "block", "lone", "plain"]
    assert found.warning() == "Cells inside 'block' are compiled (@jit) and have no rows: take @jit off to record them."


def test_of_compiled_cells_in_each_other_the_outermost_is_named() -> None:
    found = observable(Around())
    assert [name for name, _ in found.cells] == [""]
    assert found.warning().startswith("Cells inside the model are compiled")


def test_a_cell_used_inside_a_compiled_one_and_outside_takes_no_hook() -> None:
    model = Partly()
    model.again = model.block.inner
    assert all(cell is not model.again for _, cell in observable(model).cells)


def test_a_plain_model_hides_nothing() -> None:
    net = Net()
    found = observable(net)
    assert list(found.cells) == list(net.cells_and_names())
    assert found.warning() == ""


def test_compiled_cells_are_recognized_by_their_class_and_by_themselves() -> None:
    lone = nn.Dense(2, 2)
    assert not compiled(lone)
    lone.construct = ms.jit(lone.construct)
    assert compiled(lone)
    assert compiled(Compiled())
    assert compiled(nn.Adam(lone.trainable_params()))


def outcome(hooked: bool) -> tuple[list[bytes], list[str]]:
    model, called = Partly(), []
    for seed, parameter in enumerate(model.trainable_params()):
        parameter.set_data(Tensor(np.random.default_rng(seed).normal(size=parameter.shape).astype(np.float32)))
    model.set_train(True)
    for name, cell in observable(model).cells if hooked else ():

        def hook(_cell: nn.Cell, _args: object, _kwargs: object, _result: object, name: str = name) -> None:
            called.append(name)

        cell.register_forward_hook(hook, with_kwargs=True)
    losses = train(model, nn.Adam(model.trainable_params()), steps=1)
    return [x.tobytes() for x in (*losses, *(p.asnumpy() for p in model.trainable_params()))], called


def test_hooks_on_cells_that_take_them_are_called_and_change_no_bit() -> None:
    hooked, called = outcome(hooked=True)
    assert called == ["block", "lone", "plain", ""]
    assert hooked == outcome(hooked=False)[0]


@pytest.mark.parametrize("was_on", [False, True])
def test_a_model_that_trains_with_its_flag_off_is_reported_once(was_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted if an evaluation has left it so. Cells are made with the flag off."""
    net, failures = Net(), Failures()
    mode = TrainingFlag(failures)
    with caplog.at_level(logging.WARNING, "monitor"):
        if was_on:
            mode.called(net.set_train(True))
        assert not caplog.messages
        net.set_train(False)
        for _ in range(2):
            mode.called(net)
    assert len(caplog.messages) == 1
    assert ("It was on before" in caplog.messages[0]) == was_on
    assert failures.counts == ({"training flag": 1} if was_on else {})


def test_a_model_is_one_cell_or_a_list_of_chunks() -> None:
    net, other = Net(), Net()
    assert chunks_of(net) == [net]
    assert chunks_of((net, other)) == [net, other]


@pytest.mark.parametrize(("model", "error"), [([], ValueError), ([Net(), 3], TypeError), ("net", TypeError), (None, TypeError)])
def test_what_is_no_model_is_refused(model: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^model is an? .*expected a mindspore\.nn\.Cell, or a list of model chunks\.$"):
        chunks_of(model)
