"""From a file to a ``MonitorConfig``, or to one clear message that says why not."""

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
"""Far above any configuration, and far below a checkpoint whose path was given by mistake."""


_ENDS: Final = f"it ends the run after its first step, unset {DYNAMIC_VARIABLE} to use it"


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the file, every problem and what would be right."""


def load_config(path: str | os.PathLike[str]) -> MonitorConfig:
    """Read a configuration file: JSON, in which comments and trailing commas are welcome.

    Args:
        path: A leading ``~`` is the home directory.

    Raises:
        ConfigError: The file cannot be read, is not JSON, does not fit the model, or asks for what is not built yet. What the
            documents of the original write, and the model does not take, is accepted with a warning (``tolerated``).
    """
    name = os.path.expanduser(os.fsdecode(path))
    return config_in(name, content_of(name), dynamic=is_dynamic(name))


def config_in(name: str, content: bytes, *, dynamic: bool) -> MonitorConfig:
    """The configuration that ``content`` spells.

    Args:
        name: Of the file that it was read from, for the messages.
        dynamic: Whether it is for dynamic monitoring.

    Raises:
        ConfigError: As ``load_config``, except that the file was read.
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
    """What a configuration file holds. Raises ``ConfigError`` where it cannot be read, or is larger than any configuration."""
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
        raise unusable(name, f"more than {MAX_FILE_BYTES} bytes are no configuration")
    return content


def decoded(name: str, content: bytes) -> str:
    """The text of a configuration file. Raises ``ConfigError`` where it is none."""
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
    """What goes with dynamic monitoring alone, and what does not go with it."""
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
    """What an alert would lead to has to be usable before there is one."""
    fields = {**config.model_dump(mode="json"), **wanted.model_dump(mode="json")["set"]}
    try:
        closer = MonitorConfig.model_validate(fields)
    except ValidationError as error:
        return explain(MonitorConfig, error, {})
    return _unfit(closer.model_copy(update={"on_alert": None}), dynamic=True)


def is_dynamic(name: str) -> bool:
    """Whether the environment asks for dynamic monitoring. Anything but a plain yes or no would have to be guessed.

    Raises:
        ConfigError: It says neither; ``name`` is that of the file for which it was asked.
    """
    said = os.environ.get(DYNAMIC_VARIABLE, "")
    if said.lower() not in ("", "true", "false"):
        raise unusable(name, f"environment variable {DYNAMIC_VARIABLE}: {shown(said)} is not allowed: expected True or False")
    return said.lower() == "true"


def unusable(name: str, *problems: str) -> ConfigError:
    """What to raise: one problem makes one line, several are listed below the file's name."""
    return ConfigError(_listed(name, problems, "several problems"))


def _listed(name: str, sentences: Sequence[str], heading: str = "accepted, but look at this") -> str:
    text = sentences[0] if len(sentences) == 1 else "\n  ".join([heading, *sentences])
    # A file name may hold bytes that are not text, a message may not.
    return f"{name.encode('utf-8', 'backslashreplace').decode()}: {text}"
