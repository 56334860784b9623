"""Parameters that no optimizer steps, in compiled code."""

from __future__ import annotations

import pytest
from attaching import Output, warnings_in
from compiled_steps import WHOLE, plain, recorded
from mindspore import Parameter, Tensor, nn, ops


class Normalized(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Dense(4, 4), nn.BatchNorm1d(4), nn.Dense(4, 1)
        self.scale = Parameter(ops.ones((4,)), requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)) * self.scale).sum()


@pytest.mark.parametrize("how", WHOLE)
def test_frozen_parameters_have_no_rows_from_compiled_steps_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded(how, Normalized, output)
    assert bits == plain(how, Normalized)
    names = {name for kind, name, *_ in rows if kind in ("param_origin", "param_updated")}
    assert names == {"a.weight", "a.bias", "norm.gamma", "norm.beta", "b.weight", "b.bias"}
    assert len([said for said in warnings_in(caplog) if "Parameters that no optimizer steps" in said]) == 1
