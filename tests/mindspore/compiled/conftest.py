"""Has compiled code recorded in all modes."""

from __future__ import annotations

import pytest

from monitor.mindspore import tape
from monitor.mindspore.tape import COMPILED_VARIABLE


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "1")


@pytest.fixture
def not_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)


@pytest.fixture
def without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_NATIVE", "0")
    for name in ("_follow", "read_operators"):  # not the operators of earlier tests
        monkeypatch.setattr(tape, name, getattr(tape, name).__wrapped__)
