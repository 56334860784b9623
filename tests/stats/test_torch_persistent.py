"""Memory that is kept, and where it is made."""

from __future__ import annotations

import threading

import pytest
import torch

from monitor.stats.torch.memory import persistent

HOST = torch.device("cpu")


def threads_of(elsewhere: bool) -> list[threading.Thread]:
    """The threads in which what was asked for was made."""
    found = []

    def make() -> torch.Tensor:
        found.append(threading.current_thread())
        return torch.ones(3)

    assert persistent(HOST, make, lambda _: elsewhere).tolist() == [1.0, 1.0, 1.0]
    return found


def test_on_the_host_the_caller_makes_it() -> None:
    assert threads_of(False) == [threading.current_thread()]


def test_elsewhere_another_thread_makes_it_and_is_gone() -> None:
    [thread] = threads_of(True)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_it_outlives_the_callers_modes(elsewhere: bool) -> None:
    with torch.inference_mode():
        assert not persistent(HOST, lambda: torch.zeros(1), lambda _: elsewhere).is_inference()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_fails_in_making_it_is_the_callers_to_see(elsewhere: bool) -> None:
    def make() -> torch.Tensor:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        persistent(HOST, make, lambda _: elsewhere)
