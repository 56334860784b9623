"""``TrainerMon``: what users of MindSpore attach."""

from __future__ import annotations

from typing import ClassVar

from monitor.capture import trainer_mon
from monitor.capture.backend import Backend
from monitor.mindspore import backend


class TrainerMon(trainer_mon.TrainerMon):
    __doc__ = trainer_mon.TrainerMon.__doc__

    _backend: ClassVar[Backend] = backend
