"""Messages for users about errors in a configuration: line, field, value and what is allowed."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from monitor.config.jsonc import Path

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
