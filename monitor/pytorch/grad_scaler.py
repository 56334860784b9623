"""Seeing a step that a GradScaler skips.

When it found Inf, ``GradScaler.step`` does not call the optimizer at all, and no hook of any kind runs: a patch is the only
way to learn of it.
"""

from __future__ import annotations

from typing import Final

from torch.amp.grad_scaler import GradScaler

from monitor.pytorch.patches import TorchCallPatch

SCALER_PATCH: Final = TorchCallPatch(GradScaler, "step", ("self", "optimizer"))
