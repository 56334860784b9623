"""What MindSpore's communication, or the launcher's environment, says of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import mindspore
from mindspore import communication
from mindspore.mint import distributed

from monitor.coordinator.store import STORES, Rendezvous
from monitor.failures import LOGGER
from monitor.recording.run import ProcessTopology

ADDRESS: Final = "MONITOR_STORE"
"""Names the place where ranks meet, ``HOST:PORT``, to a job whose launcher names none."""

LOOPBACK: Final = ("127.", "::1", "localhost")


def is_settled() -> bool:
    """Whether rank and world size are final. A launcher that announced several processes means communication to come.

    The scheduler, which runs the same script until it initialises communication and no further, is never settled.
    """
    return initialized() or _announced_size() <= 1


def initialized() -> bool:
    return bool(distributed.is_initialized())


def has_others() -> bool:
    """Whether there are other ranks, which may add to what this one has computed."""
    return initialized() and int(communication.get_group_size()) > 1


def place(found: Callable[[], Mapping[str, Sequence[int]]] = dict, chunks: int = 1, **groups: Any) -> ProcessTopology:
    """Where this process stands now. From the first call after communication was initialised on, one process of the job serves
    its store.

    Args:
        found: Ranks of groups that show in the model, by role.
        chunks: How many parts of the model this rank trains.
        groups: Names of communication groups that were passed, by role, None where there is none. They come first.
    """
    if not initialized():
        return replace(_announced(), chunks=chunks)
    members = {role: ranks for role, group in groups.items() if (ranks := group_ranks(role, group)) is not None}
    rank, world_size = int(communication.get_rank()), int(communication.get_group_size())
    return ProcessTopology(rank, world_size, {**found(), **members}, _store(rank, world_size), chunks)


def group_ranks(role: str, group: Any) -> tuple[int, ...] | None:
    """The global ranks of a communication group; None where there is none that this rank belongs to.

    Args:
        group: Its name. ``new_group`` returns an empty one to ranks that do not belong to the group.

    Raises:
        TypeError: It is no name.
        ValueError: This rank belongs to no group of that name.
    """
    if group is None or group == "":
        return None
    expected = "expected the name of a communication group, as create_group takes it or new_group returns it"
    if not isinstance(group, str):
        raise TypeError(f"{role} is a {type(group).__name__}: {expected}.")
    try:
        return tuple(int(rank) for rank in communication.get_process_group_ranks(group))
    except RuntimeError as error:
        why = "this rank belongs to no group of that name" if initialized() else "communication was not initialised yet"
        raise ValueError(f"{role} is {group!r}, but {why}: {expected}, of a group that was not destroyed.") from error


def versions() -> dict[str, str]:
    """Of MindSpore, for the manifest."""
    return {"mindspore": str(mindspore.__version__)}


def _announced() -> ProcessTopology:
    """As the environment has it. A rank that its world has no room for was meant for another process, or for nothing."""
    rank, world_size = _number("RANK_ID", 0), max(1, _announced_size())
    return ProcessTopology(rank if 0 <= rank < world_size else 0, world_size)


def _announced_size() -> int:
    """``msrun`` sets both, ``mpirun`` (through MindSpore) and rank tables the first, a dynamic cluster by hand the second."""
    return _number("RANK_SIZE", _number("MS_WORKER_NUM", 1))


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def _store(rank: int, world_size: int) -> Any:
    """MindSpore's own ``TCPStore`` cannot be used: it compares nothing, and holds the interpreter lock while it waits.

    One process on the host of the meeting point serves: the first there, which need not be rank 0 where MindSpore has numbered
    the hosts itself.
    """
    if world_size == 1:
        return None
    rendezvous = _rendezvous(world_size)
    if rendezvous is None:
        return None
    if rendezvous.host.startswith(LOOPBACK) and communication.get_local_rank_size() < world_size:
        _say_once(f"ranks on several hosts cannot meet at {rendezvous}, which every host has for itself")
        return None
    return STORES.at(rendezvous, rank, serves=communication.get_local_rank() == 0)


def _rendezvous(world_size: int) -> Rendezvous | None:
    """Where the launcher, or the user, lets ranks meet."""
    address, host, port = os.environ.get(ADDRESS), os.environ.get("MS_SCHED_HOST"), _number("MS_SCHED_PORT", 0)
    if address:
        try:
            return Rendezvous.at(address, world_size)
        except ValueError as error:
            _say_once(f"{ADDRESS}={error}")
            return None
    if host and port:
        return Rendezvous.beside(host, port, world_size)
    _say_once("the launcher has set no MS_SCHED_HOST and MS_SCHED_PORT")
    return None


@cache
def _say_once(why: str) -> None:
    said = "The ranks cannot agree on one name of the job, nor on changes of the configuration"
    LOGGER.warning("%s: %s. Set %s=HOST:PORT, the same on all ranks.", said, why, ADDRESS)
