"""By what the gradients of an engine of DeepSpeed are multiplied until its optimizer divides by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_scale_of(engine: Any) -> Tensor | None:
    """The scale of the loss that gradients were computed from, one element; None where it was not scaled."""
    scaler = grad_scaler_of(engine)
    if scaler is not None:
        scale: Tensor | None = scaler._scale
        return scale
    return torch.tensor(float(engine.optimizer.loss_scale)) if _scales(engine) else None


def is_scaled(engine: Any) -> bool:
    """Whether gradients are multiplied by a loss scale until the optimizer's step."""
    return grad_scaler_of(engine) is not None or _scales(engine)


def grad_scaler_of(engine: Any) -> Any:
    """The GradScaler that scales and skips for an engine: it has one where torch's autocast computes in float16."""
    without_zero = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None) if without_zero is None else without_zero


def _scales(engine: Any) -> bool:
    # An engine that knows how to scale a loss leaves it to ZeRO's optimizers: without ZeRO, float16 is divided by a scale that
    # nothing was multiplied by. Older engines had every optimizer of DeepSpeed's multiply the loss itself.
    if hasattr(type(engine), "scale") and not hasattr(engine.optimizer, "scale_if_loss"):
        return False
    dynamic = bool(getattr(engine.optimizer, "dynamic_loss_scale", False))
    return dynamic or float(getattr(engine.optimizer, "loss_scale", 1.0)) != 1.0
