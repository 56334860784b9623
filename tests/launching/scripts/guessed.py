"""Loops whose first step says more or less of micro-batches than the others; ``guessed.py HOW...``. Prints the norms by step.

``several.py`` says how several of them run.
"""

from __future__ import annotations

import sys
import threading

import torch
from several import one_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 4


def losses(how: str, model: nn.Module, x: Tensor) -> list[Tensor]:
    """What is called backward in a step, one after another."""
    if how == "parts":  # the model itself is never called
        return [model[0](x).relu().sum() / 2, model[1](x.relu()).sum() / 2]
    if how == "reentrant":
        return [checkpoint(model, x * part, use_reentrant=True).sum() for part in (0.5, 1.5)]
    if how == "actor and critic":
        y = model(x)
        return [y[:, :2].sum(), y[:, 2:].square().sum()]
    return [model(x).sum()]


def backward_of_threads() -> None:
    """Two backwards that overlap."""
    both = threading.Barrier(2)

    def backward() -> None:
        y = torch.ones(2, requires_grad=True) * 1.0
        y.register_hook(lambda _: both.wait() and None)
        y.sum().backward()

    threads = [threading.Thread(target=backward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    how = one_of(sys.argv[1:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    if how == "before":
        for _ in range(1000):
            (torch.ones(2, requires_grad=True) * 1.0).sum().backward()
    if how == "threads":
        backward_of_threads()
    if how == "skipped":
        for _ in range(2):
            scaler.scale(model(torch.full((2, 4), torch.inf)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for step in range(STEPS):
        x = torch.randn(2, 4, requires_grad=True)
        for loss in losses(how, model, x):
            (scaler.scale(loss) if how == "skipped" else loss).backward(retain_graph=how == "actor and critic")
        if how == "skipped":
            scaler.unscale_(optimizer)
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double().norm()
        print(f"step {step} norm {norm.item()!r}")
        if how == "skipped":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


main()
