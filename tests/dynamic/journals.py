"""A journal that remembers."""

from __future__ import annotations

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
