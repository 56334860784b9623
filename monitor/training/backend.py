"""The adapter interface that a framework implements for training metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.recording.run import ProcessTopology
from monitor.recording.trainer_mon import ModelMonitor
from monitor.training.step import Number, Tokens


class NotARouterError(Exception):
    """The result of a module does not show which experts were chosen."""


class Routers(Protocol):
    """Counts what the routers of a model choose."""

    def step(self) -> dict[str, Tokens]:
        """The tokens that went to each expert since the last call, by router. Does not wait for a device."""

    def remove(self) -> None:
        """Remove the hooks."""


class GradientScale(Protocol):
    """Observes the factor by which an optimizer divides its gradients inside its own step."""

    def take(self) -> Number | None:
        """The factor of the latest step since the last call; None if the optimizer did not scale. Does not wait."""

    def remove(self) -> None:
        """Stop observing."""


class MetricsBackend(Protocol):
    """A framework. The modules ``monitor.pytorch.training.backend`` and ``monitor.mindspore.training.backend`` implement it."""

    def monitor_of(self, config: MonitorConfig, base: Path) -> ModelMonitor:
        """The framework's tensor monitor, which records to ``base``."""

    def place(self) -> ProcessTopology:
        """The rank, world size and groups of this process."""

    def kept(self, x: Any) -> Number:
        """A snapshot of a number, which later changes of ``x`` do not affect. Does not wait for a device.

        Args:
            x: A number, or a tensor of one element.

        Raises:
            TypeError: It is neither.
        """

    def trainable_names(self, model: Any) -> list[str]: ...

    def learning_rate(self, optimizer: Any) -> Number | None:
        """The learning rate of the first parameter group in the next step; None if only the device knows it."""

    def routers(self, model: Any, names: Iterable[str], failures: Failures) -> Routers:
        """Observe the recognised routers, and the modules of these names.

        Raises:
            ValueError: The model has no module of one of these names.
        """

    def gradient_scale(self, optimizer: Any, failures: Failures) -> GradientScale | None:
        """Observe an optimizer; None if it never scales gradients."""

    def counting_flops(self, model: Any) -> AbstractContextManager[Callable[[], float]]:
        """A context that counts floating point operations; it yields a function that returns the count.

        Raises:
            NoCounterError: The framework has no counter, or its counter cannot handle this model.
        """
