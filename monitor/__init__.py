"""A lightweight monitor for the training state of large models. ``watch``, ``monitor.pytorch`` and ``monitor.mindspore`` attach
it.

The other names below read what was recorded. Each is imported at its first use: ``import monitor`` alone imports no library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from monitor.attaching import watch
    from monitor.config import ConfigError, MonitorConfig, load_config
    from monitor.coordinator.manifest_format import ManifestError, read_manifest
    from monitor.coordinator.series_file import read_series
    from monitor.dump import load_tensor
    from monitor.merge.outputs import read_merged
    from monitor.query.opened import OpenedRun, open_run
    from monitor.query.sources import QueryError
    from monitor.sinks.csv import read_csv
    from monitor.sinks.hdf5 import read_hdf5

    __version__: str

__all__ = [
    "ConfigError",
    "ManifestError",
    "MonitorConfig",
    "OpenedRun",
    "QueryError",
    "__version__",
    "load_config",
    "load_tensor",
    "open_run",
    "read_csv",
    "read_hdf5",
    "read_manifest",
    "read_merged",
    "read_series",
    "watch",
]

_MODULES: Final = {
    "ConfigError": "monitor.config",
    "ManifestError": "monitor.coordinator.manifest_format",
    "MonitorConfig": "monitor.config",
    "OpenedRun": "monitor.query.opened",
    "QueryError": "monitor.query.sources",
    "load_config": "monitor.config",
    "load_tensor": "monitor.dump",
    "open_run": "monitor.query.opened",
    "read_csv": "monitor.sinks.csv",
    "read_hdf5": "monitor.sinks.hdf5",
    "read_manifest": "monitor.coordinator.manifest_format",
    "read_merged": "monitor.merge.outputs",
    "read_series": "monitor.coordinator.series_file",
    "watch": "monitor.attaching",
}

_NOT_INSTALLED: Final = "0+not.installed"
"""The version of a source tree that is only on the path: a valid version, older than any release."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    """The version that ``pyproject.toml`` gave the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trainermon")
    except PackageNotFoundError:
        return _NOT_INSTALLED
