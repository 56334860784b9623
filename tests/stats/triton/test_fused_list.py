"""Many tensors in one launch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from evidence import sampled
from reference import assert_agrees

pytest.importorskip("triton")

from interpreted import HOST, engine, fused

from monitor.stats.partials import COLUMNS
from monitor.stats.triton.launch import Driver, FusedEngine, FusedKernel, FusedList

EPS = 1e-8


def reduced(own: FusedEngine) -> FusedList:
    return FusedList(FusedKernel(EPS, own), own)


def page(rows: int = 40) -> torch.Tensor:
    return torch.zeros(rows, len(COLUMNS), dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def a_model() -> list[torch.Tensor]:
    """Parameters of all sizes, some of them strange."""
    sizes = [1, 7, 64, 512, 5000, 9000, 0, 16]
    tensors = [normal(size, seed=size) for size in sizes]
    tensors += [normal(size, seed=size).bfloat16() for size in sampled(sizes, 0, 3, 4, 6)]
    tensors += [normal(300).double(), torch.full((5000,), 0.1), normal(600) * 1e30, torch.arange(70), normal(1000)[3:]]
    tensors[4][17] = torch.nan
    return tensors


def test_rows_are_those_of_each_tensor_alone_bit_for_bit() -> None:
    tensors, alone, together = a_model(), page(), page()
    kernel = fused(EPS)
    for row, x in enumerate(tensors):
        assert kernel.reduces(x, alone, row)
    assert reduced(engine()).reduce_into(tensors, [together] * len(tensors), range(len(tensors))) == []
    assert torch.equal(alone, together)
    for row, x in enumerate(tensors):
        assert_agrees(together[row].numpy(), x, EPS)


def test_rows_may_be_on_several_pages_in_any_order() -> None:
    first, second = page(3), page(3)
    tensors = [normal(600), normal(700), normal(800)]
    assert reduced(engine()).reduce_into(tensors, [second, first, second], [2, 1, 0]) == []
    for row, x in ((second[2], tensors[0]), (first[1], tensors[1]), (second[0], tensors[2])):
        assert_agrees(row.numpy(), x, EPS)
    assert not first[[0, 2]].any()
    assert not second[1].any()


def test_what_is_not_dense_is_left_and_named() -> None:
    tensors = [normal(600), normal(30, 30).t(), torch._neg_view(normal(50)), normal(600), normal(3, 3).to_sparse()]
    into = page()
    assert reduced(engine()).reduce_into(tensors, [into] * 5, range(5)) == [1, 2, 4]
    assert into[[0, 3]].any(dim=1).all()
    assert not into[[1, 2, 4]].any()


def test_what_was_freed_is_not_listed() -> None:
    tensors, into = [normal(600), normal(600), torch._efficientzerotensor((5,))], page()
    tensors[0].untyped_storage().resize_(0)
    assert reduced(engine()).reduce_into(tensors, [into] * 3, range(3)) == [0, 2]
    assert not into[[0, 2]].any()


def test_the_same_list_is_sent_to_the_device_once_and_again_when_a_tensor_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.stats.triton import launch

    sent = []
    send = launch._sent
    monkeypatch.setattr(launch, "_sent", lambda numbers, *where: sent.append(numbers) or send(numbers, *where))
    own, into, tensors = reduced(engine()), page(), [normal(600), normal(700)]
    for _ in range(3):
        own.reduce_into(tensors, [into] * 2, [0, 1])
    assert len(sent) == 1
    tensors[1] = tensors[1] * 2
    own.reduce_into(tensors, [into] * 2, [0, 1])
    assert len(sent) == 2
    assert_agrees(into[1].numpy(), tensors[1], EPS)


def test_two_lists_that_take_turns_are_each_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.stats.triton import launch

    sent = []
    send = launch._sent
    monkeypatch.setattr(launch, "_sent", lambda numbers, *where: sent.append(numbers) or send(numbers, *where))
    own, into, weights, moments = reduced(engine()), page(), [normal(600)], [normal(600, seed=1)]
    for _ in range(3):
        own.reduce_into(weights, [into], [0])
        own.reduce_into(moments, [into], [1])
    assert len(sent) == 2


def test_while_work_is_recorded_nothing_is_launched_together() -> None:
    recording = Driver(HOST.device, HOST.stream, capturing=lambda: True, on=lambda _: nullcontext())
    own = FusedEngine(engine()._source, recording)
    into = page()
    assert reduced(own).reduce_into([normal(60)] * 3, [into] * 3, range(3)) == [0, 1, 2]
    assert not into.any()


def test_a_table_made_in_inference_mode_is_used_and_changed_outside_it() -> None:
    own, into, first, second = reduced(engine()), page(), [normal(600)], [normal(600, seed=1)]
    with torch.inference_mode():
        own.reduce_into(first, [into], [0])
    own.reduce_into(second, [into], [0])
    assert not own._tables.popitem()[1].memory.is_inference()
    assert_agrees(into[0].numpy(), second[0], EPS)
