"""What is remembered of results of functional collectives that no one has waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from monitor.config.model import CcDistribution
from monitor.failures import Failures
from monitor.pytorch.collectives.recording import TorchCollectives
from monitor.recording.collectives import CollectiveCall, Communication


class Readings:
    """In the place of what gives tensors their rows: which were read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read(self, _call: Any, outputs: list[Tensor]) -> bool:
        self.sizes += [output.numel() for output in outputs]
        return True

    def stop_reading(self) -> None:
        pass


@pytest.fixture
def collectives() -> Iterator[TorchCollectives]:
    collectives = TorchCollectives(Failures())
    listening = Communication(CcDistribution(enable=True), Failures(), collectives)
    collectives._calls = Readings()  # type: ignore[assignment]
    yield collectives
    listening.close()


def call() -> CollectiveCall:
    made = CollectiveCall.__new__(CollectiveCall)
    made.step = 0
    return made


def test_another_tensor_at_the_address_of_a_forgotten_result_is_none(collectives: TorchCollectives) -> None:
    result = torch.zeros(100_000)
    collectives._await_functional(call(), [result])
    address = result.untyped_storage()._cdata
    del result
    kept = [torch.zeros(3) for _ in range(10_000)]
    there = [x for x in kept if x.untyped_storage()._cdata == address]
    if not there:  # the allocator gave the address to no one: as good as if it had
        there = kept[:1]
        collectives._functional[there[0].untyped_storage()._cdata] = collectives._functional.pop(address)
    before = there[0].data_ptr(), there[0].untyped_storage().nbytes()
    collectives._tensor_waited_for(there[0])
    assert (there[0].data_ptr(), there[0].untyped_storage().nbytes()) == before
    assert collectives._calls is not None
    assert collectives._calls.sizes == []  # type: ignore[attr-defined]


def test_a_result_that_was_shrunk_is_neither_read_nor_made_larger(collectives: TorchCollectives) -> None:
    result = torch.zeros(1000)
    collectives._await_functional(call(), [result])
    part = result[:10]
    result.untyped_storage().resize_(80)
    collectives._tensor_waited_for(part)
    assert result.untyped_storage().nbytes() == 80
    assert collectives._calls is not None
    assert collectives._calls.sizes == []  # type: ignore[attr-defined]


def test_a_part_that_is_waited_for_represents_the_whole(collectives: TorchCollectives) -> None:
    result = torch.zeros(1000)
    collectives._await_functional(call(), [result])
    collectives._tensor_waited_for(result[:10])
    assert collectives._calls is not None
    assert collectives._calls.sizes == [1000]  # type: ignore[attr-defined]
