"""How many steps an optimizer has made with a parameter, which tells whether it has made this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from monitor.pytorch.frameworks.moments import Stepped


def steps_made(stepped: Stepped, group: Mapping[str, Any]) -> float | Tensor | None:
    """A tensor, float64, where the number is on an accelerator; None where none is kept. Some optimizers count for a group."""
    state = stepped.optimizer.state.get(stepped.key) or {}
    step = state.get("step", group.get("step"))
    if isinstance(step, Tensor):
        return step.detach().to(torch.float64, copy=True) if step.device.type != "cpu" else float(step.item())
    return None if step is None else float(step)


def made(now: float | Tensor, before: float | Tensor | None = None) -> float | Tensor:
    """1 where there were more steps than ``before``, or any; else 0. Float64, one element, where ``now`` is a tensor."""
    more = now - (0.0 if before is None else before)
    return more.ne(0).to(torch.float64) if isinstance(more, Tensor) else float(more != 0)
