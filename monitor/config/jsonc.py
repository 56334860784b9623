"""Parses JSON configurations: comments and trailing commas are allowed, everything else is strict.

Stricter than the standard parser: repeated names in an object, ``NaN``, numbers beyond a float64, halves of surrogate pairs
and deep nesting are errors. Every error has the line and column in the file.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pydantic import BaseModel, ValidationError

Path = tuple[str | int, ...]
"""The position of a value: the names and indices that lead to it."""

MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 400

SPACE_OR_COMMENT: Final = re.compile(r"[ \t\r\n]+|//[^\n]*|/\*[\s\S]*?\*/")


_WORD: Final = re.compile(r"[A-Za-z]+")
_OF_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
"""Values of Python, and what JSON has in their place."""


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
            found = _WORD.match(self._text, error.pos)
            known = _OF_PYTHON.get(found[0]) if found else None
            self._fail(f"{error.msg}. In JSON, it is {known}, in lower case" if known else error.msg, error.pos)
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


# --- Messages for users about errors in a configuration: line, field, value and what is allowed.

# --- The allowed values of a field, in words, from the model's JSON schema: for error messages and the documentation.

SchemaNode = Mapping[str, Any]
"""A JSON schema of one value."""

_NOUNS: Final = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "null": "null",
}


class FieldSchema:
    """Looks up parts of a model's schema by path."""

    def __init__(self, model: type[BaseModel]) -> None:
        schema = model.model_json_schema()
        self._definitions: SchemaNode = schema.get("$defs", {})
        self.root: SchemaNode = schema

    @property
    def documented(self) -> str:
        """The page that lists all fields."""
        return str(self.root.get("documented", "docs/configuration.md"))

    def at(self, path: Path) -> SchemaNode:
        """The schema of the value at a path; empty if the model has no such path."""
        node = self.root
        for step in path:
            node = self._below(self.resolved(node), step)
        return node

    def fields(self, path: Path) -> dict[str, SchemaNode]:
        """The fields of the object at a path; empty if it is no object with fields."""
        return dict(self.resolved(self.at(path)).get("properties", {}))

    def resolved(self, node: SchemaNode) -> SchemaNode:
        """The schema with references resolved; for an optional value, the schema of the value that is not null."""
        for option in node.get("anyOf", node.get("allOf", ())):
            if option.get("type") != "null":
                return self.resolved(option)
        if "$ref" in node:
            return self.resolved(self._definitions[node["$ref"].rsplit("/", 1)[1]])
        return node

    def _below(self, node: SchemaNode, step: str | int) -> SchemaNode:
        if isinstance(step, str) and step in node.get("properties", {}):
            below: SchemaNode = node["properties"][step]
            return below
        below = node.get("items" if isinstance(step, int) else "additionalProperties", {})
        return below if isinstance(below, Mapping) else {}

    def allowed(self, node: SchemaNode) -> str:
        """The allowed values of this schema, as a phrase to follow "expected"."""
        if "allowed" in node:
            return str(node["allowed"])
        if "anyOf" in node:
            return ", or ".join(self.allowed(option) for option in node["anyOf"])
        phrase = self._phrase(node)
        return f"{phrase}, or {node['or']}" if "or" in node else phrase

    def _phrase(self, node: SchemaNode) -> str:
        node = self.resolved(node)
        if "enum" in node:
            return one_of(json.dumps(choice) for choice in node["enum"])
        if node.get("type") == "object":
            return self._object(node)
        noun = _NOUNS.get(node.get("type", ""), "another value")
        if "items" in node:
            return f"{noun}, each item {self.allowed(node['items'])}"
        return noun + _bounds(node)

    def _object(self, node: SchemaNode) -> str:
        if "properties" not in node:
            return f"an object, each value {self.allowed(node['additionalProperties'])}"
        names = list(node["properties"])
        return "an object" if len(names) > 8 else f"an object with {one_of(names, 'and')}"


def one_of(choices: Iterable[str], conjunction: str = "or") -> str:
    *most, last = choices
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def _bounds(node: SchemaNode) -> str:
    if "exclusiveMinimum" in node:
        return f" above {_readable(node['exclusiveMinimum'])}"
    if "minimum" not in node:
        return ""
    if "maximum" not in node:
        return f", at least {_readable(node['minimum'])}"
    return f" from {_readable(node['minimum'])} to {_readable(node['maximum'])}"


def _readable(bound: float) -> str:
    """A bound as text: limits of machine integers as powers of two, and 0.0 as 0."""
    if bound != int(bound):
        return str(bound)
    power = int(bound).bit_length()
    return f"2^{power} - 1" if power >= 31 and bound == 2**power - 1 else str(int(bound))


MAX_PROBLEMS: Final = 20
MAX_VALUE_CHARACTERS: Final = 60
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,59}")


def explain(model: type[BaseModel], error: ValidationError, lines: Mapping[Path, int]) -> list[str]:
    """One sentence for each problem, in the order of the file's lines. Beyond ``MAX_PROBLEMS``: only how many there are.

    Args:
        model: The model that rejected the configuration.
        lines: The line of each value, by path, if known.
    """
    schema = _schema_of(model)
    problems = sorted(error.errors(include_url=False), key=lambda one: _line(lines, one["loc"]))
    said = [_numbered(lines, one["loc"], _sentence(schema, one)) for one in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        said.append(f"and {len(problems) - MAX_PROBLEMS} others")
    return said


def path_text(path: Path) -> str:
    """A path as text: ``alert.rules[0].rule_name``, ``targets["h.0.mlp"].input``."""
    text = ""
    for step in path:
        if isinstance(step, str) and _PLAIN_NAME.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text


def shown(value: Any) -> str:
    """A value as JSON, truncated to ``MAX_VALUE_CHARACTERS``."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 4] + " ..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``; None if none is similar."""
    matches = difflib.get_close_matches(name[:64].lower(), list(known), n=1, cutoff=0.7)
    return matches[0] if matches else None


@functools.cache
def _schema_of(model: type[BaseModel]) -> FieldSchema:
    """The schema of a model, built when the first error is explained: a valid configuration does not need it."""
    return FieldSchema(model)


def _sentence(schema: FieldSchema, problem: Mapping[str, Any]) -> str:
    path: Path = problem["loc"]
    if problem["type"] == "extra_forbidden":
        return _unknown(schema, path)
    if problem["type"] == "missing":
        return f"{path_text(path)} is missing: expected {schema.allowed(schema.at(path))}"
    own_words = problem.get("ctx", {}).get("error")
    reason = own_words or f"expected {schema.allowed(schema.at(path))}"
    return f"{path_text(path)}: {shown(problem['input'])} is not allowed: {reason}"


def _unknown(schema: FieldSchema, path: Path) -> str:
    known = schema.fields(path[:-1])
    near = nearest(str(path[-1]), known)
    if near is not None:
        advice = f"did you mean `{near}`?"
    elif len(known) <= 8:
        advice = f"known here are {one_of((f'`{name}`' for name in known), 'and')}"
    else:
        advice = f"{schema.documented} lists all fields"
    return f"{path_text(path)}: unknown field, {advice}"


def _line(lines: Mapping[Path, int], path: Path) -> int:
    """The line of a value; if it is not in the file, the line of the nearest enclosing value; 0 if none is known."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 0)


def _numbered(lines: Mapping[Path, int], path: Path, sentence: str) -> str:
    line = _line(lines, path)
    return f"line {line}: {sentence}" if line else sentence
