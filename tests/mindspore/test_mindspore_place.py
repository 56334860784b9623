"""Where a process of MindSpore's stands that no communication was initialised in."""

from __future__ import annotations

from pathlib import Path

import mindspore
import pytest
from mindspore import communication

from monitor.mindspore.process_group import (
    _rendezvous,
    _store,
    group_ranks,
    has_others,
    initialized,
    is_settled,
    place,
    versions,
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK_ID", "RANK_SIZE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MONITOR_STORE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_process_on_its_own_is_the_only_rank() -> None:
    here = place(dp=None, chunks=3)
    assert (here.rank, here.world_size, here.groups, here.store, here.chunks) == (0, 1, {}, None, 3)
    assert is_settled()
    assert not initialized()
    assert not has_others()


@pytest.mark.parametrize("variable", ["RANK_SIZE", "MS_WORKER_NUM"])
def test_what_a_launcher_says_holds_until_communication_is_initialised(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv(variable, "8")
    assert (place().rank, place().world_size) == (3, 8)
    assert not is_settled()
    assert not has_others()


@pytest.mark.parametrize(("rank", "size"), [("first", ""), ("3", "2"), ("-1", "1")])
def test_what_a_launcher_says_is_not_believed_if_it_cannot_be(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK_ID", rank)
    monkeypatch.setenv("RANK_SIZE", size)
    assert place().rank == 0


@pytest.mark.parametrize("given", [3, ["a"], object()])
def test_what_is_no_name_of_a_group_is_named(given: object) -> None:
    with pytest.raises(TypeError, match=f"tp_group is a {type(given).__name__}: expected the name of a communication group"):
        group_ranks("tp_group", given)


def test_a_group_that_cannot_be_there_yet_is_named() -> None:
    with pytest.raises(ValueError, match="tp_group is 'tp', but communication was not initialised yet"):
        group_ranks("tp_group", "tp")


def test_ranks_meet_beside_the_scheduler_unless_a_place_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_SCHED_HOST", "10.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "8118")
    beside = _rendezvous(4)
    assert beside is not None
    assert (beside.host, beside.ports[0]) == ("10.0.0.1", 9118)
    monkeypatch.setenv("MONITOR_STORE", "10.0.0.2:29501")
    given = _rendezvous(4)
    assert given is not None
    assert (given.host, given.ports) == ("10.0.0.2", (29501,))


def test_that_ranks_have_no_place_to_meet_is_said_once_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONITOR_STORE", "here")
    assert (_rendezvous(2), _rendezvous(2)) == (None, None)
    (said,) = caplog.messages
    assert "MONITOR_STORE='here' is not the address of a store: expected HOST:PORT" in said
    monkeypatch.delenv("MONITOR_STORE")
    caplog.clear()
    assert (_rendezvous(2), _rendezvous(2)) == (None, None)
    (said,) = caplog.messages
    assert "the launcher has set no MS_SCHED_HOST and MS_SCHED_PORT. Set MONITOR_STORE=HOST:PORT" in said


def test_a_rank_without_a_key_has_no_store_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONITOR_STORE", "192.0.2.1:29501")
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setattr(communication, "get_local_rank", lambda: 1)
    (tmp_path / ".store-key").touch(0o644)
    assert (_store(1, 2), _store(1, 2)) == (None, None)
    (said,) = caplog.messages
    assert "its mode is 644, and must be 600. Delete this file" in said
    assert "Set MONITOR_STORE_KEY" in said
    (tmp_path / ".store-key").unlink()
    assert _store(1, 2) is not None


def test_the_version_of_mindspore_is_noted() -> None:
    assert versions() == {"mindspore": mindspore.__version__}
