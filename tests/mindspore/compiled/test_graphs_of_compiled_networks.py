"""With measurements, MindSpore compiles the computations that it compiles without, where nothing is said to the contrary."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import pytest
from attaching import Output
from compiled_steps import plain, recorded
from final_graphs import Value, followed
from mindspore import Tensor, nn, ops
from test_bits_of_compiled_networks import LOOP, NETWORKS, SIZE

WHOLE = sorted(NETWORKS.keys() - {"loop"})
"""Networks that are one graph."""


class Supervised(nn.Cell):
    """One head after each residual block: the result of the first block is used twice in the second one, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE), nn.Dense(SIZE, 1)
        self.block = Gate()

    def construct(self, x: Tensor) -> Tensor:
        one = ops.tanh(self.up(x))
        return self.head(one).mean() + self.head(self.block(one)).square().mean()


class Gate(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        return self.value(x) * ops.sigmoid(self.gate(x)) + x


def compiled(make: Callable[[], nn.Cell], output: Output, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Value], list[Value]]:
    """The computations of training without and with a monitor."""
    with followed(monkeypatch) as without:
        ms.set_seed(1)
        plain("graph", make, **LOOP)
    with followed(monkeypatch) as there:
        ms.set_seed(1)
        recorded("graph", make, output, loop=LOOP)
    return without, there


@pytest.mark.parametrize("name", WHOLE)
def test_training_is_compiled_to_the_same_computations(name: str, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    without, there = compiled(NETWORKS[name], output, monkeypatch)
    assert there == without != []


def test_a_tensor_with_uses_inside_and_outside_of_a_cell_is_differentiated_in_another_order(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, there = compiled(Supervised, output, monkeypatch)
    assert there != without
