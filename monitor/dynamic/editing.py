"""One value of a configuration file changed in its text, and nothing else: comments, order, spacing and newlines stay."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from monitor.config.errors import shown, spelled
from monitor.config.jsonc import SPACE_OR_COMMENT, Document, Path, parse

_STEP: Final = re.compile(r'\.([A-Za-z_][A-Za-z0-9_]*)|\[(0|[1-9][0-9]{0,8})\]|\[("(?:[^"\\]|\\.)*")\]')
_REST_OF_LINE: Final = re.compile(r"(?:[ \t]+|/\*[\s\S]*?\*/|//[^\n]*)*")
_NEWLINE: Final = re.compile(r"\r?\n")


class EditError(ValueError):
    """The value cannot be put there. The message says why."""


def path_of(key: str) -> Path:
    """The path that people write: ``alert.rules[0].rule_name``, ``targets["h.0.mlp"].input``.

    Raises:
        EditError: It is none.
    """
    path: list[str | int] = []
    text, at = f".{key}", 0
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None or (not path and step[1] is None):
            raise EditError(f'{key!r} names no field: write it like format, alert.dump or targets["h.0.mlp"].input')
        path.append(step[1] or (int(step[2]) if step[2] else json.loads(step[3])))
        at = step.end()
    return tuple(path)


def edited(text: str, path: Path, value: Any) -> str:
    """``text`` with ``value`` at ``path``: in place of what stands there, or as the last member of the object around it.

    Args:
        text: A file as ``monitor.config.jsonc`` parses it.
        value: In the types of ``json.loads``.

    Raises:
        JsonError: ``text`` is not JSON.
        EditError: What it would belong to is no object, or no element of the list.
    """
    document = parse(text)
    if path in document.spans:
        start, end = document.spans[path]
        return text[:start] + _spelled(value) + text[end:]
    around = _innermost(document, path)
    for name in reversed(path[len(around) + 1 :]):
        value = {name: value}
    return _with_member(text, document, around, f"{_spelled(path[len(around)])}: {_spelled(value)}")


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _innermost(document: Document, path: Path) -> Path:
    """The object of the file that is to get a new member. Raises ``EditError``."""
    around = next(path[:end] for end in range(len(path) - 1, -1, -1) if path[:end] in document.spans)
    held = document.value
    for step in around:
        held = held[step]
    if not isinstance(held, dict):
        where = spelled(around) if around else "the file"
        raise EditError(f"{spelled(path)} cannot be set: {where} is {shown(held)}, which is no object with fields")
    if numbers := [step for step in path[len(around) :] if isinstance(step, int)]:
        raise EditError(f"{spelled(path)} cannot be set: there is no element {numbers[0]}; set the whole list")
    return around


def _with_member(text: str, document: Document, around: Path, member: str) -> str:
    members = [span for path, span in document.spans.items() if len(path) == len(around) + 1 and path[:-1] == around]
    start, _ = document.spans[around]
    if not members:
        return text[: start + 1] + member + text[start + 1 :]
    last = max(members)[1]
    comma = _comma_after(text, last)
    line_end = _end_of_line(text, comma or last)
    indent = _indent_of_members(text, start, members)
    if line_end is None or indent is None:  # all on one line
        at = comma or last
        return f"{text[:at]}{'' if comma else ','} {member}{',' if comma else ''}{text[at:]}"
    newline = "\r\n" if text.startswith("\r\n", line_end) else "\n"
    before = text[: comma or last] + ("" if comma else ",") + text[comma or last : line_end]
    return f"{before}{newline}{indent}{member}{',' if comma else ''}{text[line_end:]}"


def _comma_after(text: str, at: int) -> int | None:
    """Behind the comma that follows; None where the object ends without one."""
    while skipped := SPACE_OR_COMMENT.match(text, at):
        at = skipped.end()
    return at + 1 if text.startswith(",", at) else None


def _end_of_line(text: str, at: int) -> int | None:
    """Before the newline that follows, with nothing but a comment in between; None where something else follows first."""
    rest = _REST_OF_LINE.match(text, at)
    end = at if rest is None else rest.end()
    if text.startswith("\n", end) and text.startswith("\r", end - 1) and end > at:
        end -= 1  # a comment took the first half of the newline
    return end if _NEWLINE.match(text, end) else None


def _indent_of_members(text: str, start: int, members: list[tuple[int, int]]) -> str | None:
    """The white space before the last member that begins a line; None where none does."""
    for at, _ in sorted(members, reverse=True):
        line = text[text.rfind("\n", start, at) + 1 : at]
        if "\n" in text[start:at] and (found := re.match(r'([ \t]*)"', line)):
            return found[1]
    return None
