"""Cells that take and give more than a tensor, are called more than once, or hold what is not trained."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, step_with, warnings_in, with_fixed_weights
from mindspore import Tensor, nn, ops
from training import inputs


class Many(nn.Cell):
    """Takes tuples in a tuple, a dictionary, keywords and None; gives a tensor, a dictionary with None, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(4, 4)

    def construct(self, pair: Any, table: Any, *, scale: Any = None, nothing: Any = None) -> Any:
        x, (y, ids) = pair
        h = self.layer(x + y) * table["m"] * scale
        return h, {"twice": h * 2.0, "none": nothing}, [ids]


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.many = Many()
        self.shared = nn.Dense(4, 4)
        self.frozen = nn.Dense(4, 4)
        self.stopped = nn.Dense(4, 4)
        self.frozen.weight.requires_grad = False

    def construct(self, x: Tensor) -> Tensor:
        ids = Tensor(np.array([1, 2, 3], np.int32))
        ones = Tensor(np.ones((3, 4), np.float32))
        h, more, _ = self.many((x, (self.table(ids), ids)), {"m": ones}, scale=Tensor(0.5, ms.float32))
        h = self.shared(ops.tanh(self.shared(h)))
        h = self.frozen(ops.tanh(h)) + more["twice"]
        return (ops.tanh(h) + self.stopped(ops.stop_gradient(h))).sum()


def trained(output: Output, steps: int = 1, **config: Any) -> None:
    net = with_fixed_weights(Model())
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING | config):
        for number in range(steps):
            step_with(net, optimizer, number)


def norms(output: Output, kind: str) -> dict[str, float]:
    return {row.name: row.values["norm"] for row in output.rows(kind) if row.step == 0}


def test_every_tensor_in_what_a_cell_takes_and_gives_has_a_row_by_its_place(output: Output) -> None:
    trained(output)
    assert {name for name in norms(output, "actv") if name.startswith("many.") and "layer" not in name} == {
        "many.input_0_0",
        "many.input_0_1_0",
        "many.input_0_1_1",
        "many.input_1_m",
        "many.input_scale",
        "many.output_0",
        "many.output_1_twice",
        "many.output_2_0",
    }


def test_gradients_have_rows_where_there_are_some(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    trained(output)
    found = norms(output, "actv_grad")
    assert {name for name in found if name.startswith("many.") and "layer" not in name} == {
        "many.input_0_1_0",
        "many.output_0",
        "many.output_1_twice",
    }
    assert found["many.output_1_twice"] == pytest.approx(found["frozen.output"])
    assert found["many.input_0_1_0"] == pytest.approx(found["table.output"])
    assert "table.input" not in found
    assert warnings_in(caplog) == []


def test_behind_stop_gradient_there_is_none(output: Output) -> None:
    trained(output)
    found = norms(output, "actv_grad")
    assert "stopped.input" not in found
    assert found["stopped.output"] == pytest.approx(math.sqrt(12))


def test_a_cell_that_is_called_twice_has_rows_of_both_calls_and_one_gradient_of_its_weight(output: Output) -> None:
    trained(output)
    for kind in ("actv", "actv_grad"):
        assert {"shared.input", "shared.input#1", "shared.output", "shared.output#1"} <= norms(output, kind).keys()
    forward, weights = norms(output, "actv"), norms(output, "grad_unreduced")
    assert forward["shared.input"] == forward["many.output_0"]
    assert weights["shared.weight"] == pytest.approx(norms(output, "grad_reduced")["shared.weight"], rel=1e-12)


def test_one_parameter_in_two_cells_has_one_row_of_its_whole_gradient(output: Output) -> None:
    net = with_fixed_weights(nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 4)))
    net[2].weight = net[0].weight
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(inputs(0))
        expected = {p.name: np.linalg.norm(g.asnumpy()) for p, g in zip(optimizer.parameters, gradients, strict=True)}
        optimizer(gradients)
    assert len(expected) == 3
    assert norms(output, "grad_unreduced") == pytest.approx(expected, rel=1e-6)


def test_a_frozen_parameter_has_gradients_while_it_is_trained(output: Output) -> None:
    """MindSpore hands the optimizer zeros in place of the others."""
    net = with_fixed_weights(Model())
    net.frozen.weight.requires_grad = True
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    net.frozen.weight.requires_grad = False
    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(5):
            net.frozen.weight.requires_grad = number in (2, 3)
            step_with(net, optimizer, number)
    for kind in ("grad_unreduced", "grad_reduced"):
        assert [row.step for row in output.rows(kind) if row.name == "frozen.weight"] == [2, 3]
        assert {row.step for row in output.rows(kind)} == set(range(5))


@pytest.mark.parametrize(
    ("targets", "forward", "backward"),
    [
        ({"shared": {}}, ["shared.input", "shared.input#1", "shared.output", "shared.output#1"], None),
        ({"many": {"output": "tuple[3]:0"}}, ["many.output_0"], []),
        ({"many": {"output": "tuple[3]:1"}}, ["many.output_1_twice"], []),
        ({"many": {"output_grad": "tuple[3]:1"}}, [], ["many.output_1_twice"]),
        ({"many": {"input": "tuple[3]:2"}}, ["many.input_scale"], []),
        ({"table": {"output": "tensor", "output_grad": "tensor"}}, ["table.output"], ["table.output"]),
        ({"0:stopped": {"input": "tuple[1]", "input_grad": "tuple[1]"}}, ["stopped.input"], []),
        ({"many.layer": {"input_grad": "tuple[1]:0"}}, [], ["many.layer.input"]),
    ],
    ids=str,
)
def test_targets_choose_in_every_spelling(
    output: Output, targets: dict[str, Any], forward: list[str], backward: list[str] | None
) -> None:
    trained(output, targets=targets, all_xy=False)
    assert sorted(norms(output, "actv")) == forward
    assert sorted(norms(output, "actv_grad")) == (forward if backward is None else backward)


@pytest.mark.parametrize(("switch", "kind"), [("forward_only", "actv"), ("backward_only", "actv_grad")])
def test_one_of_both_ways_alone(output: Output, switch: str, kind: str) -> None:
    trained(output, **{switch: True})
    assert {other for other in ("actv", "actv_grad") if norms(output, other)} == {kind}
