"""All that is recorded of an optimizer's step as a whole."""

from __future__ import annotations

from torch.optim import Optimizer

from monitor.config import MonitorConfig
from monitor.pytorch.updates.adam import AdamCollector
from monitor.pytorch.updates.direction import DirectionCollector
from monitor.pytorch.updates.ratio import RatioCollector
from monitor.pytorch.watched_parameters import WatchedParameters


class Updates:
    """Whichever of the collectors are wanted. Each looks at the step on its own."""

    def __init__(
        self,
        direction: DirectionCollector | None = None,
        ratio: RatioCollector | None = None,
        adam: AdamCollector | None = None,
    ) -> None:
        self._direction, self._ratio, self._adam = direction, ratio, adam

    @classmethod
    def wanted(cls, config: MonitorConfig, watched: WatchedParameters) -> Updates:
        """What a configuration asks for."""
        return cls(
            DirectionCollector(watched) if config.mg_direction else None,
            RatioCollector(watched) if config.update_ratio else None,
            AdamCollector(watched, config.eps) if config.ur_distribution else None,
        )

    def before_step(self, optimizer: Optimizer) -> None:
        if self._ratio is not None:
            self._ratio.before_step()
        if self._adam is not None:
            self._adam.before_step(optimizer)

    def gradients_ready(self, optimizer: Optimizer | None) -> None:
        if self._direction is not None and optimizer is not None:
            self._direction.gradients_ready(optimizer)

    def after_step(self, optimizer: Optimizer | None) -> None:
        if self._ratio is not None:
            self._ratio.after_step()
        if optimizer is None:
            return
        if self._direction is not None:
            self._direction.after_step(optimizer)
        if self._adam is not None:
            self._adam.after_step(optimizer)

    def forget_step(self) -> None:
        """Let go of what belongs to the step that has ended."""
        if self._direction is not None:
            self._direction.forget_step()
        if self._ratio is not None:
            self._ratio.forget_step()
