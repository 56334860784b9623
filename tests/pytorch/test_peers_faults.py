"""Faults known of other monitors that have no better place, and that each known one has a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Adam
from watching import EVERYTHING, Output, attached, train

KNOWN = (*range(1, 14), *range(15, 24))
AWKWARD = ["a:b", "a/b", "a,b", 'a"b"', "a\nb", " a ", "a'b", "ä→b", "#1"]


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in AWKWARD:
            self.register_parameter(f"{name} weight", nn.Parameter(torch.randn(5)))
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in AWKWARD:
            x = getattr(self, name)(x) * getattr(self, f"{name} weight")
        return x


def test_names_that_hold_separators_quotes_and_newlines_come_back_in_every_kind(output: Output) -> None:
    """Peers, fault 10: names with ``:`` or ``/`` shifted the columns."""
    model = Awkward()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **EVERYTHING):
        train(model, optimizer, 2, torch.randn(3, 5))
    names = {name for name, _ in model.named_parameters()}
    for kind in ("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"):
        rows = output.rows(kind)
        assert {row.name for row in rows} == names
        assert all(value is not None for row in rows for value in row.values.values())
    modules = {name for name, _ in model.named_modules()}
    assert {row.name for row in output.rows("actv")} == {f"{one}.{side}" for one in modules for side in ("input", "output")}


@pytest.mark.parametrize("fault", KNOWN)
def test_every_known_fault_is_named_by_a_test(fault: int) -> None:
    tests = Path(__file__).resolve().parents[1]
    naming = re.compile(rf"fault[ _]{fault}(?!\d)", re.IGNORECASE)
    assert any(naming.search(path.read_text(encoding="utf-8")) for path in tests.rglob("test_*.py"))
