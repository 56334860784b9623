"""Outputs are read even if the thread of the backend comes late."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from monitor.failures import Failures
from monitor.pytorch.collectives.interception import Completion


def test_a_step_that_ends_before_the_callback_reads_the_outputs_once() -> None:
    read: list[Any] = []

    def note(call: Any, _outputs: Sequence[torch.Tensor], _versions: Sequence[int | None]) -> bool:
        read.append(call)
        return True

    completion, late, x = Completion(note, Failures(0)), threading.Event(), torch.ones(2)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.add_done_callback(lambda _: late.wait(60))  # runs before the monitor's
    work = torch._C._distributed_c10d._create_work_from_future(future)
    completion.listen()
    try:
        completion.issued(None, work, "call", [x], waited_for=False)
        followed = work.get_future()
        backend = threading.Thread(target=future.set_result, args=([x],))
        backend.start()
        while not followed.done():
            pass
        completion.read_completed()  # the step ends
        assert read == ["call"]
    finally:
        late.set()
        backend.join()
        completion.remove()
    assert read == ["call"]
