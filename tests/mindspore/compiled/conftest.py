"""Has compiled code recorded in all modes."""

from __future__ import annotations

import pytest

from monitor.mindspore.tape import COMPILED_VARIABLE


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
