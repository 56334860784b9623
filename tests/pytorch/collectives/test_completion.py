"""Outputs are read as they came even if the thread of the backend comes late, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from monitor.failures import Failures
from monitor.pytorch.collectives.interception import FOLLOWED, IS_DONE, Completion
from monitor.recording.patches import CallListener


class LateCall:
    """A call whose future is complete before its backend's thread comes to the callback of the monitor.

    Attributes:
        x: The output, ones.
        future: What the program has asked the work for.
        read: The sums of the outputs that were read.
        busy: Whether nothing can be read now, as while another thread reads.
        reading: Called when outputs are about to be read.
    """

    def __init__(self, *, complete: bool = True) -> None:
        self.read: list[float] = []
        self.busy = False
        self.reading: Callable[[], object] = bool
        self.x = torch.ones(2)
        self.late = threading.Event()
        self.completion = Completion(self._note, Failures(0))
        mine: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        mine.add_done_callback(lambda _: self.late.wait(60))  # runs before the monitor's
        self.work = torch._C._distributed_c10d._create_work_from_future(mine)
        self.completion.listen()
        self.completion.issued(None, self.work, "call", [self.x], waited_for=False)
        self.future = self.work.get_future()
        self._backend = threading.Thread(target=mine.set_result, args=([self.x],))
        if complete:
            self.complete()

    def complete(self) -> None:
        self._backend.start()
        while not IS_DONE(self.future):
            pass

    def end(self) -> None:
        self.late.set()
        self._backend.join()
        self.completion.remove()

    def _note(self, _call: Any, outputs: Sequence[torch.Tensor], versions: Sequence[int | None]) -> bool:
        if self.busy or (versions and [one._version for one in outputs] != versions):
            return False
        self.reading()
        self.read.append(outputs[0].sum().item())
        return True


@pytest.fixture
def call() -> Iterator[LateCall]:
    one = LateCall()
    yield one
    one.end()


def test_a_step_that_ends_before_the_callback_reads_the_outputs_once(call: LateCall) -> None:
    call.completion.read_completed()
    assert call.read == [2.0]
    call.end()
    assert call.read == [2.0]


FOLLOWERS: dict[str, Callable[[LateCall], object]] = {
    "callback": lambda call: call.future.add_done_callback(lambda _: call.x.mul_(3)),
    "what follows": lambda call: call.future.then(lambda _: call.x.mul_(3)).wait(),
    "what follows several": lambda call: (torch.futures.collect_all([call.future]).wait(), call.x.mul_(3)),
    "after it was polled": lambda call: call.work.is_completed() and call.x.mul_(3),
    "after its future was polled": lambda call: call.future.done() and call.x.mul_(3),
}


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_outputs_that_are_changed_without_a_wait_are_read_before(follower: str, call: LateCall) -> None:
    FOLLOWERS[follower](call)
    call.work.wait()
    assert call.x.tolist() == [3.0, 3.0]
    assert call.read == [2.0]


class Completing(CallListener):
    """Completes a call when something is about to follow its future, after the monitor has learned of it."""

    def __init__(self, call: LateCall) -> None:
        self._call = call
        for patch in FOLLOWED:
            patch.add(self)

    def call_begins(self, *_: object) -> None:
        self._call.complete()


@pytest.mark.parametrize("follower", ["callback", "what follows"])
def test_outputs_of_a_call_that_completes_while_it_gets_a_callback_are_read_before_that_runs(follower: str) -> None:
    call = LateCall(complete=False)
    completing = Completing(call)
    FOLLOWERS[follower](call)
    assert call.x.tolist() == [3.0, 3.0]
    assert call.read == [2.0]
    call.end()
    del completing


@pytest.mark.parametrize("follower", ["callback", "what follows", "what follows several"])
def test_outputs_that_could_not_be_read_before_they_were_changed_are_not_read(follower: str, call: LateCall) -> None:
    call.busy = True
    FOLLOWERS[follower](call)
    call.busy = False
    call.work.wait()
    assert call.x.tolist() == [3.0, 3.0]
    assert call.read == []


@pytest.mark.parametrize("wait", [lambda call: call.work.wait(), lambda call: call.future.wait()], ids=["work", "future"])
def test_a_second_thread_that_waits_changes_outputs_after_they_were_read(
    wait: Callable[[LateCall], object], call: LateCall
) -> None:
    first_reads, second_is_through = threading.Event(), threading.Event()

    def reading() -> None:
        first_reads.set()
        second_is_through.wait(0.5)

    def wait_and_change() -> None:
        first_reads.wait(20)
        wait(call)
        call.x.numpy()[:] = 3.0  # no new version, as of the next collective
        second_is_through.set()

    call.reading = reading
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(wait_and_change)
        wait(call)
        second.result(20)
    assert call.x.tolist() == [3.0, 3.0]
    assert call.read == [2.0]


def test_a_signal_handler_may_wait_for_the_call_whose_outputs_are_being_read(call: LateCall) -> None:
    call.reading = lambda: setattr(call, "reading", bool) or call.work.wait()
    call.work.wait()
    assert set(call.read) == {2.0}
