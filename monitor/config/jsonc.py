"""Parses JSON configurations: comments and trailing commas are allowed, everything else is strict.

Stricter than the standard parser: repeated names in an object, ``NaN``, numbers beyond a float64, halves of surrogate pairs
and deep nesting are errors. Every error has the line and column in the file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final, NoReturn

Path = tuple[str | int, ...]
"""The position of a value: the names and indices that lead to it."""

MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 400

SPACE_OR_COMMENT: Final = re.compile(r"[ \t\r\n]+|//[^\n]*|/\*[\s\S]*?\*/")


class JsonError(ValueError):
    """The text is not JSON.

    Attributes:
        line: Counted from 1.
        column: Counted from 1, in characters.
    """

    def __init__(self, message: str, text: str, at: int) -> None:
        super().__init__(message)
        self.line = text.count("\n", 0, at) + 1
        self.column = at - text.rfind("\n", 0, at)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file.

    Attributes:
        value: The content, in the types of ``json.loads``.
        lines: The line of every name and list element, by path.
        spans: The index of every value's first character and the index after its last, by path.
    """

    value: Any
    lines: dict[Path, int]
    spans: dict[Path, tuple[int, int]]


def parse(text: str) -> Document:
    """Parse a whole file.

    Raises:
        JsonError: The text is not valid by the rules of this module.
    """
    return _Parser(text).document()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[Path, int] = {}
        self._spans: dict[Path, tuple[int, int]] = {}
        self._counted = (0, 1)
        self._scalars = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_refused)

    def document(self) -> Document:
        value = self._value(())
        if self._next():
            self._fail("unexpected text after the end of the JSON value")
        return Document(value, self._lines, self._spans)

    def _value(self, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            self._fail(f"nested more than {MAX_DEPTH} levels deep")
        opening, start = self._next(), self._at
        value: Any
        if opening == "{":
            value = self._object(path)
        elif opening == "[":
            value = self._list(path)
        else:
            value = self._scalar()
        self._spans[path] = (start, self._at)
        return value

    def _object(self, path: Path) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._another_item("}", first=not members):
            name = self._name(members)
            self._lines[(*path, name)] = self._line()
            if self._next() != ":":
                self._fail('expected ":" after the name')
            self._at += 1
            members[name] = self._value((*path, name))
        return members

    def _list(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while self._another_item("]", first=not items):
            place = (*path, len(items))
            self._lines[place] = self._line()
            items.append(self._value(place))
        return items

    def _another_item(self, closing: str, *, first: bool) -> bool:
        """Skip the opening bracket or the comma. Whether an item follows; if not, the closing bracket is skipped as well."""
        if first or self._next() == ",":
            self._at += 1
        elif self._next() != closing:
            self._fail(f'expected "," or "{closing}"')
        if self._next() != closing:
            return True
        self._at += 1
        return False

    def _name(self, members: dict[str, Any]) -> str:
        if self._next() != '"':
            self._fail("expected a name in double quotes")
        start = self._at
        name: str = self._scalar()
        if name in members:
            self._fail(f"{json.dumps(name)} occurs twice in the same object", start)
        return name

    def _scalar(self) -> Any:
        try:
            value, end = self._scalars.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._fail(error.msg, error.pos)
        except ValueError as error:
            self._fail(str(error))
        if isinstance(value, str) and not _is_unicode(value):
            self._fail("the string contains half of a surrogate pair")
        self._at = end
        return value

    def _next(self) -> str:
        """The next character after spaces and comments; "" at the end."""
        while skipped := SPACE_OR_COMMENT.match(self._text, self._at):
            self._at = skipped.end()
        if self._text.startswith("/*", self._at):
            self._fail("the comment that begins here is never closed")
        return self._text[self._at : self._at + 1]

    def _line(self) -> int:
        """The line of the current position, counted from the previous call's position."""
        at, line = self._counted
        self._counted = (self._at, line + self._text.count("\n", at, self._at))
        return self._counted[1]

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        raise JsonError(message, self._text, self._at if at is None else at) from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the number has {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("the number is too large for a float64")
    return number


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
