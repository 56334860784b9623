"""What ``trainermon run`` asks of PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from monitor.pytorch.trainer_mon import TrainerMon

__all__ = ["TrainerMon", "held", "models", "parameters", "parts"]


def held(optimizer: Any) -> Collection[int]:
    """The ids of the tensors that an optimizer steps."""
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def models(objects: Iterable[Any]) -> list[nn.Module]:
    """The modules among some objects. Asks no object for its class: a proxy would answer for another."""
    return [one for one in objects if issubclass(type(one), nn.Module)]


def parts(model: nn.Module) -> Iterable[Any]:
    """The direct parts of a module."""
    found: dict[str, Any] = vars(model).get("_modules", {})
    return found.values()


def parameters(model: nn.Module) -> Collection[int]:
    """The ids of the parameters of a module; none while it is being made."""
    try:
        return {id(one) for one in model.parameters()}
    except AttributeError:
        return ()
