"""The structure of a model, after which the run ends, and the stacks from which its cells are called."""

from __future__ import annotations

import csv
import json
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, footprint, step_with, steps_of, with_fixed_weights
from mindspore import Tensor, nn, ops
from training import Net, array, inputs

from monitor.mindspore import RunEnded


class Pair(nn.Cell):
    """Takes two tensors, one by keyword, and gives a tensor and a number in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 3)

    def construct(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, int]:
        return self.inner(x) * mask, 1


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.late = nn.Dense(3, 2)
        self.unused = nn.Dense(1, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.late(self.pair(x, mask=ops.ones((len(x), 3), ms.float16))[0])


def differentiated_step(net: nn.Cell, optimizer: nn.Cell) -> None:
    _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(inputs(0))
    optimizer(gradients)


def structure(output: Output) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output.base / "module_struct" / "rank0" / "module_struct.json").read_text())
    return found


def stacks(output: Output) -> dict[str, list[str]]:
    with open(output.directory() / "stack_info.csv", newline="") as file:
        return {row["module_name"]: row["stack_info"].splitlines() for row in csv.DictReader(file)}


def test_it_describes_every_cell_that_was_called_in_the_spelling_of_targets_and_ends_the_run(output: Output) -> None:
    net = with_fixed_weights(Model())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    before, start = footprint(net, optimizer), array(net.late.weight)
    attached(output, net, optimizer, print_struct=True, wg_distribution=True)
    with pytest.raises(RunEnded, match=r"module_struct\.json") as ended:
        differentiated_step(net, optimizer)
    assert ended.value.code == 0
    plain, inner = "size=(3, 4), dtype=Float32", "size=(3, 3), dtype=Float32"
    last = {"config": "tensor", "tensor": "size=(3, 2), dtype=Float32"}
    argument = {"config": "tuple[1]", "0": plain}
    found = structure(output)
    assert list(found) == ["0:pair.inner", "0:pair", "0:late", "0:"]
    assert found["0:pair"]["input"] == {"config": "tuple[2]", "0": plain, "mask": "size=(3, 3), dtype=Float16"}
    assert found["0:pair"]["output"] == found["0:pair"]["output_grad"] == {"config": "tuple[2]", "0": inner}
    assert found["0:late"] == {
        "input": {"config": "tuple[1]", "0": inner},
        "output": last,
        "input_grad": {"config": "tuple[1]", "0": inner},
        "output_grad": last,
    }
    assert found["0:"]["input"] == argument
    assert (array(net.late.weight) != start).any()
    assert footprint(net, optimizer) == before
    assert output.manifest()["closed"] is True
    assert steps_of(output, "grad_reduced") == [0]


def test_an_evaluation_before_the_first_step_is_not_described(output: Output) -> None:
    net = with_fixed_weights(Model())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    attached(output, net, optimizer, print_struct=True)
    net(inputs(0)[:2])
    with pytest.raises(RunEnded):
        differentiated_step(net, optimizer)
    assert structure(output)["0:"]["input"]["0"] == "size=(3, 4), dtype=Float32"


def test_stacks_hold_who_calls_each_cell_without_machinery(output: Output) -> None:
    net = with_fixed_weights(Model())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, stack_info=True, step_interval=5, start_step=5):
        differentiated_step(net, optimizer)
        differentiated_step(net, optimizer)
    found = stacks(output)
    assert set(found) == {"0:", "0:pair", "0:pair.inner", "0:late"}
    functions = [frame.split(", in ")[1].split(",")[0] for frame in found["0:pair.inner"]]
    assert functions[:4] == ["construct", "construct", "<lambda>", "differentiated_step"]
    assert not any("mindspore/" in frame.split(", line ")[0].replace("tests/mindspore/", "") for frame in found["0:pair.inner"])
    assert not any("/monitor/" in frame for frames in found.values() for frame in frames)


def test_only_targets_have_a_stack_where_there_are_targets(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, stack_info=True, targets={"a": {}}):
        step_with(net, optimizer)
    assert set(stacks(output)) == {"0:a"}
