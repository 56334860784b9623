"""Reads a configuration file into a ``MonitorConfig``, or raises a ``ConfigError`` that explains every problem."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from monitor.config.jsonc import Document, JsonError, Path, explain, parse, path_text, shown
from monitor.config.model import HISTOGRAM_FORMATS, MonitorConfig
from monitor.failures import LOGGER
from monitor.formats import FORMATS

# --- Accepts fields and values of other tools' configurations, with a warning for each.


def without(fields: Mapping[str, Any], unused: Collection[Path], below: Path = ()) -> tuple[dict[str, Any], list[Path]]:
    """A copy of ``fields`` without the paths in ``unused``, and the paths that were left out.

    Args:
        below: The path of ``fields``.
    """
    left: dict[str, Any] = {}
    found: list[Path] = []
    for name, value in fields.items():
        path = (*below, name)
        if path in unused:
            found.append(path)
        elif isinstance(value, dict):
            left[name], deeper = without(value, unused, path)
            found += deeper
        else:
            left[name] = value
    return left, found


def unused_warning(found: Collection[Path]) -> str:
    """The warning about fields that have no effect."""
    names = ", ".join(path_text(path) for path in found)
    return f"{names}: the monitor does not use these fields, and ignores them."


# --- Values from documents of the replaced tool that the strict model rejects. A value with one clear meaning is
# accepted, with a warning that names the line, the field and the value used instead. A possible typing error stays an error.

DEFAULT_FORMAT: Final = "csv"

NULL_MEANS_DEFAULT: Final = (
    ("targets",),
    ("cc_distribution",),
    ("cc_distribution", "cc_codeline"),
    ("alert",),
    ("alert", "rules"),
    ("format",),
    ("ops",),
    ("eps",),
    ("ndigits",),
    ("append_output",),
    ("l2_targets",),
    ("l2_targets", "attention_hook"),
    ("sa_order",),
)
"""Fields that may be ``null`` in the replaced tool or in its templates. Switches and numbers of steps are excluded:
``"wg_distribution": null`` does not say whether to record.
"""

WHOLE_NUMBERS: Final = tuple(name for name, field in MonitorConfig.model_fields.items() if field.annotation is int)
"""Integer fields. ``1e8`` is accepted, although JSON reads it as a float; ``1.0`` is an error."""

Warn = Callable[[Path, str], None]


def tolerated(document: Document, text: str) -> tuple[dict[str, Any], list[str]]:
    """The fields in a form that the model accepts, and a warning for each change.

    Args:
        document: The parsed ``text``, an object.
    """
    fields = _copied(document.value)
    warnings: list[tuple[int, str]] = []

    def warn(path: Path, said: str) -> None:
        line = document.lines.get(path, 0)
        where = f"line {line}: " if line else ""
        warnings.append((line, f"{where}{path_text(path)}: {said}"))

    _leave_out_nulls(fields, warn)
    _read_exponents(fields, document, text, warn)
    _choose_formats(fields, warn)
    _close_up_order(fields, warn)
    _leave_out_histograms(fields, warn)
    return fields, [said for _, said in sorted(warnings)]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _leave_out_nulls(fields: dict[str, Any], warn: Warn) -> None:
    for path in NULL_MEANS_DEFAULT:
        holder = _holder(fields, path)
        if path[-1] in holder and holder[path[-1]] is None:
            del holder[path[-1]]
            warn(path, "null means not set. The default is used.")
    rules = _holder(fields, ("alert", "rules")).get("rules")
    for index, rule in enumerate(rules if isinstance(rules, list) else ()):
        if isinstance(rule, dict) and "args" in rule and rule["args"] is None:
            del rule["args"]
            warn(("alert", "rules", index, "args"), "null means no arguments.")


def _holder(fields: dict[str, Any], path: Path) -> dict[Any, Any]:
    """The object that contains the field at ``path``; an empty object if there is none."""
    holder: Any = fields
    for step in path[:-1]:
        holder = holder.get(step) if isinstance(holder, dict) else None
    return holder if isinstance(holder, dict) else {}


def _read_exponents(fields: dict[str, Any], document: Document, text: str, warn: Warn) -> None:
    for name in WHOLE_NUMBERS:
        value = fields.get(name)
        if not isinstance(value, float) or not value.is_integer():
            continue
        start, end = document.spans.get((name,), (0, 0))
        if "e" in text[start:end].lower():
            fields[name] = int(value)
            warn((name,), f"{text[start:end]} is read as the integer {int(value)}.")


def _choose_formats(fields: dict[str, Any], warn: Warn) -> None:
    """Leave out unknown formats; if none is left, use ``csv``."""
    asked = fields.get("format")
    names = [asked] if isinstance(asked, str) else asked
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    if unknown := [name for name in names if name not in tuple(FORMATS)]:
        known = [name for name in names if name in tuple(FORMATS)] or [DEFAULT_FORMAT]
        fields["format"] = known
        said = f"{', '.join(map(shown, unknown))} is not a known format. Written instead: {', '.join(known)}."
        warn(("format",), f"{said} Known formats: {', '.join(FORMATS)}.")


def _close_up_order(fields: dict[str, Any], warn: Warn) -> None:
    order = fields.get("sa_order")
    if isinstance(order, str) and (closed := "".join(order.split())) != order:
        fields["sa_order"] = closed
        warn(("sa_order",), f"{shown(order)} is read as {shown(closed)}.")


def _leave_out_histograms(fields: dict[str, Any], warn: Warn) -> None:
    if fields.get("ur_distribution") is not True or not HISTOGRAM_FORMATS.isdisjoint(_formats(fields)):
        return
    fields["ur_distribution"] = False
    needed = " or ".join(f'"{name}"' for name in FORMATS if name in HISTOGRAM_FORMATS)
    warn(("ur_distribution",), f"histograms need {needed} among the formats. No histograms are recorded; everything else is.")


def _formats(fields: Mapping[str, Any]) -> list[str]:
    asked = fields.get("format", DEFAULT_FORMAT)
    names = asked if isinstance(asked, list) else [asked]
    return [name for name in names if isinstance(name, str)]


DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"

GIVEN: Final = "configuration"
"""The name of a configuration that is no file, in messages."""

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
    return _usable(name, _parsed(name, text), text, dynamic=dynamic)


def fields_in(path: str) -> dict[str, Any]:
    """The fields of a configuration file, as they stand there.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    fields: dict[str, Any] = _parsed(path, decoded(path, content_of(path))).value
    return fields


