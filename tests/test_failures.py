"""Failures of the monitor stay with the monitor; what a signal handler of the program raises is the program's."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from monitor.failures import Failures


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


class Limit:
    def ends(self, *_: object) -> None:
        raise TimeoutError

    def __call__(self, *_: object) -> None:
        raise TimeoutError


def _ends(_error: object, *_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize("handler", [Limit().ends, Limit(), partial(_ends, 1), lambda *_: _ends(1)])
def test_what_a_signal_handler_raises_in_a_hook_reaches_the_program(handler: Any, handled: Callable[[Any], None]) -> None:
    handled(handler)
    failures = Failures()
    inner = failures.guarded("reading a tensor", lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(TimeoutError):
        failures.guarded("following a call", inner)()
    assert not failures.counts


def test_an_error_of_the_same_class_is_counted_and_stays(handled: Callable[[Any], None]) -> None:
    handled(Limit().ends)
    failures = Failures()

    def fails() -> None:
        raise TimeoutError

    assert failures.guarded("reading a tensor", fails)() is None
    assert failures.counts == {"reading a tensor: TimeoutError": 1}
