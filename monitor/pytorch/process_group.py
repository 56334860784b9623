"""Rank, world size and process groups of this process, from torch.distributed or the launcher's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from monitor.coordinator.job_store import ASKED_PER_SECOND
from monitor.recording.run import ProcessTopology
from monitor.series import Ranks

asked_per_second: float = ASKED_PER_SECOND


def is_settled() -> bool:
    """Whether rank and world size are final. They are not while a launcher announced several processes and no process group
    exists.
    """
    return initialized() or _number("WORLD_SIZE", 1) <= 1


def initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def has_others() -> bool:
    """Whether there are other ranks, which may add to gradients of this one."""
    return initialized() and dist.get_world_size() > 1


def place(found: Callable[[], Mapping[str, Sequence[int]]] = dict, chunks: int = 1, **groups: Any) -> ProcessTopology:
    """The current topology of this process.

    Args:
        found: Finds the groups that are visible in the model: their ranks by role.
        chunks: Number of model chunks that this rank trains.
        groups: Process groups that the user passed, by role; None if absent. They take precedence.
    """
    if not initialized():
        return replace(_announced(), chunks=chunks)
    members = {role: ranks for role, group in groups.items() if (ranks := group_ranks(role, group)) is not None}
    store = dist.distributed_c10d._get_default_store()
    return ProcessTopology(dist.get_rank(), dist.get_world_size(), {**found(), **members}, store, chunks)


def group_ranks(role: str, group: Any) -> tuple[int, ...] | None:
    """The global ranks of a process group; None if there is none or this rank is no member.

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


def stage_ranks() -> Ranks | None:
    """The ranks of the stages of the pipeline whose forward is running; None if none is."""
    frame: FrameType | None = sys._getframe(1) if (called := _forward_of_a_stage()) is not None else None
    while frame is not None and frame.f_code is not called:
        frame = frame.f_back
    group = None if frame is None else getattr(frame.f_locals.get("self"), "group", None)
    return group_ranks("the group of the pipeline's stages", group)


def _forward_of_a_stage() -> CodeType | None:
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return getattr(getattr(stage, "forward_one_chunk", None), "__code__", None)


def versions() -> dict[str, str]:
    """Versions of torch and of the device's runtime, for the manifest."""
    found = {"torch": str(torch.__version__)}
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            found[name] = str(version)
    return found


def _announced() -> ProcessTopology:
    """The topology from environment variables. A rank outside the world size is invalid and replaced by 0."""
    rank, world_size = _number("RANK", 0), max(1, _number("WORLD_SIZE", 1))
    return ProcessTopology(rank if 0 <= rank < world_size else 0, world_size)


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default
