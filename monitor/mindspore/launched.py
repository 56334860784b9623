"""What ``trainermon run`` asks of MindSpore."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from mindspore import nn

from monitor.mindspore.trainer_mon import TrainerMon

__all__ = ["TrainerMon", "held", "models", "parameters", "parts"]


def held(optimizer: Any) -> Collection[int]:
    """The ids of the tensors that an optimizer steps."""
    return {id(one) for one in optimizer.parameters}


def models(objects: Iterable[Any]) -> list[nn.Cell]:
    """The cells among some objects, without optimizers and what contains one: a cell that trains is no model."""
    cells = [one for one in objects if issubclass(type(one), nn.Cell) and not issubclass(type(one), nn.Optimizer)]
    return [cell for cell in cells if not any(issubclass(type(part), nn.Optimizer) for part in parts(cell))]


def parts(model: nn.Cell) -> Iterable[Any]:
    """The direct parts of a cell."""
    found: dict[str, Any] = vars(model).get("_cells", {})
    return found.values()


def parameters(model: nn.Cell) -> Collection[int]:
    """The ids of the parameters of a cell; none while it is being made."""
    try:
        return {id(one) for one in model.get_parameters()}
    except AttributeError:
        return ()
