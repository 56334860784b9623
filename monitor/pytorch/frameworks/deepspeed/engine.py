"""Which engine of DeepSpeed trains a model. Nothing of DeepSpeed is imported: what is in use has been."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from monitor.pytorch.place import group_ranks
from monitor.recording.protocols import MAX_WRAPPERS
from monitor.series import Ranks, ranks_of

DEFINES_ENGINE: Final = "deepspeed.runtime.engine"


def engine_class() -> Any:
    """The class of all engines; None where DeepSpeed is not in use."""
    return getattr(sys.modules.get(DEFINES_ENGINE), "DeepSpeedEngine", None)


def engine_of(chunks: Sequence[nn.Module], optimizer: Any) -> Any:
    """The engine that trains ``chunks``, which may be the engine or the module that was given to it.

    Returns:
        None where it is not DeepSpeed that trains them.

    Raises:
        ValueError: It is, and the engine cannot be found, or there are several.
    """
    of = engine_class()
    if of is None:
        return None
    modules = (module for chunk in chunks for module in chunk.modules())
    found = {id(one): one for part in (*modules, *_wrappers(optimizer)) for one in _engines_behind(part, of)}
    if len(found) > 1:
        raise ValueError("model and optimizer belong to several engines of DeepSpeed: call set_monitor once for each engine.")
    if not found and (any(map(_is_deepspeeds, _wrappers(optimizer))) or _is_partitioned(chunks)):
        raise ValueError(
            "The model is trained by DeepSpeed, and its engine cannot be found: call set_monitor after deepspeed.initialize, "
            "and pass the engine that it returned as the model."
        )
    return next(iter(found.values()), None)


def ranks_in(group: Any) -> Ranks:
    """The ranks of a process group as DeepSpeed keeps it."""
    return ranks_of(group_ranks("a process group of DeepSpeed", group) or ())


def _engines_behind(part: Any, of: type) -> Iterator[Any]:
    if isinstance(part, of):
        yield part
    # An engine prepares each forward of its module by a hook, and the module does not know it otherwise.
    for hook in part._forward_pre_hooks.values() if isinstance(part, nn.Module) else ():
        if getattr(hook, "__module__", None) == DEFINES_ENGINE:
            yield from (cell.cell_contents for cell in hook.__closure__ or () if isinstance(cell.cell_contents, of))


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """What a user passed, and what it wraps, down to the torch optimizer."""
    for _ in range(MAX_WRAPPERS):
        if optimizer is None or isinstance(optimizer, Optimizer):
            return
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _is_deepspeeds(wrapper: Any) -> bool:
    return type(wrapper).__module__.partition(".")[0] == "deepspeed"


def _is_partitioned(chunks: Sequence[nn.Module]) -> bool:
    """Whether ZeRO has taken over parameters, and not been destroyed since."""
    parameters = (p for chunk in chunks for p in chunk.parameters())
    return any(hasattr(p, "ds_id") or getattr(p, "_hp_mapping", None) is not None for p in parameters)
