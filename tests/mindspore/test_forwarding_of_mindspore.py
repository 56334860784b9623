"""``TrainerMon.forward_to`` with MindSpore: a function gets the numbers of the files."""

from __future__ import annotations

import mindspore as ms
from attaching import EVERYTHING, Output, attached, with_fixed_weights
from mindspore import nn
from training import inputs
from watching_cells import TwoLayers


def test_a_function_gets_the_numbers_of_the_files(output: Output) -> None:
    net = with_fixed_weights(TwoLayers())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    gradients_of = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    seen: dict[tuple[str, int], float] = {}
    with attached(output, net, optimizer, **EVERYTHING) as monitor:
        monitor.forward_to(
            lambda numbers, step: seen.update({(name, step): value for name, value in numbers.items()}), kinds=["grad_reduced"]
        )
        for step in range(3):
            optimizer(gradients_of(inputs(step))[1])
    rows = output.rows("grad_reduced")
    assert {(f"monitor/grad_reduced/{row.name}/norm", row.step): row.values["norm"] for row in rows} == seen
    assert seen
