"""PyTorch's side of training metrics: see ``monitor.training.backend.Backend``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.names import clean_name, without_module
from monitor.pytorch.place import place
from monitor.pytorch.trainer_mon import TrainerMon
from monitor.pytorch.training.numbers import kept
from monitor.pytorch.training.routers import Routers
from monitor.training.numbers import Number

__all__ = ["counting_flops", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def routers(model: Any, names: Iterable[str], failures: Failures) -> Routers:
    return Routers(model, names, failures)


def trainable_names(model: Any) -> list[str]:
    return [without_module(clean_name(name)) for name, parameter in model.named_parameters() if parameter.requires_grad]


def learning_rate(optimizer: Any) -> Number | None:
    groups = getattr(optimizer, "param_groups", None)
    return kept(groups[0]["lr"]) if groups else None


@contextmanager
def counting_flops() -> Iterator[Callable[[], float]]:
    """Counts multiplications and additions of matrix products, convolutions and attention, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        yield lambda: float(counter.get_total_flops())
