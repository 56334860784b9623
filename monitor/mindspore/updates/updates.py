"""Which collectors of updates a configuration asks for."""

from __future__ import annotations

from functools import partial

from monitor.mindspore.updates.adam import AdamCollector
from monitor.mindspore.updates.direction import DirectionCollector
from monitor.mindspore.updates.ratio import RatioCollector
from monitor.recording.updates import wanted

new_updates = partial(wanted, ratio=RatioCollector, direction=DirectionCollector, adam=AdamCollector)
