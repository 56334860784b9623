"""Tensors that are replaced after the first step of an optimizer that MindSpore compiles: it keeps using the earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import attached, warnings_in
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from reading_back import Output
from watching_cells import TwoLayers, batch, loss_of

from monitor import open_run

STEPS, WHEN = 6, 3
EVERYTHING: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "mg_direction": True,
    "update_ratio": True,
    "optimizer_health": True,
    "ur_distribution": True,
    "format": "parquet",
    "ops": ["norm"],
    "run_numbers": None,
}
OF_STATE = {"exp_avg", "exp_avg_sq", "mg_direction", "optimizer_health", "adam_update", "adam_ratio"}


def adam(parameters: Any) -> nn.Cell:
    return nn.Adam(parameters, 0.001)


def by_assignment(_net: nn.Cell, optimizer: nn.Cell) -> None:
    ops.assign(optimizer.learning_rate, Tensor(0.1, ms.float32))


def by_set_data(_net: nn.Cell, optimizer: nn.Cell) -> None:
    optimizer.learning_rate.set_data(Tensor(0.1, ms.float32))


def of_moments(_net: nn.Cell, optimizer: nn.Cell) -> None:
    loaded = {one.name: Parameter(Tensor(np.full(one.shape, 9, np.float32)), name=one.name) for one in optimizer.moment1}
    ms.load_param_into_net(optimizer, loaded)


def of_weights(net: nn.Cell, _optimizer: nn.Cell) -> None:
    for one in net.trainable_params():
        one.set_data(Tensor(one.asnumpy() * 0.5))


def trained(output: Output, make: Callable[[Any], nn.Cell], change: Callable[[nn.Cell, nn.Cell], None]) -> None:
    net = TwoLayers()
    optimizer = make(net.trainable_params())
    gradients_of = ms.grad(loss_of(net), None, optimizer.parameters)
    with attached(output, net, optimizer, **EVERYTHING):
        for step in range(STEPS):
            if step == WHEN:
                change(net, optimizer)
            optimizer(gradients_of(*map(Tensor, batch(step))))


def steps_of(output: Output, kind: str) -> set[int]:
    return set(open_run(output.base).rows(kind)["step"].to_pylist())


def rates(output: Output) -> list[float]:
    rows = open_run(output.base).rows("run", name="learning_rate.0").sort_by("step")
    return [float(rate) for rate in rows["value"].to_pylist()]


@pytest.mark.parametrize("change", [by_set_data, of_moments, of_weights])
def test_what_a_compiled_optimizer_does_not_use_has_no_rows_and_one_warning_says_so(
    change: Callable[[nn.Cell, nn.Cell], None], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    trained(output, adam, change)
    assert rates(output) == pytest.approx([0.001] * WHEN)
    assert {kind: max(steps_of(output, kind)) for kind in OF_STATE} == dict.fromkeys(OF_STATE, WHEN - 1)
    assert steps_of(output, "param_origin") == steps_of(output, "update_ratio") == set(range(STEPS))
    (warning,) = warnings_in(caplog)
    assert "of Adam were replaced after its first step" in warning


@pytest.mark.parametrize(
    ("make", "change"),
    [(adam, by_assignment), (lambda parameters: optim.Adam(parameters, 0.001), of_weights)],
    ids=["assigned", "an optimizer that is not compiled"],
)
def test_what_an_optimizer_uses_has_all_rows(
    make: Callable[[Any], nn.Cell],
    change: Callable[[nn.Cell, nn.Cell], None],
    output: Output,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(output, make, change)
    later = [0.1 if change is by_assignment else 0.001] * (STEPS - WHEN)
    assert rates(output) == pytest.approx([0.001] * WHEN + later)
    assert {kind: max(steps_of(output, kind)) for kind in OF_STATE} == dict.fromkeys(OF_STATE, STEPS - 1)
    assert warnings_in(caplog) == []
