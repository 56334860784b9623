"""Training metrics of a model that several optimizers train: norms are those of all parameters, or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shown import EVERYTHING, scalars
from torch import nn
from torch.optim import AdamW, Muon

from monitor.pytorch.training import TrainingMetrics

STEPS = 3


def train(base: Path, *, every: bool) -> tuple[list[float], dict[str, Any]]:
    """The total norm of the gradients of each step, and what is shown. ``every``: whether both optimizers are passed."""
    (base / "train.yaml").write_text(EVERYTHING.format(base=base))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    matrices = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    rest = AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    totals = []
    with TrainingMetrics(base / "train.yaml", model, [matrices, rest] if every else matrices) as metrics:
        for _ in range(STEPS):
            with metrics.step(batch_size=6) as step:
                step.loss = model(torch.randn(6, 4)).square().mean()
                step.loss.backward()
                totals.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
                for one in (matrices, rest):
                    one.step()
                model.zero_grad()
    return totals, scalars(base / "board" / "rank_0")


def test_the_norm_of_the_gradient_is_that_of_all_optimizers(tmp_path: Path) -> None:
    totals, shown = train(tmp_path, every=True)
    assert [value for _, value in shown["grad-norm"]] == pytest.approx(totals, rel=1e-6)
    assert [value for _, value in shown["learning-rate"]] == pytest.approx([0.02] * STEPS, rel=1e-6)
    assert len(shown["weight_norm"]) == STEPS


def test_norms_of_some_parameters_are_not_shown_as_those_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, shown = train(tmp_path, every=False)
    assert not {"grad-norm", "weight_norm"} & set(shown)
    assert any("the optimizers that were passed do not step all parameters" in message for message in caplog.messages)
