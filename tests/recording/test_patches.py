"""Patched calls: which callbacks are called, and that nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monitor.recording.patches import CallListener, CallPatch


class Told(CallListener):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.itself = self  # only the garbage collector ends it

    def call_begins(self, _patch: CallPatch, args: Any, _kwargs: Any) -> None:
        self.calls.append(f"begins {args}")

    def call_ended(self, _patch: CallPatch, _args: Any, _kwargs: Any, result: Any) -> None:
        self.calls.append(f"ended {result}")

    def call_raised(self, _patch: CallPatch, _args: Any, _kwargs: Any) -> None:
        self.calls.append("raised")


@pytest.fixture
def owner() -> SimpleNamespace:
    return SimpleNamespace(inverse=lambda x: 1 / x)


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_call_is_reported_from_its_beginning_to_its_end(owner: SimpleNamespace) -> None:
    original, patch, told = owner.inverse, CallPatch(owner, "inverse", ("x",)), Told()
    patch.add(told)
    assert owner.inverse(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        owner.inverse(0)
    patch.remove(told)
    assert told.calls == ["begins (2,)", "ended 0.5", "begins (0,)", "raised"]
    assert owner.inverse is original


def test_what_takes_other_arguments_does_not_fit(owner: SimpleNamespace) -> None:
    assert CallPatch(owner, "inverse", ("x",)).fits
    assert not CallPatch(owner, "inverse", ("y",)).fits
    assert not CallPatch(owner, "square").fits


@pytest.mark.usefixtures("_no_collection")
def test_a_listener_that_is_collected_while_another_is_added_does_not_take_the_patch_away(owner: SimpleNamespace) -> None:
    class Collecting(CallPatch):
        """One whose collector runs at the worst moment: when the patch was found in its place."""

        def _install(self) -> None:
            super()._install()
            gc.collect()

    original, patch = owner.inverse, Collecting(owner, "inverse")
    patch.add(Told())
    told = Told()
    patch.add(told)
    owner.inverse(2)
    assert told.calls == ["begins (2,)", "ended 0.5"]
    patch.remove(told)
    assert owner.inverse is original
