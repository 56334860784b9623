"""Finds what trains with an optimizer of torch: the optimizer itself, DeepSpeed's engine, or an optimizer of Megatron."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from monitor.launching.attaching import Training, parameters_of, trained_by
from monitor.pytorch.optimizer_steps import unwrapped


def training_of(optimizer: Any, objects: Sequence[Any]) -> Training | None:
    """What trains with an optimizer that has stepped, or with an engine that has.

    Returns:
        None for the optimizer of an engine, whose step is not over yet.
    """
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    if engine is not None:
        if isinstance(optimizer, engine):
            return Training(optimizer, parameters_of(optimizer), _inside(optimizer))
        if any(optimizer is one for other in _of_class(engine, objects) for one in _inside(other)):
            return None
    megatron = getattr(sys.modules.get("megatron.core.optimizer"), "MegatronOptimizer", None)
    if megatron is not None:
        return _of_megatron(optimizer, _of_class(megatron, objects))
    return trained_by(optimizer)


def _inside(engine: Any) -> list[Any]:
    found = (unwrapped(vars(engine).get("optimizer")), vars(engine).get("basic_optimizer"))
    return [one for one in found if one is not None]


def _of_class(kind: type, objects: Iterable[Any]) -> list[Any]:
    return [one for one in objects if issubclass(type(one), kind)]


def _of_megatron(optimizer: Any, wrappers: Iterable[Any]) -> Training:
    """The outermost optimizer of Megatron around another one, if there is one."""
    from monitor.pytorch.frameworks.megatron import MasterWeights, torch_optimizers

    around = [(torch_optimizers(one), one) for one in wrappers]
    around = [(inside, one) for inside, one in around if any(optimizer is stepped for stepped in inside)]
    if not around:
        return trained_by(optimizer)
    inside, outermost = max(around, key=lambda found: len(found[0]))
    return Training(outermost, MasterWeights(outermost).parameters, inside)
