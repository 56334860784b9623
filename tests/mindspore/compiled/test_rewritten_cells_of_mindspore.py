"""Cells that MindSpore rewrites after the monitor was attached compute what they compute without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import Deep, mode_of, state_of, step_of, train
from mindspore import nn, rewrite
from mindspore.train import amp


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore writes the code of rewritten cells to the working directory. It also puts folders of its own before all others
    in which Python looks for modules, and one of them has a ``math``.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


class Single(nn.Cell):
    """A network that ``rewrite`` can parse."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 2)
        self.act = nn.Tanh()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.a(x)
        y = self.act(x)
        return y  # noqa: RET504 (a name that can be rewritten)


def in_low_precision(net: nn.Cell) -> nn.Cell:
    rewritten: nn.Cell = amp.auto_mixed_precision(net, "O1")
    return rewritten


def with_another_activation(net: nn.Cell) -> nn.Cell:
    tree = rewrite.SymbolTree.create(net)
    for node in list(tree.nodes()):
        if node.get_instance_type() is nn.Tanh:
            tree.replace(node, [rewrite.Node.create_call_cell(nn.Sigmoid(), node.get_targets(), node.get_args())])
    rewritten: nn.Cell = tree.get_network()
    return rewritten


def bits(how: str, make: Any, change: Any, output: Output | None) -> list[bytes]:
    with mode_of(how):
        net = with_fixed_weights(make())
        optimizer = nn.SGD(net.trainable_params(), 0.01)
        monitor = attached(output, net, optimizer, xy_distribution=True, ops=["norm"]) if output else None
        losses = train(step_of(how, change(net).set_train(True), optimizer))
        if monitor is not None:
            monitor.close()
        return losses + state_of(net, optimizer)


@pytest.mark.parametrize("how", ["dynamic", "graph", "jit"])
@pytest.mark.parametrize(("make", "change"), [(Deep, in_low_precision), (Single, with_another_activation)])
def test_rewritten_cells_train_with_the_bits_of_unmonitored_ones(how: str, make: Any, change: Any, output: Output) -> None:
    assert bits(how, make, change, output) == bits(how, make, change, None)
    assert bits(how, make, change, None) != bits(how, make, lambda net: net, None)


@pytest.mark.parametrize("how", ["dynamic", "graph"])
def test_rewritten_cells_have_no_rows_and_that_is_said(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    bits(how, Deep, in_low_precision, output)
    (said,) = [one for one in warnings_in(caplog) if "got modules" in one]
    assert "a, body.0, body.1 and 1 more" in said
    assert {row.name.rpartition(".")[0] for row in output.rows("actv")} <= {"", "body"}
