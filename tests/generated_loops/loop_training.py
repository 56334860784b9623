"""A described loop, run: once for each who wants to look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from loop_networks import ROWS, WIDTH, Block, built, network, put_in_mode, tensors_in
from loops import Loop, Pack, Step
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

SCALE = 64.0


class Muon(torch.optim.Optimizer):
    """Orthogonalizes the momentum of matrices, as Keller Jordan's Muon does; of the rest it is momentum."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    p.sub_(orthogonal(buffer) if p.ndim == 2 else buffer, alpha=group["lr"])
        return loss


def orthogonal(x: Tensor) -> Tensor:
    """Two Newton-Schulz iterations."""
    x = x / (x.norm() + 1e-7)
    for _ in range(2):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


MADE: Mapping[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-6),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True, eps=1e-6),
    "muon": Muon,
}


class Observer:
    """Looks at a loop, and changes nothing of it. What it hears of has happened, or is about to."""

    def attach(self, training: Training) -> None:
        """Before the first step."""

    def backward_begins(self, micro_batches: Sequence[int]) -> None:
        """A backward is about to run, from the losses of these micro-batches, which are counted over all steps."""

    def backward_ended(self) -> None:
        """It has run."""

    def gradients_changed(self) -> None:
        """The loop has clipped, or unscaled."""

    def optimizer_called(self, index: int, *, stepped: bool) -> None:
        """The optimizer has stepped, or its scaler has skipped it."""

    def close(self) -> None:
        """After the last step."""


