"""Parameters with ``grad_reduced`` alone: if backward has reached them and called no hook, one warning says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watching import Output, attached, warnings_in

STEPS = 3
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm"]}
X = torch.linspace(-1, 1, 20).reshape(4, 5)


class Branches(nn.Module):
    """Two layers, of which a step may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return (self.first(x) + self.second(x) if both else self.first(x)).square().mean()


Step = Callable[[Branches, int], None]


def train(output: Output, step: Step, **config: Any) -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **{**GRADIENTS, **config}):
        for number in range(STEPS):
            step(model, number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def assigned(model: Branches, _number: int) -> None:
    loss = model(X, both=True)
    loss.backward(inputs=[*model.first.parameters()], retain_graph=True)
    given = [*model.second.parameters()]
    for parameter, gradient in zip(given, torch.autograd.grad(loss, given), strict=True):
        parameter.grad = gradient


def test_gradients_that_no_hook_has_seen_are_named_once(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    train(output, assigned)
    assert {row.name for row in output.rows("grad_unreduced")} == {"first.weight", "first.bias"}
    (said,) = warnings_in(caplog)
    assert "In step 0, 2 of 4 parameters with a row of grad_reduced have none of grad_unreduced, such as second" in said


def unused_later(model: Branches, number: int) -> None:
    """The optimizer is given zeros where a step does not use a layer."""
    model(X, both=number == 0).backward()


def unused_first(model: Branches, number: int) -> None:
    model(X, both=number > 0).backward()


def frozen(model: Branches, _number: int) -> None:
    model.second.requires_grad_(False)
    model(X, both=True).backward()


@pytest.mark.parametrize("config", [{}, {"monitor_mbs_grad": True}, {"wg_reduced_only": True}, {"start_step": 1}], ids=str)
@pytest.mark.parametrize("step", [unused_later, unused_first, frozen])
def test_parameters_without_a_backward_lack_no_row(
    step: Step, config: dict[str, Any], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    train(output, step, **config)
    assert warnings_in(caplog) == []
