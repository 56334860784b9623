"""Which collectors of updates a configuration asks for."""

from __future__ import annotations

from monitor.capture.updates import UpdateCollector, Updates
from monitor.capture.watched_parameters import WatchedParameters
from monitor.config import MonitorConfig
from monitor.mindspore.updates.adam import AdamCollector
from monitor.mindspore.updates.direction import DirectionCollector
from monitor.mindspore.updates.ratio import RatioCollector


def new_updates(config: MonitorConfig, watched: WatchedParameters) -> Updates:
    """What is recorded of each step."""
    collectors: list[UpdateCollector] = []
    if config.update_ratio:
        collectors.append(RatioCollector(watched))
    if config.mg_direction:
        collectors.append(DirectionCollector(watched))
    if config.ur_distribution:
        collectors.append(AdamCollector(watched, config.eps))
    return Updates(*collectors)
