"""A monitor whose model the loop never calls says so when it is closed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from watching import Output, attached, warnings_in


@pytest.mark.parametrize("trained", [True, False])
def test_a_copy_that_trains_in_place_of_the_model_is_told_once(
    trained: bool, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2)
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters())
    with attached(output, model, torch.optim.SGD(model.parameters(), lr=0.1), wg_distribution=True):
        for _ in range(3 * trained):
            other(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    said = [one for one in warnings_in(caplog) if "No training forward of the model" in one]
    assert [one for one in said if "(Adam)" in one] == warnings_in(caplog)
    assert len(said) == trained
