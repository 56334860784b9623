"""A compiled step ends when everything of it is measured, whichever kinds are recorded."""

from __future__ import annotations

from typing import Any

import pytest
from attaching import Output
from compiled_steps import WHOLE, Deep, OptimizerOf, adam, assert_same, plain, recorded
from evidence import in_turn
from mindspore import nn

NOTHING = dict.fromkeys(("xy_distribution", "all_xy", "wg_distribution", "param_distribution", "mv_distribution"), False)
ALONE: dict[str, dict[str, Any]] = {
    "activations": {"xy_distribution": True, "all_xy": True},
    "gradients": {"wg_distribution": True},
    "weights": {"param_distribution": True},
    "moments": {"mv_distribution": True},
}


def reversed_adam(parameters: list[Any]) -> nn.Cell:
    """Its first gradient is the one that a backward computes first."""
    return adam(parameters[::-1])


OPTIMIZERS: dict[str, OptimizerOf] = {"activations": reversed_adam, "gradients": adam, "weights": adam, "moments": adam}


@pytest.mark.parametrize(("kinds", "how"), in_turn(OPTIMIZERS, WHOLE))
def test_a_kind_has_all_its_rows_if_it_is_recorded_alone(kinds: str, how: str, output: Output) -> None:
    optimizer_of = OPTIMIZERS[kinds]
    config = {**NOTHING, **ALONE[kinds]}
    _, expected = recorded("dynamic", Deep, output, optimizer_of, **config)
    bits, rows = recorded(how, Deep, output, optimizer_of, **config)
    assert bits == plain(how, Deep, optimizer_of)
    assert_same(rows, expected, 1e-4)