@dataclass
class Training:
    """A loop's objects.

    Attributes:
        names: Of all parameters of the network.
        owners: By parameter its optimizer; none of those that no optimizer has.
        losses: Of each micro-batch.
        weights: All of them after each step, as bytes; in the end, optimizers' states and the state of random numbers.
    """

    loop: Loop
    checkpointing: bool = True
    losses: list[float] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop = self.loop
        self.dtype = torch.float32 if loop.single else torch.float64
        self.network = network(loop.network, self.dtype)
        self.names = {parameter: name for name, parameter in self.network.named_parameters()}
        self.frozen = {p for p in self.names if not p.requires_grad}
        self.owners: dict[nn.Parameter, int] = {}
        for place, parameter in enumerate(self.names):
            owner = loop.owners[place % len(loop.owners)]
            thaws = loop.thaws is not None and parameter in self.frozen
            if thaws or (owner is not None and (parameter.requires_grad or loop.optimizers[owner].holds_frozen)):
                self.owners[parameter] = owner or 0
        # An optimizer of nothing is an error of torch; this parameter is in no model.
        self.optimizers = [
            MADE[one.kind](self.held(index) or [nn.Parameter(torch.zeros(1))]) for index, one in enumerate(loop.optimizers)
        ]
        self.scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2, enabled=loop.scaler)
        self._inputs = torch.Generator().manual_seed(1)

    def held(self, index: int) -> list[nn.Parameter]:
        """The parameters of an optimizer."""
        return [parameter for parameter, owner in self.owners.items() if owner == index]

    @property
    def handed(self) -> Any:
        """What ``set_monitor`` is given."""
        made = self.optimizers
        return {
            "alone": made[0],
            "list": made,
            "tuple": tuple(made),
            "dict": {f"optimizer {place}": one for place, one in enumerate(made)},
            "container": SimpleNamespace(optimizers=made),
        }[self.loop.handed]

    def run(self, observer: Observer) -> None:
        torch.manual_seed(2)
        put_in_mode(self.network, training=True)
        for module in self.network.modules():
            if isinstance(module, Block):
                module.checkpointing = self.checkpointing
        observer.attach(self)
        try:
            for number, step in enumerate(self.loop.steps):
                self._step(number, step, observer)
                self.weights.append(b"".join(_bytes(p) for p in self.names))
        finally:
            observer.close()
        self.weights.append(b"".join(_bytes(x) for one in self.optimizers for x in tensors_in([*one.state.values()])))
        self.weights.append(_bytes(torch.get_rng_state()))

    def _step(self, number: int, step: Step, observer: Observer) -> None:
        if self.loop.thaws == number:
            for parameter in self.frozen:
                parameter.requires_grad_(True)
        if self.loop.closure:
            self._step_with_closure(step, observer)
        else:
            self._scaler_has_looked = False
            self._micro_batches(step, observer)
            self._change_gradients(step, observer)
            for index in range(len(self.optimizers)):
                if index not in step.left_out:
                    self._call(index, observer)
            if self._scaler_has_looked:
                self.scaler.update()
        self._zero()

    def _step_with_closure(self, step: Step, observer: Observer) -> None:
        def closure() -> Tensor:
            self._zero()
            self._micro_batches(step, observer)
            return torch.tensor(self.losses[-1])

        self.optimizers[0].step(closure)
        observer.optimizer_called(0, stepped=True)

    def _micro_batches(self, step: Step, observer: Observer) -> None:
        self._evaluate(step, "before")
        count = self.loop.micro_batches
        losses: dict[int, Tensor] = {}
        for number in range(count):
            loss = self._forward(number) / count
            losses[len(self.losses)] = loss * float("inf") if step.overflows and number == count - 1 else loss
            self.losses.append(loss.item())
            if self.loop.order == "each":
                self._backward(losses, observer)
                losses = {}
            if number == 0:
                self._evaluate(step, "between")
        if self.loop.order == "sum":
            self._backward(losses, observer)
        else:
            for number in sorted(losses, reverse=self.loop.order == "reverse"):
                self._backward({number: losses[number]}, observer)
        self._evaluate(step, "after")

    def _forward(self, number: int) -> Tensor:
        self.network.micro_batch = number
        found = [x for x in tensors_in(self.network(*self._arguments())) if x.is_floating_point()]
        return torch.stack([(x * x + place * x).mean() for place, x in enumerate(found)]).sum()

    def _arguments(self) -> tuple[Any, ...]:
        x = torch.randn(ROWS, WIDTH, generator=self._inputs, dtype=torch.float64).to(self.dtype)
        values = [x.requires_grad_(self.loop.input_grad)]
        if self.loop.mask:
            values.append(torch.randint(0, 2, (ROWS, WIDTH), generator=self._inputs))
        return (built(Pack(self.loop.packed, tuple(range(len(values)))), values),) if self.loop.packed else tuple(values)

    def _backward(self, losses: Mapping[int, Tensor], observer: Observer) -> None:
        loss = torch.stack([*losses.values()]).sum()
        if loss.requires_grad:
            observer.backward_begins([*losses])
            self.scaler.scale(loss).backward()
            observer.backward_ended()

    def _evaluate(self, step: Step, place: str) -> None:
        if not step.evaluation or step.evaluated != place:
            return
        put_in_mode(self.network, training=step.evaluation == "no_grad")
        with torch.set_grad_enabled(step.evaluation == "eval with graph"):
            self._forward(0)
        put_in_mode(self.network, training=True)

    def _change_gradients(self, step: Step, observer: Observer) -> None:
        if self.loop.unscales:
            for index, optimizer in enumerate(self.optimizers):
                if index not in step.left_out and self._has_gradients(index):
                    self.scaler.unscale_(optimizer)
                    self._scaler_has_looked = True
        gradients = [p for p in self.names if p.grad is not None]
        if step.clip == "norm" and gradients:
            nn.utils.clip_grad_norm_(gradients, 0.1)
        elif step.clip == "value" and gradients:
            nn.utils.clip_grad_value_(gradients, 0.01)
        if self.loop.scaler or (step.clip and gradients):
            observer.gradients_changed()

    def _call(self, index: int, observer: Observer) -> None:
        optimizer = self.optimizers[index]
        if not self.scaler.is_enabled():
            optimizer.step()
            observer.optimizer_called(index, stepped=True)
        elif self._has_gradients(index):  # otherwise the scaler has nothing to look at, and raises
            finite = all(bool(p.grad.isfinite().all()) for p in self.held(index) if p.grad is not None)
            self.scaler.step(optimizer)
            self._scaler_has_looked = True
            observer.optimizer_called(index, stepped=finite)

    def _has_gradients(self, index: int) -> bool:
        return any(p.grad is not None for p in self.held(index))

    def _zero(self) -> None:
        for parameter in self.names:
            if self.loop.zeros and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None


def _bytes(x: Tensor) -> bytes:
    return x.detach().numpy().tobytes()
