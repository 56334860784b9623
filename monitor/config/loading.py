"""Reads a configuration file into a ``MonitorConfig``, or raises a ``ConfigError`` that explains every problem."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from monitor.config.errors import explain, shown
from monitor.config.jsonc import Document, JsonError, Path, parse
from monitor.config.model import MonitorConfig, OnAlert
from monitor.config.unused_fields import tolerated
from monitor.failures import LOGGER

DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"

MAX_FILE_BYTES: Final = 4 << 20
"""Far larger than any configuration, and far smaller than a checkpoint whose path was passed by mistake."""


_ENDS: Final = f"it ends the run after its first step, unset {DYNAMIC_VARIABLE} to use it"


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the file, every problem and the allowed values."""


def load_config(path: str | os.PathLike[str]) -> MonitorConfig:
    """Read a configuration file: JSON, in which comments and trailing commas are allowed.

    Args:
        path: A leading ``~`` is the home directory.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or has fields or values that are not allowed. Some values that
            documents of other tools use are accepted with a warning (``tolerated``).
    """
    name = os.path.expanduser(os.fsdecode(path))
    return config_in(name, content_of(name), dynamic=is_dynamic(name))


def config_in(name: str, content: bytes, *, dynamic: bool) -> MonitorConfig:
    """Parse and validate the content of a configuration file.

    Args:
        name: Name of the file, for messages.
        dynamic: Whether the configuration is for dynamic monitoring.

    Raises:
        ConfigError: As ``load_config``, except for errors of reading the file.
    """
    text = decoded(name, content)
    document = _parsed(name, text)
    fields, warnings = tolerated(document, text)
    config = _validated(name, fields, document.lines)
    if problems := _unfit(config, dynamic=dynamic):
        raise unusable(name, *problems)
    if warnings:
        LOGGER.warning("%s", _listed(name, warnings))
    return config


def content_of(name: str, expected: str = "a JSON file") -> bytes:
    """The content of a configuration file. Raises ``ConfigError`` if it cannot be read or has more than ``MAX_FILE_BYTES``."""
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise unusable(os.path.abspath(name), "there is no such file") from None
    except IsADirectoryError:
        raise unusable(name, f"it is a directory, expected {expected}") from None
    except OSError as error:
        raise unusable(name, f"it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise unusable(name, f"it is not a path: {error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise unusable(name, f"it has more than {MAX_FILE_BYTES} bytes, which is too large for a configuration")
    return content


def decoded(name: str, content: bytes) -> str:
    """The text of a configuration file. Raises ``ConfigError`` if it is not UTF-8."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise unusable(name, f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8, save the file as UTF-8") from None


def _parsed(name: str, text: str) -> Document:
    try:
        document = parse(text)
    except JsonError as error:
        raise unusable(name, f"line {error.line}, column {error.column}: {error}") from None
    if not isinstance(document.value, dict):
        raise unusable(name, f"expected an object in braces, found {shown(document.value)}")
    return document


def _validated(name: str, fields: Mapping[str, Any], lines: Mapping[Path, int]) -> MonitorConfig:
    try:
        return MonitorConfig.model_validate(fields)
    except ValidationError as error:
        raise unusable(name, *explain(MonitorConfig, error, lines)) from None


def _unfit(config: MonitorConfig, *, dynamic: bool) -> list[str]:
    """Problems of fields that need dynamic monitoring, or exclude it."""
    problems = []
    if config.on_alert is not None and not dynamic:
        problems.append(f"on_alert: it changes what is monitored while training runs, which needs {DYNAMIC_VARIABLE}=True")
    if config.on_alert is not None and not config.alert.rules:
        problems.append("on_alert: no alert can fire, alert.rules is empty")
    if dynamic and config.print_struct:
        problems.append(f"print_struct: {_ENDS}")
    if dynamic and config.cc_distribution.enable and config.cc_distribution.cc_log_only:
        problems.append(f"cc_distribution.cc_log_only: {_ENDS}")
    if config.on_alert is not None and not problems:
        problems += [f"on_alert.set: {problem}" for problem in _problems_of_closer_look(config, config.on_alert)]
    return problems


def _problems_of_closer_look(config: MonitorConfig, wanted: OnAlert) -> list[str]:
    """Problems of the configuration that an alert switches to. It must be usable before the first alert."""
    fields = {**config.model_dump(mode="json"), **wanted.model_dump(mode="json")["set"]}
    try:
        closer = MonitorConfig.model_validate(fields)
    except ValidationError as error:
        return explain(MonitorConfig, error, {})
    return _unfit(closer.model_copy(update={"on_alert": None}), dynamic=True)


def is_dynamic(name: str) -> bool:
    """Whether the environment variable enables dynamic monitoring.

    Raises:
        ConfigError: The variable is neither true nor false. ``name`` is the file that the message names.
    """
    said = os.environ.get(DYNAMIC_VARIABLE, "")
    if said.lower() not in ("", "true", "false"):
        raise unusable(name, f"environment variable {DYNAMIC_VARIABLE}: {shown(said)} is not allowed: expected True or False")
    return said.lower() == "true"


def unusable(name: str, *problems: str) -> ConfigError:
    """The error to raise: one line for one problem; several problems are listed below the file's name."""
    return ConfigError(_listed(name, problems, "several problems"))


def _listed(name: str, sentences: Sequence[str], heading: str = "accepted with changes") -> str:
    text = sentences[0] if len(sentences) == 1 else "\n  ".join([heading, *sentences])
    # A file name may contain bytes that are not text, a message may not.
    return f"{name.encode('utf-8', 'backslashreplace').decode()}: {text}"
