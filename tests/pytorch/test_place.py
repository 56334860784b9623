"""Where a process stands, by its process group or by what its launcher says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from monitor.pytorch.process_group import group_ranks, has_others, is_settled, place, versions


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_process_on_its_own_is_the_only_rank() -> None:
    here = place(dp=None)
    assert (here.rank, here.world_size, here.groups, here.store) == (0, 1, {}, None)
    assert is_settled()
    assert not has_others()


def test_what_a_launcher_says_holds_until_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (place().rank, place().world_size) == (3, 8)
    assert not is_settled()
    assert not has_others()


@pytest.mark.usefixtures("rank_2_of_4")
def test_a_process_group_knows_better_than_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    here = place(dp=dist.new_group([0, 2]), tp=dist.new_group([0, 1]), pp=None)
    assert (here.rank, here.world_size, here.groups) == (2, 4, {"dp": (0, 2)})
    assert here.store is not None
    assert is_settled()
    assert has_others()


def test_what_a_launcher_says_is_not_believed_if_it_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (place().rank, place().world_size) == (0, 1)


@pytest.mark.usefixtures("rank_2_of_4")
def test_the_ranks_of_a_group_are_those_of_the_job() -> None:
    assert group_ranks("dp_group", dist.group.WORLD) == (0, 1, 2, 3)
    assert group_ranks("dp_group", dist.new_group([1, 2])) == (1, 2)


@pytest.mark.usefixtures("rank_2_of_4")
@pytest.mark.parametrize("given", ["dp", 2, [0, 1]])
def test_what_is_no_group_is_named(given: object) -> None:
    with pytest.raises(TypeError, match=f"tp_group is a {type(given).__name__}: expected a process group"):
        group_ranks("tp_group", given)


def test_the_version_of_torch_is_among_those_that_are_noted() -> None:
    assert versions()["torch"] == torch.__version__
