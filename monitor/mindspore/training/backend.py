"""MindSpore's side of training metrics: see ``monitor.training.backend.Backend``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.mindspore.place import place
from monitor.mindspore.trainer_mon import TrainerMon
from monitor.mindspore.training.gradient_scale import GradientScale
from monitor.mindspore.training.numbers import kept
from monitor.mindspore.training.routers import Routers
from monitor.training.scalars import NoCounterError
from monitor.training.step import Number

__all__ = ["counting_flops", "gradient_scale", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def trainable_names(model: Any) -> list[str]:
    return [str(parameter.name) for parameter in model.trainable_params()]


def learning_rate(optimizer: Any) -> Number | None:
    """Of the first group of the first optimizer. That of a schedule is computed for the step to come, as the optimizer is going
    to do itself.
    """
    if isinstance(optimizer, list):
        optimizer = optimizer[0] if optimizer else None
    if groups := getattr(optimizer, "param_groups", None):
        return kept(groups[0]["lr"])
    found = optimizer.get_lr() if hasattr(optimizer, "get_lr") else None
    first = found[0] if isinstance(found, tuple | list) else found
    return None if first is None else kept(first)


def gradient_scale(optimizer: Any, failures: Failures) -> GradientScale | None:
    """An optimizer that is told a loss scale divides by it in every step."""
    del failures
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    return None if scale == 1.0 else GradientScale(scale)


def routers(model: Any, names: Iterable[str], failures: Failures) -> Routers:
    return Routers(model, names, failures)


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """MindSpore has no counter."""
    del model
    raise NoCounterError("MindSpore counts no floating point operations: pass model_flops as a number.")
