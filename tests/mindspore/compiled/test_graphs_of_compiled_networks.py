"""Whole graphs are recorded without being asked if MindSpore compiles the same computations with measurements as without."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import pytest
from attaching import Output, warnings_in
from compiled_steps import Rows, plain, recorded
from mindspore import Tensor, nn, ops
from test_bits_of_compiled_networks import LOOP, NETWORKS, SIZE

from monitor.mindspore.compiled.fallback import CHANGED
from monitor.mindspore.tape import COMPILED_VARIABLE

WHOLE = sorted(NETWORKS.keys() - {"loop"})
"""Networks that are one graph."""


class Gate(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        return self.value(x) * ops.sigmoid(self.gate(x)) + x


class Supervised(nn.Cell):
    """One head after each block: the result of the first one is used three times in the second one, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = Gate(), Gate(), Gate(), nn.Dense(SIZE, 1)

    def construct(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(one)
        return self.head(one).mean() + self.head(two).square().mean() + self.head(self.third(two)).mean()


def trained(make: Callable[[], nn.Cell], output: Output) -> tuple[list[bytes], list[bytes], Rows]:
    """The bits without and with a monitor, and its rows."""
    ms.set_seed(1)
    bits = plain("graph", make, **LOOP)
    ms.set_seed(1)
    return bits, *recorded("graph", make, output, loop=LOOP)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs_are_recorded_without_being_asked(name: str, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(NETWORKS[name], output)
    assert found == bits
    assert {kind for kind, *_ in rows} >= {"actv", "actv_grad", "grad_reduced"}


def test_they_have_the_rows_that_they_have_on_request(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, expected = trained(NETWORKS["lstm"], output)
    monkeypatch.delenv(COMPILED_VARIABLE)
    _, _, rows = trained(NETWORKS["lstm"], output)
    assert rows == expected


@pytest.mark.parametrize("make", [Supervised, NETWORKS["loop"]], ids=["supervised", "loop"])
def test_other_computations_and_those_that_cannot_be_compared_are_compiled_without_the_monitor(
    make: Callable[[], nn.Cell], output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    bits, found, rows = trained(make, output)
    assert found == bits
    assert rows == {}
    assert [one for one in warnings_in(caplog) if CHANGED in one] != []


def test_the_same_network_has_other_bits_if_it_is_recorded_on_request(output: Output) -> None:
    bits, found, rows = trained(Supervised, output)
    assert found != bits
    assert rows != {}
