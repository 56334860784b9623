"""A run that ends without closing its metrics, in a function that has returned by then; ``metrics_left_open.py YAML``."""

from __future__ import annotations

import sys

import torch
from torch import nn

from monitor.pytorch.training import TrainingMetrics


def main() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    metrics = TrainingMetrics(sys.argv[1], model, optimizer)
    for _ in range(3):
        with metrics.step(batch_size=2) as step:
            step.loss = model(torch.ones(2, 4)).square().mean()
            step.loss.backward()
            optimizer.step()
            optimizer.zero_grad()


main()
