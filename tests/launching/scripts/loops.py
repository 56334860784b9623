"""Programs that know nothing of the monitor; ``loops.py HOW...``. Those that are named ``HOW by hand`` attach it in one line.

They print the sum of their weights, as ``float.hex``. ``several.py`` says how several of them run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from several import one_of
from torch import Tensor, nn

STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def watch(model: Any, optimizer: Any) -> None:
    if by_hand:
        import monitor

        monitor.watch(model, optimizer)


def plain() -> list[nn.Module]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    watch(net, optimizer)
    for _ in range(STEPS):
        for _ in range(2):
            net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def gan() -> list[nn.Module]:
    generator, critic = Net(), nn.Sequential(Net())
    optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, critic)]
    for one, optimizer in zip((generator, critic), optimizers, strict=True):
        watch(one, optimizer)
    for _ in range(STEPS):
        made = generator(torch.randn(4, 8)).expand(4, 8)
        (critic(torch.randn(4, 8)) - critic(made.detach())).mean().backward()
        optimizers[1].step()
        critic(made).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [generator, critic]


def two_optimizers() -> list[nn.Module]:
    net = Net()
    weights, biases = ([p for p in net.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]
    watch(net, optimizers)
    for _ in range(STEPS):
        net(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [net]


def ranks() -> list[nn.Module]:
    torch.distributed.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(Net())
    called = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters())
    watch(called, optimizer)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        called(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    return [net]


def compiled() -> list[nn.Module]:
    net = Net()
    called = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(STEPS):
        called(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def replaced() -> list[nn.Module]:
    """Optimizers that follow each other. The last one cannot be hashed."""

    class Unhashable(torch.optim.SGD):  # noqa: PLW1641 - that is the case
        def __eq__(self, other: object) -> bool:
            return self is other

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2 * STEPS):
        if step == STEPS:
            optimizer = Unhashable(net.parameters(), lr=0.1)
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def wrapped() -> list[nn.Module]:
    """A wrapper as timm's Lookahead. It does not call torch's constructor: torch hooks its step at the first ``zero_grad``."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]
            self._base_optimizer, self.defaults = optimizer, optimizer.defaults
            self.param_groups, self.state = optimizer.param_groups, optimizer.state

        def step(self, closure: Any = None) -> Any:
            return self._base_optimizer.step(closure)

    net = Net()
    optimizer = Wrapper(torch.optim.AdamW(net.parameters()))
    watch(net, optimizer)
    for _ in range(STEPS):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def no_model() -> list[nn.Module]:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        weight.square().sum().backward()
        optimizer.step()
    return []


how, by_hand, _ = one_of(sys.argv[1:]).partition(" by hand")
torch.manual_seed(0)
torch.set_num_threads(1)
models = globals()[how]()
print(sum((float(p.detach().double().sum()) for model in models for p in model.parameters()), 0.0).hex())