def config_of(given: Mapping[str, Any] | MonitorConfig) -> MonitorConfig:
    """Validate a configuration that is no file.

    Args:
        given: The names and values of a file, as ``json.loads`` gives them, or what was read from one.

    Raises:
        ConfigError: As ``load_config``. Dynamic monitoring is on, which follows a file.
    """
    if is_dynamic(GIVEN):
        raise unusable(GIVEN, f"{DYNAMIC_VARIABLE} follows the changes of a file: pass the path of one, or unset the variable")
    if not isinstance(given, MonitorConfig):
        return _usable(GIVEN, Document(dict(given), {}, {}), "", dynamic=False)
    if problems := _unfit(given, dynamic=False):
        raise unusable(GIVEN, *problems)
    return given


def configuration_of(given: str | os.PathLike[str] | Mapping[str, Any] | MonitorConfig) -> tuple[MonitorConfig, str, bool]:
    """The configuration, the path of its file if it has one, and whether changes of the file are followed.

    Raises:
        ConfigError: It cannot be used.
    """
    if isinstance(given, (MonitorConfig, Mapping)):
        return config_of(given), "", False
    if not isinstance(given, (str, bytes, os.PathLike)):
        raise ConfigError(f"config_file_path is {given!r}: expected the path of a JSON file, or a dictionary of its fields")
    config, path = load_config(given), _path_text(given)
    return config, path, is_dynamic(path)


def _path_text(path: str | os.PathLike[str]) -> str:
    """The absolute path, as valid text: bytes that are not text are escaped."""
    return os.path.abspath(os.path.expanduser(os.fsdecode(path))).encode("utf-8", "backslashreplace").decode()


def _usable(name: str, document: Document, text: str, *, dynamic: bool) -> MonitorConfig:
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
    if config.on_alert is not None and not config.checks_replicas and not config.alert.rules:
        problems.append("on_alert: no alert can fire, alert.rules is empty and replica_check is off")
    if dynamic and config.print_struct:
        problems.append(f"print_struct: {_ENDS}")
    if dynamic and config.cc_distribution.enable and config.cc_distribution.cc_log_only:
        problems.append(f"cc_distribution.cc_log_only: {_ENDS}")
    if config.on_alert is not None and not problems:
        problems += [f"on_alert.set: {problem}" for problem in _problems_of_closer_look(config)]
    return problems


def _problems_of_closer_look(config: MonitorConfig) -> list[str]:
    """Problems of the configuration that an alert switches to. It must be usable before the first alert."""
    fields = {**config.model_dump(mode="json"), **config.changes_on_alert()}
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
