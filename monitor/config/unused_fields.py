"""Fields of other tools' configurations that the monitor knows by name and has no use for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from monitor.config.errors import shown, spelled
from monitor.config.errors import spelled as path_text
from monitor.config.jsonc import Document, Path
from monitor.config.model import HISTOGRAM_FORMATS, MonitorConfig
from monitor.formats import FORMATS


def without(fields: Mapping[str, Any], unused: Collection[Path], below: Path = ()) -> tuple[dict[str, Any], list[Path]]:
    """The fields without those at the paths in ``unused``, and the paths that were there. ``fields`` stays as it is.

    Args:
        below: Where ``fields`` stand.
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


def said_of(found: Collection[Path]) -> str:
    """What to warn of, where there are any."""
    names = ", ".join(spelled(path) for path in found)
    return f"{names}: known and not used here, so without effect."


# --- What the documents of the tool this one replaces write into a configuration, and the strict model does not take.
#
# Each of these has one meaning, so it is accepted, with a warning that names the line, the field and what is used
# instead. What could have been a slip of the hand stays an error.

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
"""Fields of the original that may be ``null`` there, or that a template leaves ``null``. A switch or a number of steps is not
among them: ``"wg_distribution": null`` does not say whether to record.
"""

WHOLE_NUMBERS: Final = tuple(name for name, field in MonitorConfig.model_fields.items() if field.annotation is int)
"""Fields that hold an integer. ``1e8`` is one, though JSON reads it as a number with decimals; ``1.0`` is an error."""

Warn = Callable[[Path, str], None]


def tolerated(document: Document, text: str) -> tuple[dict[str, Any], list[str]]:
    """The fields as the model takes them, and a warning for everything that was changed.

    Args:
        document: What ``text`` holds, an object.
    """
    fields = _copied(document.value)
    warnings: list[tuple[int, str]] = []

    def warn(path: Path, said: str) -> None:
        line = document.lines.get(path, 0)
        warnings.append((line, f"line {line}: {path_text(path)}: {said}"))

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
            warn(path, "null is taken as not set, and the default is used.")
    rules = _holder(fields, ("alert", "rules")).get("rules")
    for index, rule in enumerate(rules if isinstance(rules, list) else ()):
        if isinstance(rule, dict) and "args" in rule and rule["args"] is None:
            del rule["args"]
            warn(("alert", "rules", index, "args"), "null is taken as no arguments.")


def _holder(fields: dict[str, Any], path: Path) -> dict[Any, Any]:
    """The object that the field at ``path`` would stand in; an empty one where there is none."""
    holder: Any = fields
    for step in path[:-1]:
        holder = holder.get(step) if isinstance(holder, dict) else None
    return holder if isinstance(holder, dict) else {}


def _read_exponents(fields: dict[str, Any], document: Document, text: str, warn: Warn) -> None:
    for name in WHOLE_NUMBERS:
        value = fields.get(name)
        if not isinstance(value, float) or not value.is_integer():
            continue
        start, end = document.spans[(name,)]
        if "e" in text[start:end].lower():
            fields[name] = int(value)
            warn((name,), f"{text[start:end]} is taken as the integer {int(value)}.")


def _choose_formats(fields: dict[str, Any], warn: Warn) -> None:
    """An unknown format is left out; where none is left, ``csv`` takes its place."""
    asked = fields.get("format")
    names = [asked] if isinstance(asked, str) else asked
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    if unknown := [name for name in names if name not in tuple(FORMATS)]:
        known = [name for name in names if name in tuple(FORMATS)] or [DEFAULT_FORMAT]
        fields["format"] = known
        said = f"{', '.join(map(shown, unknown))} is not a format that can be written. Used: {', '.join(known)}."
        warn(("format",), f"{said} There are {', '.join(FORMATS)}.")


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
    warn(("ur_distribution",), f"histograms need {needed} among the formats. They are left out, the rest is recorded.")


def _formats(fields: Mapping[str, Any]) -> list[str]:
    asked = fields.get("format", DEFAULT_FORMAT)
    names = asked if isinstance(asked, list) else [asked]
    return [name for name in names if isinstance(name, str)]
