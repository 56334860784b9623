"""What listening puts into MindSpore's modules, and takes out of them again."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.ops import primitive
from mindspore.ops.auto_generate import gen_ops_prim

from monitor.config.model import CcDistribution
from monitor.failures import Failures
from monitor.mindspore.collectives import Handle, communication, kernels
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.recording.collectives import Communication
from monitor.recording.recorder import Recorder
from monitor.series import SeriesTable

KERNEL = "pyboost_dist_comm_all_reduce"


class RuntimeHandle:
    """As the runtime has it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def get_comm_handle_ptr_str(self) -> str:
        return "0x1"


@pytest.fixture
def listener() -> Any:
    listener = communication(CcDistribution(enable=True), Failures())
    yield listener
    listener.close()


def test_without_enable_nothing_is_listened_to() -> None:
    before = vars(gen_ops_prim)[KERNEL]
    assert communication(CcDistribution(), Failures()) is None
    assert vars(gen_ops_prim)[KERNEL] is before


def test_every_kernel_of_communication_is_known_by_the_names_of_its_arguments() -> None:
    there = {name for name in vars(gen_ops_prim) if name.startswith(("pyboost_dist_comm_", "pyboost_inner_comm_"))}
    assert there == {kernel.function for kernel in kernels()}


def test_of_batched_calls_what_is_sent_goes_in_and_what_is_received_comes_out() -> None:
    (batch,) = (kernel for kernel in kernels() if kernel.name == "batch_isend_irecv")
    sent, received = Tensor(1.0), Tensor(2.0)
    args = [[received, sent], "group", [1, 0], [0, 0]]
    taken, given = batch.taken(args), batch.given(args, None)
    assert (len(taken), len(given)) == (1, 1)
    assert taken[0] is sent
    assert given[0] is received


def test_closing_restores_what_was_replaced() -> None:
    before = vars(gen_ops_prim)[KERNEL], primitive._run_op
    listener = communication(CcDistribution(enable=True), Failures())
    assert listener is not None
    while_listening = vars(gen_ops_prim)[KERNEL], primitive._run_op
    listener.close()
    assert (vars(gen_ops_prim)[KERNEL], primitive._run_op) == before
    assert not set(while_listening) & set(before)


def test_a_listener_that_is_dropped_leaves_nothing_behind() -> None:
    before = vars(gen_ops_prim)[KERNEL], primitive._run_op
    communication(CcDistribution(enable=True), Failures())
    gc.collect()
    assert (vars(gen_ops_prim)[KERNEL], primitive._run_op) == before


def test_a_patch_that_somebody_else_has_put_above_stays_and_works(listener: Communication) -> None:
    listener.close()
    original, names = primitive._run_op, []  # type: Any, list[str]
    listener = communication(CcDistribution(enable=True), Failures())
    ours = primitive._run_op

    def theirs(primitive: Any, name: str, args: Any) -> Any:
        names.append(name)
        return ours(primitive, name, args)

    primitive._run_op = theirs
    try:
        listener.close()
        assert primitive._run_op is theirs
        assert float(ops.L2Loss()(Tensor(np.array([2.0], np.float32)))) == 2.0
        assert names == ["L2Loss"]
    finally:
        primitive._run_op = original


def test_without_a_process_group_that_is_said_and_nothing_else_changes(
    listener: Communication, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "monitor"):
        listener.record_into(Recorder(MindSporeTensorReader(SeriesTable(), 1e-8)), {}, {}.__setitem__)
    assert "there is no process group" in caplog.text
    assert float(ops.L2Loss()(Tensor(np.array([2.0], np.float32)))) == 2.0


def test_a_handle_tells_once_after_the_wait_and_passes_everything_else_on() -> None:
    runtime, told = RuntimeHandle(), []  # type: RuntimeHandle, list[int]
    handle = Handle(runtime)
    handle.on_wait(lambda: told.append(runtime.waits))
    handle.wait()
    handle.wait()
    assert (told, runtime.waits, handle.get_comm_handle_ptr_str()) == ([1], 2, "0x1")


def test_what_telling_raises_reaches_the_caller_that_waits() -> None:
    def fail() -> None:
        raise RuntimeError("of training's")

    handle = Handle(RuntimeHandle())
    handle.on_wait(fail)
    with pytest.raises(RuntimeError, match="of training's"):
        handle.wait()
