"""A journal that remembers."""

from __future__ import annotations

import threading

from monitor.coordinator.manifest_format import ConfigurationRecord


class Noted:
    """What a manifest would hold."""

    def __init__(self) -> None:
        self.records: list[ConfigurationRecord] = []
        self.undecided_since: int | None = None

    def configured(self, record: ConfigurationRecord) -> None:
        self.records.append(record)

    def undecided(self, since: int | None) -> None:
        self.undecided_since = since


def threads_of_dynamic_monitoring() -> list[str]:
    """The names of the monitor's threads, without the one that serves signals for the whole process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("monitor-") and name != "monitor-signals"]
