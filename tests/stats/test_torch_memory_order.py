"""Which stream waits for which row of a device's page; a recorder of requests takes the place of the device's streams."""

from __future__ import annotations

import pytest
import torch

from monitor.stats.torch.memory import TorchDevicePage


class Stream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> object:
        return self, len(self.waited)


def test_a_row_written_before_something_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sealing, other = Stream(), Stream()
    current = [sealing]
    monkeypatch.setattr(torch, "Stream", lambda **_: Stream())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[-1])
    page = TorchDevicePage(2, torch.device("cpu"))
    current.append(other)
    with pytest.raises(IndexError), page.written():
        page.tensor[[0, 2]] = 1.0
    current.append(sealing)
    page.join()
    assert sealing.waited == [(other, 1)]
