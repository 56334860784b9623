"""MindSpore's implementation of the training metrics' adapter interface ``monitor.training.metrics.MetricsBackend``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.mindspore.features import choices, reading as features
from monitor.mindspore.frameworks.kept_tensors import KeptTensors
from monitor.mindspore.frameworks.optimizer_state import OptimizerState, next_rate
from monitor.mindspore.hooks import after_forward
from monitor.mindspore.process_group import place
from monitor.mindspore.trainer_mon import TrainerMon
from monitor.recording.backend import HookSet
from monitor.stats.mindspore.tensors import on_host
from monitor.training.step import NoCounterError, Number, Tokens

# --- The factor by which an optimizer divides its gradients inside its step: the constant loss scale.


class MindSporeGradientScale:
    """See ``monitor.training.metrics.GradientScale``. The factor never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def take(self) -> float:
        return self._scale

    def remove(self) -> None:
        """Nothing to remove."""


# --- Tensors that another thread reads later.
#
# Operations create new tensors, so a computed tensor keeps its value. Parameters are overwritten, and so they are copied.


def kept(x: Any) -> Number:
    """See ``MetricsBackend.kept``. The returned function waits for the tensor, since in MindSpore every reading waits."""
    if isinstance(x, int | float):
        return float(x)
    if isinstance(x, Tensor) and x.size == 1:
        still = x.copy() if isinstance(x, Parameter) else x
        return lambda: float(on_host(still).reshape(()).item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_description(x)}")


def _description(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# --- Routers of mixtures of experts: their choices are counted after the step has ended.


class MindSporeRouters:
    """Keeps the choices of a router in every training call until the step ends.

    Args:
        names: The names of cells. Their results must contain the indices of the chosen experts (integers), or for each token a
            boolean map of the experts (experts last).

    Raises:
        ValueError: The model has no cell of one of these names.
    """

    def __init__(self, model: nn.Cell, names: Iterable[str], failures: Failures) -> None:
        self._hooks = HookSet()
        self._chosen: dict[str, list[choices.ChosenExperts]] = {}
        cells = {name: cell for name, cell in model.cells_and_names() if name in set(names)}
        if missing := set(names) - set(cells):
            raise ValueError(f"routers: there is no cell {', '.join(map(repr, sorted(missing)))} in the model")
        self.names = tuple(cells)
        for name, cell in cells.items():
            keep = failures.guarded("counting what went to each expert", partial(self._keep, name), of=name)
            self._hooks.add(after_forward(cell, keep))

    def step(self) -> dict[str, Tokens]:
        """See ``monitor.training.metrics.Routers``."""
        chosen, self._chosen = self._chosen, {}
        return {name: partial(_counted, calls) for name, calls in chosen.items()}

    def remove(self) -> None:
        self._hooks.remove()

    def _keep(self, name: str, cell: nn.Cell, args: Any, kwargs: Any, result: Any) -> None:
        if cell.training:
            call = features.call_of(cell, args, kwargs)._replace(picks_greatest=True)
            self._chosen.setdefault(name, []).append(choices.chosen_in(cell, result, call))


def _counted(calls: Sequence[choices.ChosenExperts]) -> list[int]:
    counts: NDArray[np.int64] = np.sum([choices.count_on_host(on_host(chosen), experts) for chosen, experts in calls], axis=0)
    return [int(count) for count in counts]


# --- The learning rate, unless the program has replaced tensors that a compiled optimizer continues with.


class MindSporeLearningRate:
    """See ``monitor.training.metrics.LearningRate``. A schedule's rate is computed as the optimizer computes it."""

    def __init__(self, optimizer: Any, failures: Failures) -> None:
        self._failures = failures
        self._hooks = HookSet()
        self._kept: Callable[[], KeptTensors | None] = lambda: None
        if isinstance(optimizer, nn.Optimizer):
            tensors = KeptTensors(OptimizerState(optimizer))
            self._kept = weakref.ref(tensors)  # the optimizer's hook keeps them
            stepped = failures.guarded("following an optimizer", lambda *_: tensors.stepped())
            self._hooks.add(after_forward(optimizer, stepped, quiet=True))

    def step_ended(self) -> None:
        if (tensors := self._kept()) is not None:
            tensors.step_ended()

    def next(self, optimizer: Any) -> Number | None:
        if (tensors := self._kept()) is not None and tensors.are_replaced(self._failures):
            return None
        if groups := getattr(optimizer, "param_groups", None):
            return kept(groups[0]["lr"])
        found = optimizer.get_lr() if hasattr(optimizer, "get_lr") else None
        rate = found[0] if isinstance(found, tuple | list) else found
        return None if rate is None else kept(next_rate(optimizer, rate))

    def remove(self) -> None:
        self._hooks.remove()


__all__ = ["counting_flops", "gradient_scale", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def trainable_names(model: Any) -> list[str]:
    return [str(parameter.name) for parameter in model.trainable_params()]


def learning_rate(optimizer: Any, failures: Failures) -> MindSporeLearningRate:
    return MindSporeLearningRate(optimizer, failures)


def gradient_scale(optimizer: Any, failures: Failures) -> MindSporeGradientScale | None:
    """The constant scale of an optimizer that was created with ``loss_scale``; None if it does not scale."""
    del failures
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    return None if scale == 1.0 else MindSporeGradientScale(scale)


def routers(model: Any, names: Iterable[str], failures: Failures) -> MindSporeRouters:
    return MindSporeRouters(model, names, failures)


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """Raises ``NoCounterError``: MindSpore cannot count operations."""
    del model
    raise NoCounterError("MindSpore counts no floating point operations: pass model_flops as a number.")
