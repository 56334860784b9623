"""Rank, world size, groups and store of this process, from MindSpore's communication or the launcher's environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import mindspore
from mindspore import communication
from mindspore.mint import distributed

from monitor.coordinator.store import ASKED_PER_SECOND, STORES, Rendezvous
from monitor.coordinator.store_key import StoreKeyError, job_key
from monitor.failures import LOGGER
from monitor.recording.run import ProcessTopology

ADDRESS: Final = "MONITOR_STORE"
"""The environment variable with the ranks' meeting point, ``HOST:PORT``, if the launcher sets none."""

SET_ADDRESS: Final = f"Set {ADDRESS}=HOST:PORT, the same on all ranks."

LOOPBACK: Final = ("127.", "::1", "localhost")

asked_per_second: float = ASKED_PER_SECOND


def is_settled() -> bool:
    """Whether rank and world size are final. They are not while a launcher has announced several processes without
    communication.

    The scheduler runs the same script only until communication is initialised, so it is never settled.
    """
    return initialized() or _announced_size() <= 1


def initialized() -> bool:
    return bool(distributed.is_initialized())


def has_others() -> bool:
    """Whether there are other ranks, which may contribute to this rank's results."""
    return initialized() and int(communication.get_group_size()) > 1


def data_parallel_ranks() -> tuple[int, ...]:
    """All ranks, if MindSpore's parallel mode is that of data parallelism; none otherwise."""
    is_so = initialized() and mindspore.get_auto_parallel_context("parallel_mode") == mindspore.ParallelMode.DATA_PARALLEL
    return tuple(range(int(communication.get_group_size()))) if is_so else ()


def place(found: Callable[[], Mapping[str, Sequence[int]]] = dict, chunks: int = 1, **groups: Any) -> ProcessTopology:
    """The current rank, world size, groups and store of this process. After communication is initialised, one process of the
    job serves the store.

    Args:
        found: Returns the ranks of groups that the model shows, by role.
        chunks: The number of parts of the model that this rank trains.
        groups: Names of the communication groups that the user passed, by role, or None. They override groups found in the
            model.
    """
    if not initialized():
        return replace(_announced(), chunks=chunks)
    members = {role: ranks for role, group in groups.items() if (ranks := group_ranks(role, group)) is not None}
    rank, world_size = int(communication.get_rank()), int(communication.get_group_size())
    return ProcessTopology(rank, world_size, {**found(), **members}, _store(rank, world_size), chunks)


def group_ranks(role: str, group: Any) -> tuple[int, ...] | None:
    """The global ranks of a communication group; None if there is no group, or this rank does not belong to it.

    Args:
        group: Its name. ``new_group`` returns an empty name on ranks that do not belong to the group.

    Raises:
        TypeError: ``group`` is no text.
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
    """The version of MindSpore, for the manifest."""
    return {"mindspore": str(mindspore.__version__)}


def _announced() -> ProcessTopology:
    """Rank and world size from the environment. A rank outside the world size was meant for another process and is ignored."""
    rank, world_size = _number("RANK_ID", 0), max(1, _announced_size())
    return ProcessTopology(rank if 0 <= rank < world_size else 0, world_size)


def _announced_size() -> int:
    """``msrun`` sets both; ``mpirun`` (through MindSpore) and rank tables set the first, manual clusters the second."""
    return _number("RANK_SIZE", _number("MS_WORKER_NUM", 1))


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def _store(rank: int, world_size: int) -> Any:
    """The job's store. MindSpore's ``TCPStore`` is unusable: it has no compare, and holds the interpreter lock while it waits.

    One process on the meeting point's host serves the store: the first process there. It need not be rank 0, since MindSpore
    may number the hosts itself.
    """
    if world_size == 1:
        return None
    rendezvous = _rendezvous(world_size)
    if rendezvous is None:
        return None
    if rendezvous.host.startswith(LOOPBACK) and communication.get_local_rank_size() < world_size:
        _warn_once(f"ranks on several hosts cannot meet at {rendezvous}, which is a local address on each host. {SET_ADDRESS}")
        return None
    try:
        return STORES.at(rendezvous, rank, communication.get_local_rank() == 0, job_key)
    except StoreKeyError as error:
        _warn_once(str(error))
        return None


def _rendezvous(world_size: int) -> Rendezvous | None:
    """The meeting point of the ranks, from the user or the launcher."""
    address, host, port = os.environ.get(ADDRESS), os.environ.get("MS_SCHED_HOST"), _number("MS_SCHED_PORT", 0)
    if address:
        try:
            return Rendezvous.at(address, world_size)
        except ValueError as error:
            _warn_once(f"{ADDRESS}={error} {SET_ADDRESS}")
            return None
    if host and port:
        return Rendezvous.beside(host, port, world_size)
    _warn_once(f"the launcher has set no MS_SCHED_HOST and MS_SCHED_PORT. {SET_ADDRESS}")
    return None


@cache
def _warn_once(why: str) -> None:
    LOGGER.warning("The ranks cannot agree on a common run name or on changes of the configuration: %s", why)
