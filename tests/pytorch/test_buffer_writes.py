"""The mode that follows writes from reduced buffers: on the stack of one thread, once, and beside modes of others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from monitor.pytorch.reductions.memory import BufferWrites, ReducedMemory, ReductionGroup

GROUPS = (ReductionGroup((0, 1)),)


def modes() -> int:
    return len(_get_current_function_mode_stack())


@pytest.fixture(autouse=True)
def stack() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    while modes():
        _pop_mode()


@pytest.fixture
def memory() -> ReducedMemory:
    return ReducedMemory()


@pytest.fixture
def writes(memory: ReducedMemory) -> BufferWrites:
    return BufferWrites(memory, lambda: None, _fails)


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _fails(error: Exception) -> None:
    raise error


class Enters(TorchFunctionMode):
    """Has ``writes`` enter, or leave, while torch has taken the modes off that handle a call."""

    def __init__(self, does: Any) -> None:
        self.does = does

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.does()
        return func(*args, **(kwargs or {}))


def test_what_another_thread_leaves_is_single_and_gone_when_its_own_thread_leaves(
    writes: BufferWrites, elsewhere: ThreadPoolExecutor
) -> None:
    for _ in range(5):
        writes.enter()
        elsewhere.submit(writes.leave).result()
        assert not writes.entered
        assert modes() == 1
        assert elsewhere.submit(modes).result() == 0
    writes.leave()
    assert modes() == 0


def test_what_another_thread_has_left_sees_nothing(
    writes: BufferWrites, memory: ReducedMemory, elsewhere: ThreadPoolExecutor
) -> None:
    reduced, gradient = torch.ones(3), torch.zeros(3)
    memory.add(reduced, GROUPS)
    writes.enter()
    elsewhere.submit(writes.leave).result()
    gradient.copy_(reduced)
    assert memory.groups_of(gradient) is None
    writes.enter()
    gradient.copy_(reduced)
    assert memory.groups_of(gradient) == GROUPS


def test_modes_of_the_users_stay_where_a_mode_enters_and_leaves_within_a_call(writes: BufferWrites) -> None:
    with Enters(writes.enter) as mode:
        torch.ones(1)
        assert _get_current_function_mode_stack()[-1] is mode
        torch.ones(1)
        assert modes() == 2
    assert modes() == 1
    with Enters(writes.leave):
        torch.ones(1)
    assert modes() == 0


@pytest.mark.parametrize("within", [False, True])
def test_a_default_device_can_be_unset_after_a_mode_was_to_enter(writes: BufferWrites, within: bool) -> None:
    torch.set_default_device("meta")
    if within:
        with Enters(writes.enter):
            torch.ones(1)
    else:
        writes.enter()
    assert torch.ones(1).device.type == "meta"
    with torch.device("cpu"):
        assert torch.ones(1).device.type == "cpu"
    torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    writes.leave()
    assert modes() == 0


def test_no_mode_enters_while_the_default_device_is_taken_off(writes: BufferWrites) -> None:
    torch.set_default_device("cpu")
    default = _get_current_function_mode_stack()[0]
    _pop_mode()
    writes.enter()
    assert not writes.entered
    torch.overrides._push_mode(default)


def test_a_mode_goes_with_its_owner(memory: ReducedMemory) -> None:
    BufferWrites(memory, lambda: None, _fails).enter()
    gc.collect()
    assert modes() == 0
