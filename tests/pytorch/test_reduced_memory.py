"""What memory is known to hold sums over ranks: by bytes, so that what shares a storage is distinguished."""

from __future__ import annotations

import torch

from monitor.pytorch.reductions.memory import ReducedMemory, ReductionGroup

WORLD, NODE = ReductionGroup((0, 1)), ReductionGroup((0, 2))


def test_a_view_of_reduced_memory_is_reduced_and_what_lies_beside_it_is_not() -> None:
    memory, bucket = ReducedMemory(), torch.zeros(12)
    memory.add(bucket[4:8], (WORLD,))
    assert memory.groups_of(bucket[4:8].view(2, 2)) == (WORLD,)
    assert memory.groups_of(bucket[5:7]) == (WORLD,)
    assert [memory.groups_of(x) for x in (bucket, bucket[3:5], bucket[7:9], bucket[:4])] == [None] * 4


def test_parts_that_were_reduced_one_by_one_make_a_whole() -> None:
    memory, bucket = ReducedMemory(), torch.zeros(12)
    for start in (4, 0, 8):
        memory.add(bucket[start : start + 4], (WORLD,))
    assert memory.groups_of(bucket) == (WORLD,)


def test_a_whole_of_parts_was_summed_over_what_all_of_them_were() -> None:
    memory, bucket = ReducedMemory(), torch.zeros(8)
    memory.add(bucket, (WORLD,))
    memory.add(bucket[:4], (NODE,))
    assert memory.groups_of(bucket[:4]) == (WORLD, NODE)
    assert memory.groups_of(bucket) == (WORLD,)


def test_what_is_written_since_is_not_reduced() -> None:
    memory, bucket = ReducedMemory(), torch.zeros(8)
    memory.add(bucket, (WORLD,))
    memory.forget(bucket[2:4])
    assert [memory.groups_of(bucket[a:b]) for a, b in ((0, 2), (2, 4), (4, 8), (0, 8))] == [(WORLD,), None, (WORLD,), None]


def test_a_copy_is_what_it_was_copied_from_and_a_number_that_is_spread_is_not() -> None:
    memory, bucket, gradient = ReducedMemory(), torch.zeros(8), torch.zeros(2, 2)
    memory.add(bucket, (WORLD,))
    memory.copied(gradient, bucket[:4].view(2, 2))
    assert memory.groups_of(gradient) == (WORLD,)
    memory.copied(gradient, bucket[0])
    assert memory.groups_of(gradient) is None


def test_memory_that_was_freed_and_given_out_again_is_not_reduced() -> None:
    memory = ReducedMemory()
    for _ in range(50):
        x = torch.zeros(1000)
        assert memory.groups_of(x) is None
        memory.add(x, (WORLD,))
        del x
