"""What torch.distributed, or the launcher's environment, says of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from monitor.recording.run import ProcessTopology


def is_settled() -> bool:
    """Whether rank and world size are final. A launcher that announced several processes means a process group to come."""
    return initialized() or _number("WORLD_SIZE", 1) <= 1


def initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def has_others() -> bool:
    """Whether there are other ranks, which may add to what this one has computed."""
    return initialized() and dist.get_world_size() > 1


def place(found: Callable[[], Mapping[str, Sequence[int]]] = dict, chunks: int = 1, **groups: Any) -> ProcessTopology:
    """Where this process stands now.

    Args:
        found: Ranks of groups that show in the model, by role.
        chunks: How many parts of the model this rank trains.
        groups: Process groups that were passed, by role, None where there is none. They come first.
    """
    if not initialized():
        return replace(_announced(), chunks=chunks)
    members = {role: ranks for role, group in groups.items() if (ranks := group_ranks(role, group)) is not None}
    store = dist.distributed_c10d._get_default_store()
    return ProcessTopology(dist.get_rank(), dist.get_world_size(), {**found(), **members}, store, chunks)


def group_ranks(role: str, group: Any) -> tuple[int, ...] | None:
    """The global ranks of a process group; None where there is none that this rank belongs to.

    Raises:
        TypeError: It is no process group.
    """
    if group is None or (dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER):
        return None
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (AttributeError, KeyError, TypeError) as error:
        given = f"{role} is a {type(group).__name__}"
        raise TypeError(f"{given}: expected a process group of torch.distributed that was not destroyed.") from error


def versions() -> dict[str, str]:
    """Of torch and of the device's runtime, for the manifest."""
    found = {"torch": str(torch.__version__)}
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            found[name] = str(version)
    return found


def _announced() -> ProcessTopology:
    """As the environment has it. A rank that its world has no room for was meant for another process, or for nothing."""
    rank, world_size = _number("RANK", 0), max(1, _number("WORLD_SIZE", 1))
    return ProcessTopology(rank if 0 <= rank < world_size else 0, world_size)


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default
