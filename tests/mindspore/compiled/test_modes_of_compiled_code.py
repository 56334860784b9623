"""Functions that are compiled (``@jit``) are recorded only on request, also if the model is attached in GRAPH_MODE."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from attaching import Output, attached, steps_of, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, adam, mode_of, state_of, step_of, train
from mindspore import Tensor, nn, ops

from monitor.mindspore import hooks
from monitor.mindspore.tape import COMPILED_VARIABLE

SIZE = 8
SAID = "Code that calls a monitored cell is compiled (@jit or GRAPH_MODE)"


class Loop(nn.Cell):
    """Calls one recurrent cell several times."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        state = ops.zeros_like(x)
        for i in range(4):
            state = self.cell(x * (i + 1.0), state)
        return self.head(state).mean()


class OfPair(Loop):
    def construct(self, x: Tensor) -> Tensor:
        state = ops.zeros_like(x), ops.zeros_like(x)
        for i in range(4):
            state = self.cell(x * (i + 1.0), state)
        return self.head(state[0]).mean()


NETWORKS: dict[str, Callable[[], nn.Cell]] = {
    "GRUCell": lambda: Loop(nn.GRUCell(SIZE, SIZE)),
    "LSTMCell": lambda: OfPair(nn.LSTMCell(SIZE, SIZE)),
}


def batches(step: int) -> Tensor:
    return Tensor(np.random.default_rng(step).normal(size=(6, SIZE)).astype(np.float32))


@pytest.fixture(autouse=True)
def _not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    hooks._warn_once.cache_clear()


def trained(make: Callable[[], nn.Cell], how: str, mode: str, output: Output | None) -> list[bytes]:
    """The bits of training a model that is attached in GRAPH_MODE; without an output, of a plain one.

    Args:
        mode: The mode in which it is trained, for ``mode_of``.
    """
    net = with_fixed_weights(make())
    optimizer = adam(net.trainable_params())
    with ExitStack() as until:
        if output is not None:
            with mode_of("graph"):
                until.enter_context(attached(output, net, optimizer, **RECORDED))
        with mode_of(mode):
            losses = train(step_of(how, net, optimizer), given=batches)
    return losses + state_of(net, optimizer)


@pytest.mark.parametrize("mode", ["dynamic", "graph"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_jit_step_has_the_same_bits_and_no_rows_and_that_is_said_once(
    name: str, mode: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    assert trained(NETWORKS[name], "jit", mode, output) == trained(NETWORKS[name], "jit", mode, None)
    assert list(output.directory().glob("*.csv")) == []
    (said,) = warnings_in(caplog)
    assert said.startswith(SAID)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_that_python_asks_for_in_graph_mode_have_the_same_bits(
    name: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """MindSpore compiles the call of ``value_and_grad`` as a function, and the optimizer as a cell."""
    assert trained(NETWORKS[name], "dynamic", "graph", output) == trained(NETWORKS[name], "dynamic", "graph", None)
    assert steps_of(output, "param_updated") == steps_of(output, "grad_reduced") == [0, 1, 2]
    assert not list(output.directory().glob("actv*.csv"))
    assert len([said for said in warnings_in(caplog) if said.startswith(SAID)]) == 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_cell_of_graph_mode_has_the_same_bits_and_rows(name: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(NETWORKS[name], "graph", "graph", output) == trained(NETWORKS[name], "graph", "graph", None)
    assert steps_of(output, "actv_grad") == steps_of(output, "param_updated") == [0, 1, 2]
    assert warnings_in(caplog) == []


def test_steps_before_and_after_a_jit_step_are_recorded(output: Output) -> None:
    def run(until: ExitStack, *, monitored: bool) -> list[bytes]:
        net = with_fixed_weights(NETWORKS["GRUCell"]())
        optimizer = adam(net.trainable_params())
        with mode_of("graph"):
            if monitored:
                until.enter_context(attached(output, net, optimizer, **RECORDED))
            whole = step_of("graph", net, optimizer)
            losses = train(whole, given=batches)
        losses += train(step_of("jit", net, optimizer), given=batches)
        losses += train(step_of("dynamic", net, optimizer), given=batches)
        with mode_of("graph"):
            losses += train(whole, given=batches)
        return losses + state_of(net, optimizer)

    with ExitStack() as until:
        bits = run(until, monitored=True)
    assert bits == run(until, monitored=False)
    assert steps_of(output, "actv_grad") == steps_of(output, "param_updated") == list(range(9))
