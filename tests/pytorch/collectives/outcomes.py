"""What the cases of a script came to, unmonitored and monitored, and what was recorded of them."""

from __future__ import annotations

from typing import Any

import torch
from jobs import Job
from torch import Tensor


def outcome(job: Job, rank: int, case: str) -> dict[str, Any]:
    """Of a case, monitored; it fails unless it came to the same as unmonitored, in every bit."""
    plain, monitored = (told[rank]["cases"][case] for told in (job.plain, job.monitored))
    assert plain == monitored
    return monitored


def calls(job: Job, rank: int, step: int) -> dict[str, int]:
    """How many calls of each operator the rows of a step hold."""
    found: dict[str, int] = {}
    for row in job.rows("other", rank):
        if row.step == step:
            op = row.name.rpartition(".")[0]
            found[op] = max(found.get(op, 0), row.values["calls"])
    return found


def values(job: Job, rank: int, step: int) -> dict[str, dict[str, Any]]:
    """The rows of a step, by name."""
    return {row.name: row.values for row in job.rows("other", rank) if row.step == step}


def tensor(told: dict[str, Any]) -> Tensor:
    """A tensor that a case has told of."""
    dtype = getattr(torch, told["dtype"].removeprefix("torch."))
    return torch.tensor(told["bits"], dtype=torch.uint8).view(dtype).view(told["shape"])


def together(told: list[dict[str, Any]]) -> Tensor:
    """All elements of several."""
    return torch.cat([tensor(one).flatten() for one in told])
