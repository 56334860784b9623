"""What torch.distributed, or the launcher's environment, says of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from monitor.run import Place


def is_settled() -> bool:
    """Whether rank and world size are final. A launcher that announced several processes means a process group to come."""
    return initialized() or _number("WORLD_SIZE", 1) <= 1


def initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def has_others() -> bool:
    """Whether there are other ranks, which may add to what this one has computed."""
    return initialized() and dist.get_world_size() > 1


def place(**groups: Any) -> Place:
    """Where this process stands now.

    Args:
        groups: Process groups by role, None where there is none.
    """
    if not initialized():
        return Place(_number("RANK", 0), max(1, _number("WORLD_SIZE", 1)))
    members = {role: tuple(group_ranks(group)) for role, group in groups.items() if group is not None}
    return Place(dist.get_rank(), dist.get_world_size(), members, dist.distributed_c10d._get_default_store())


def group_ranks(group: Any) -> Sequence[int]:
    """The global ranks of a process group."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def versions() -> dict[str, str]:
    """Of torch and of the device's runtime, for the manifest."""
    found = {"torch": str(torch.__version__)}
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            found[name] = str(version)
    return found


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default
