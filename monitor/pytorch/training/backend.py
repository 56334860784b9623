"""PyTorch's side of training metrics: see ``monitor.training.backend.Backend``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.flop_counter import FlopCounterMode

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.pytorch.frameworks.optimizers import optimizers_in
from monitor.pytorch.place import place
from monitor.pytorch.trainer_mon import TrainerMon
from monitor.pytorch.training.gradient_scale import GradientScale
from monitor.pytorch.training.numbers import kept
from monitor.pytorch.training.routers import Routers
from monitor.selection import clean_name, without_module
from monitor.training.scalars import NoCounterError
from monitor.training.step import Number

__all__ = ["counting_flops", "gradient_scale", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]

COMPILED: Final = "The floating point operations of a compiled model cannot be counted: pass model_flops as a number."


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def gradient_scale(optimizer: Any, failures: Failures) -> GradientScale | None:
    """Fused optimizers divide by the scale of a GradScaler themselves; others are given gradients that it has divided."""
    try:
        found, *others = optimizers_in(optimizer)
    except TypeError:  # a framework's own, whose steps are its own
        return None
    return None if others else GradientScale(found, failures)


def routers(model: Any, names: Iterable[str], failures: Failures) -> Routers:
    return Routers(model, names, failures)


def trainable_names(model: Any) -> list[str]:
    return [without_module(clean_name(name)) for name, parameter in model.named_parameters() if parameter.requires_grad]


def learning_rate(optimizer: Any) -> Number | None:
    """Of the first group of the first optimizer."""
    if isinstance(optimizer, list):
        optimizer = optimizer[0] if optimizer else None
    while optimizer is not None and not hasattr(optimizer, "param_groups"):
        optimizer = getattr(optimizer, "optimizer", None)  # of an engine, which stands in its optimizer's place
    return kept(optimizer.param_groups[0]["lr"]) if optimizer is not None and optimizer.param_groups else None


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """Counts multiplications and additions of matrix products, convolutions and attention, forward and backward.

    Raises:
        NoCounterError: Something in the model is compiled: what is compiled whole raises under a counter.
    """
    if model is not None and any(_is_compiled(module) for module in model.modules()):
        raise NoCounterError(COMPILED)
    return _counting()


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def _counting() -> Iterator[Callable[[], float]]:
    with FlopCounterMode(display=False) as counter:
        yield lambda: float(counter.get_total_flops())
