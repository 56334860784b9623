"""All that is recorded of an optimizer's step as a whole."""

from __future__ import annotations

from collections.abc import Callable

from monitor.capture.optimizer_turns import Stepping
from monitor.capture.watched_parameters import WatchedParameters
from monitor.config import MonitorConfig


class UpdateCollector:
    """Looks at each step in its own way: overrides what it wants to be told of, in the order of these methods."""

    def before_step(self, stepping: Stepping) -> None:
        """An optimizer is about to step."""

    def gradients_ready(self, stepping: Stepping) -> None:
        """Its gradients are complete, before the step; again for every backward of a closure."""

    def after_step(self, stepping: Stepping) -> None:
        """It has stepped."""

    def forget_step(self) -> None:
        """The step was skipped, or has ended."""


class Updates:
    """Whichever of the collectors are wanted."""

    def __init__(self, *collectors: UpdateCollector) -> None:
        self._collectors = collectors

    def before_step(self, stepping: Stepping) -> None:
        for one in self._collectors:
            one.before_step(stepping)

    def gradients_ready(self, stepping: Stepping) -> None:
        for one in self._collectors if stepping.optimizer is not None else ():
            one.gradients_ready(stepping)

    def after_step(self, stepping: Stepping) -> None:
        for one in self._collectors:
            one.after_step(stepping)

    def forget_step(self) -> None:
        """Let go of what belongs to the step that has ended."""
        for one in self._collectors:
            one.forget_step()


Collecting = Callable[[WatchedParameters], UpdateCollector]


def wanted(
    config: MonitorConfig,
    watched: WatchedParameters,
    *,
    ratio: Collecting,
    direction: Collecting,
    adam: Callable[[WatchedParameters, float], UpdateCollector],
) -> Updates:
    """What a configuration asks for, made by a framework's own collectors."""
    collectors: list[UpdateCollector] = []
    if config.update_ratio:
        collectors.append(ratio(watched))
    if config.mg_direction:
        collectors.append(direction(watched))
    if config.ur_distribution:
        collectors.append(adam(watched, config.eps))
    return Updates(*collectors)
