"""What DTensors say of themselves, of every rank of a mesh; the ranks are played one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from monitor import series
from monitor.pytorch.frameworks.dtensor import activation_placement, mesh_groups, placement_of
from monitor.pytorch.frameworks.optimizer_state import MomentFinder, SteppedTensor
from monitor.series import Placement

LENGTHS = (1, 2, 5, 6, 7, 12, 13)


@contextmanager
def mesh(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """A mesh ``rows`` × ``columns`` as one of its ranks has it."""
    dist.init_process_group("fake", rank=rank, world_size=shape[0] * shape[1], store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    finally:
        dist.destroy_process_group()


def numbered(length: int) -> torch.Tensor:
    """Every element is its own place in the flattened tensor."""
    return torch.arange(length * 6.0).reshape(length, 6)


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("how", [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0))])
def test_the_offset_is_where_the_first_element_stands(rank: int, how: tuple[Any, Any]) -> None:
    with mesh(rank, 2, 3) as here:
        for length in LENGTHS:
            x = distribute_tensor(numbered(length), here, how, src_data_rank=None)
            shard, local = placement_of(x).shard, x.to_local()
            place = divmod(int(local[0, 0]), 6) if local.numel() else ()
            assert (shard.global_shape, shard.offset) == ((length, 6), place)


@pytest.mark.parametrize("rank", range(4))
def test_what_is_cut_in_the_second_dimension_of_the_mesh_first_still_lies_in_one_piece(rank: int) -> None:
    with mesh(rank, 2, 2) as here:
        for length in (4, 6, 8, 10):
            row, column = divmod(rank, 2)
            local = numbered(length).chunk(2)[column].chunk(2)[row]
            by_fsdp = [_StridedShard(0, split_factor=2), Shard(0)]
            x = DTensor.from_local(local, here, by_fsdp, run_check=False, shape=(length, 6), stride=(6, 1))
            assert placement_of(x).shard.offset == (int(local[0, 0]) // 6, 0)


def test_what_does_not_lie_in_one_piece_has_no_offset() -> None:
    with mesh(0, 2, 2) as here:
        x = DTensor.from_local(
            torch.zeros(4, 6),
            here,
            [_StridedShard(0, split_factor=2), Replicate()],
            run_check=False,
            shape=(8, 6),
            stride=(6, 1),
        )
        assert placement_of(x) == Placement(replicas=(0, 1), shard=series.Shard((0, 2), (8, 6), ()))


def test_a_term_of_a_sum_over_some_ranks_is_a_replica_or_a_shard_over_others() -> None:
    with mesh(3, 2, 2) as here:
        over_columns = DTensor.from_local(torch.zeros(4), here, [Replicate(), Partial()], run_check=False)
        assert placement_of(over_columns) == Placement(replicas=(1, 3), partial=True, differing=(2, 3))
        cut = DTensor.from_local(torch.zeros(4), here, [Shard(0), Partial()], run_check=False)
        assert placement_of(cut) == Placement(shard=series.Shard((1, 3), (8,), (4,)), partial=True, differing=(2, 3))


def test_of_an_activation_that_several_ranks_have_each_writes() -> None:
    with mesh(0, 2, 2) as here:
        x = DTensor.from_local(torch.zeros(4), here, [Replicate(), Replicate()], run_check=False)
        assert activation_placement(x) == Placement(unclaimed=(0, 1, 2, 3))


def test_any_other_tensor_says_nothing() -> None:
    assert placement_of(torch.zeros(2)) is None
    assert activation_placement(torch.zeros(2)) == series.LOCAL


def test_the_groups_of_a_rank_have_the_names_of_the_dimensions() -> None:
    with mesh(4, 2, 3) as here:
        x = DTensor.from_local(torch.zeros(1), here, [Replicate(), Replicate()], run_check=False)
        assert mesh_groups([torch.zeros(1), x]) == {"rows": (1, 4), "columns": (3, 4, 5)}


# One rank and one mesh: torch's cache of operations on DTensors would give the ranks of equal meshes the place of the first.


def test_a_momentum_that_is_replicated_as_its_gradient_was_is_read_in_the_part_of_the_parameter() -> None:
    with mesh(1, 1, 2) as here:
        weight = torch.nn.Parameter(distribute_tensor(numbered(8), here, [Replicate(), Shard(0)], src_data_rank=None))
        weight.grad = distribute_tensor(numbered(8), here, [Replicate(), Replicate()], src_data_rank=None)
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        optimizer.step()  # begins the momentum as a copy of the gradient
        (found,) = MomentFinder().of(["exp_avg"], SteppedTensor(optimizer, weight))
        assert found is not None
        assert torch.equal(found, numbered(8)[4:])


def test_a_momentum_that_does_not_show_the_part_of_the_parameter_has_no_row_and_a_note_says_so() -> None:
    with mesh(1, 1, 2) as here:
        weight = torch.nn.Parameter(distribute_tensor(numbered(8), here, [Replicate(), Shard(0)], src_data_rank=None))
        optimizer, finder = torch.optim.SGD([weight], momentum=0.9), MomentFinder()
        state = distribute_tensor(numbered(8), here, [Replicate(), Shard(1)], src_data_rank=None)
        optimizer.state[weight]["momentum_buffer"] = state
        assert finder.of(["exp_avg"], SteppedTensor(optimizer, weight)) == [None]
        assert finder.unusable == [
            "SGD distributes state['momentum_buffer'] over the ranks otherwise than its parameter: exp_avg has no row of it"
        ]
