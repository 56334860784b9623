"""What a framework's room brings to training metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.recording.run import ProcessTopology
from monitor.recording.trainer_mon import TrainerMon
from monitor.training.step import Number, Tokens


class Routers(Protocol):
    """Watches the routers of a model."""

    def step(self) -> dict[str, Tokens]:
        """What went to each expert since this was last called, by router. Waits for nothing."""

    def remove(self) -> None:
        """Watch no longer."""


class GradientScale(Protocol):
    """Watches by what an optimizer divides its gradients inside its own step."""

    def take(self) -> Number | None:
        """In its last step, since this was last called; None where gradients are as they are."""

    def remove(self) -> None:
        """Watch no longer."""


class Backend(Protocol):
    """A framework. ``monitor.pytorch.training.backend`` and ``monitor.mindspore.training_backend`` are modules that have these
    names.
    """

    def monitor_of(self, config: MonitorConfig, base: Path) -> TrainerMon:
        """The framework's tensor monitor, which records to ``base``."""

    def place(self) -> ProcessTopology:
        """Where this process stands."""

    def kept(self, x: Any) -> Number:
        """A number that stays what it is now, whatever training does to ``x``. Waits for nothing.

        Args:
            x: A number, or a tensor of one element.

        Raises:
            TypeError: It is neither.
        """

    def trainable_names(self, model: Any) -> list[str]: ...

    def learning_rate(self, optimizer: Any) -> Number | None:
        """Of the first group of parameters, as the next step will use it; None where it cannot be told without waiting."""

    def routers(self, model: Any, names: Iterable[str], failures: Failures) -> Routers:
        """Watch the routers that are known, and the modules of these names.

        Raises:
            ValueError: There is no module of one of these names.
        """

    def gradient_scale(self, optimizer: Any, failures: Failures) -> GradientScale | None:
        """Watch an optimizer; None where it never scales."""

    def counting_flops(self, model: Any) -> AbstractContextManager[Callable[[], float]]:
        """Counts while it is entered, and tells how many.

        Raises:
            NoCounterError: The framework has no counter, or none that this model bears.
        """
