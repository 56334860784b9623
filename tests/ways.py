"""The two ways from torch's hooks to rows: ordinary tensors in C, or everything in Python."""

from __future__ import annotations

from typing import Any

import pytest

from monitor.pytorch.backend import TorchFactories
from monitor.pytorch.fast_path import IN_C, Reader
from monitor.pytorch.tensor_reader import TorchTensorReader

IN_PYTHON = "in Python"
WAYS = ("in C", IN_PYTHON)


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have recordings that are made from now on take this way. Skips the test if that is not there."""
    if way == IN_PYTHON:
        only_in_python(monkeypatch)
    elif not IN_C:
        pytest.skip("the code in C was not built, or this torch has no exchange of tensors")


def only_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in C is still used: it is the same for both ways."""

    def measure(reader: Reader, *given: Any) -> None:
        Reader._measure(reader, *given[:-1], False)

    monkeypatch.setattr(TorchTensorReader, "_measure", measure)
    monkeypatch.setattr(TorchFactories, "new_plans", staticmethod(lambda _watcher: None))
