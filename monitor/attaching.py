"""``watch``: attaches a monitor in one line, whatever the framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from monitor.config import MonitorConfig
from monitor.config.jsonc import nearest
from monitor.config.loading import ConfigError, config_of, fields_in

if TYPE_CHECKING:
    from monitor.recording.trainer_mon import ModelMonitor

HEALTH: Final = "health"

Configuration: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | MonitorConfig
"""What ``TrainerMon`` takes; a text may also be the name of a preset."""

_ROOMS: Final = {"torch": ("monitor.pytorch", "Module"), "mindspore": ("monitor.mindspore", "Cell")}
"""By framework: the package that monitors it, and the class of its models, in its package ``nn``."""


def watch(
    model: Any,
    optimizer: Any,
    preset: str | None = HEALTH,
    *,
    micro_batches: int | None = None,
    dp_group: Any = None,
    start_iteration: int = 0,
    **fields: Any,
) -> ModelMonitor:
    """Attach a monitor to a model of PyTorch or MindSpore, and to its optimizers.

    >>> monitor.watch(model, optimizer)  # doctest: +SKIP
    >>> monitor.watch(model, optimizer, None, wg_distribution=True, ops=["norm"])  # doctest: +SKIP

    Args:
        model: A module or cell, or the list of chunks of a virtual pipeline.
        optimizer: As for ``TrainerMon.set_monitor``.
        preset: A configuration that comes with the monitor (``configs/``), by name; None for none.
        micro_batches: How many a step has. By default the first step shows it, and has no rows if it has several.
        dp_group: The data-parallel group, if no wrapper of the model shows it, so that one of its ranks writes for all.
        start_iteration: Number of the first step.
        fields: Fields of the configuration, which replace those of the preset.

    Returns:
        The attached ``TrainerMon``, a context manager. Without references to it, it records as long as the model lives.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
        TypeError: ``model`` is of neither framework, or another argument has a wrong type.
        OutputError: The output directory cannot be created or written.
    """
    room = _room_of(model)
    config = configured(preset, fields)
    monitor: ModelMonitor = import_module(room).TrainerMon(config, params_have_main_grad=has_main_grad(model))
    monitor.watch(model, optimizer, micro_batches=micro_batches, dp_group=dp_group, start_iteration=start_iteration)
    return monitor


def configured(preset: str | None, fields: Mapping[str, Any]) -> MonitorConfig:
    """The configuration of a preset with some fields replaced. Errors and arguments are those of ``watch``."""
    return config_of({**({} if preset is None else preset_fields(preset)), **fields})


def named(given: Configuration) -> Configuration:
    """The fields of a preset if what is given looks like the name of one: no folder, no suffix, and no such file.

    Raises:
        ConfigError: There is no preset of this name.
    """
    if not isinstance(given, str):
        return given
    path = Path(given)
    is_name = path.name == given and not path.suffix and not path.exists()
    return preset_fields(given) if is_name else given


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a configuration that comes with the monitor.

    Raises:
        ConfigError: There is none of this name.
    """
    folder = _presets()
    known = sorted(path.stem.replace("_", "-") for path in folder.glob("*.json"))
    if not isinstance(name, str):
        raise TypeError(f"preset: expected a name or None, got {type(name).__name__}")
    asked = name.replace("_", "-")
    if asked not in known:
        near = nearest(asked, known)
        advice = "" if near is None else f": did you mean {near}?"
        raise ConfigError(f"preset: {name!r} is not one of {', '.join(known)}{advice}")
    return fields_in(str(folder / f"{asked.replace('-', '_')}.json"))


def _presets() -> Path:
    """In the installed package, or beside it in the sources."""
    package = Path(__file__).parent
    packaged = package / "config" / "presets"
    return packaged if packaged.is_dir() else package.parent / "configs"


def _room_of(model: Any) -> str:
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    for framework, (room, kind) in _ROOMS.items():
        if framework in sys.modules and isinstance(first, getattr(sys.modules[framework].nn, kind)):
            return room
    kinds = " or ".join(f"{framework}.nn.{kind}" for framework, (_, kind) in _ROOMS.items())
    raise TypeError(f"model: expected {kinds}, or a list of them, got {type(first).__name__}")


def has_main_grad(model: Any) -> bool:
    """Whether a parameter of a model, or of its chunks, has a gradient in ``main_grad``."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    return any(hasattr(parameter, "main_grad") for chunk in chunks for parameter in _parameters(chunk))


def _parameters(chunk: Any) -> Any:
    return chunk.parameters() if hasattr(chunk, "parameters") else ()
