"""``AnomalyBounds`` while training runs names the module whose scores leave their bound, and the step in which they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reading_back import Output
from torch import Tensor, nn
from typer.testing import CliRunner

import monitor
from monitor.anomalies.callbacks import AlertEvent
from monitor.cli import app

RULE = {"alert": {"rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyBounds"}], "dump": True}}
ATTENTION = {"recording_l2_features": True, "l2_targets": {"attention_head_hook": ["0.attention", "1.attention"]}}
STEPS, SPOILED = 6, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.query(x), self.key(x), x))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.attention(x)
        return result


def trained(factor: float, **fields: Any) -> list[AlertEvent]:
    """The events of a training in which the scores of the second attention grow by a factor."""
    torch.manual_seed(0)
    model, found = nn.Sequential(Block(), Block()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with monitor.watch(model, optimizer, None, micro_batches=1, ops=["norm"], **RULE, **fields) as watching:
        watching.add_alert_callback(found.extend)
        for step in range(STEPS):
            if step == SPOILED:
                with torch.no_grad():
                    model[1].attention.key.weight.mul_(factor)
            model(torch.randn(2, 5, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("output")
def test_scores_that_grow_beyond_their_bound_are_events_of_their_module_in_the_step_in_which_they_do() -> None:
    found = trained(1000.0, **ATTENTION)
    crossed = [(one.step, one.kind, one.name) for one in found if one.rule == "AnomalyBounds" and one.op == "max_logit"]
    assert (SPOILED, "attention_head_hook", "1.attention.heads") in crossed
    assert {step for step, *_ in crossed if step} == {SPOILED}
    assert {name.partition(".heads")[0] for *_, name in crossed} == {"1.attention"}


@pytest.mark.usefixtures("output")
def test_a_healthy_training_has_no_event() -> None:
    assert trained(1.0, **ATTENTION) == []


def test_the_ranking_names_the_module(output: Output) -> None:
    trained(1000.0, **ATTENTION)
    shown = CliRunner().invoke(app, ["rank-anomalies", str(output.base)], env={"COLUMNS": "300"})
    assert shown.exit_code == 1, shown.output
    assert "1.attention" in shown.output
    assert "docs/report.md has the bound" in shown.output
