"""Which call of which module is in progress, in which micro-step."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from loop_clock import Clock
from loop_training import Observer, Training
from torch import nn


class Call(NamedTuple):
    """A call of a module in a forward that trains.

    Attributes:
        micro_batch: Counted over all steps.
        mark: What is appended to names: ``#1`` for the second call of a micro-step.
    """

    module: str
    step: int
    micro_step: int
    micro_batch: int
    mark: str


class Follower(Observer):
    """Follows a loop by torch's own hooks. A subclass looks at what it wants.

    Attributes:
        micro_batch: The forward in progress, or the last one, counted over all steps.
    """

    def attach(self, training: Training) -> None:
        self.training = training
        self.clock = Clock(len(training.optimizers))
        self.micro_batch = -1
        self._trains = False
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._open: dict[str, list[Any]] = defaultdict(list)
        for index, optimizer in enumerate(training.optimizers):
            optimizer.register_step_pre_hook(partial(self._optimizer_begins, index))
        training.network.register_forward_pre_hook(self._root_begins)
        for name, module in training.network.named_modules():
            module.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True)
            module.register_forward_hook(partial(self._ends, name), with_kwargs=True)

    def before_step(self, index: int) -> None:
        """An optimizer is about to step."""

    def after_step(self, index: int) -> None:
        """An optimizer has stepped."""

    def step_skipped(self, index: int) -> None:
        """A scaler has skipped an optimizer."""

    def call_begins(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Other arguments, or None; and what ``call_ends`` is to know."""
        raise NotImplementedError

    def call_ends(self, call: Call, known: Any, result: Any) -> Any:
        """Another result, or None."""
        raise NotImplementedError

    def optimizer_called(self, index: int, *, stepped: bool) -> None:
        if stepped:
            self.after_step(index)
        else:
            self.clock.optimizer_begins(index)
            self.step_skipped(index)
        self.clock.optimizer_ends(index)

    def _optimizer_begins(self, index: int, *_: Any) -> None:
        self.clock.optimizer_begins(index)
        self.before_step(index)

    def _root_begins(self, root: nn.Module, _args: Any) -> None:
        self._trains = root.training and torch.is_grad_enabled()
        if self._trains:
            self.clock.micro_step += 1
            self.micro_batch += 1

    def _begins(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._trains or not module.training:
            self._open[name].append(None)
            return None
        place = name, self.clock.step, self.clock.micro_step
        number = self._counts[place]
        self._counts[place] += 1
        call = Call(*place, self.micro_batch, f"#{number}" if number else "")
        changed, known = self.call_begins(call, args, kwargs)
        self._open[name].append((call, known))
        return changed

    def _ends(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        opened = self._open[name].pop()
        return None if opened is None else self.call_ends(*opened, result)
