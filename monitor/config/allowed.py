"""What a field allows, in words, read from the JSON schema of the model; for error messages and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from monitor.config.jsonc import Path

Node = Mapping[str, Any]
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
    """The schema of a model, asked by path."""

    def __init__(self, model: type[BaseModel]) -> None:
        schema = model.model_json_schema()
        self._definitions: Node = schema.get("$defs", {})
        self.root: Node = schema

    @property
    def documented(self) -> str:
        """The page that lists all fields."""
        return str(self.root.get("documented", "docs/configuration.md"))

    def at(self, path: Path) -> Node:
        """The schema of the value at a path, empty where the model has no such place."""
        node = self.root
        for step in path:
            node = self._below(self.resolved(node), step)
        return node

    def fields(self, path: Path) -> dict[str, Node]:
        """The fields of the object at a path, none where it is not an object with fields of its own."""
        return dict(self.resolved(self.at(path)).get("properties", {}))

    def resolved(self, node: Node) -> Node:
        """The schema behind references, and of what may be null that of what is not."""
        for option in node.get("anyOf", node.get("allOf", ())):
            if option.get("type") != "null":
                return self.resolved(option)
        if "$ref" in node:
            return self.resolved(self._definitions[node["$ref"].rsplit("/", 1)[1]])
        return node

    def _below(self, node: Node, step: str | int) -> Node:
        if isinstance(step, str) and step in node.get("properties", {}):
            below: Node = node["properties"][step]
            return below
        below = node.get("items" if isinstance(step, int) else "additionalProperties", {})
        return below if isinstance(below, Mapping) else {}

    def allowed(self, node: Node) -> str:
        """What a value of this schema may be, as a phrase to follow "expected"."""
        if "allowed" in node:
            return str(node["allowed"])
        if "anyOf" in node:
            return ", or ".join(self.allowed(option) for option in node["anyOf"])
        phrase = self._phrase(node)
        return f"{phrase}, or {node['or']}" if "or" in node else phrase

    def _phrase(self, node: Node) -> str:
        node = self.resolved(node)
        if "enum" in node:
            return one_of(json.dumps(choice) for choice in node["enum"])
        if node.get("type") == "object":
            return self._object(node)
        noun = _NOUNS.get(node.get("type", ""), "another value")
        if "items" in node:
            return f"{noun}, each item {self.allowed(node['items'])}"
        return noun + _bounds(node)

    def _object(self, node: Node) -> str:
        if "properties" not in node:
            return f"an object, each value {self.allowed(node['additionalProperties'])}"
        names = list(node["properties"])
        return "an object" if len(names) > 8 else f"an object with {one_of(names, 'and')}"


def one_of(choices: Iterable[str], conjunction: str = "or") -> str:
    *most, last = choices
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def _bounds(node: Node) -> str:
    if "exclusiveMinimum" in node:
        return f" above {_readable(node['exclusiveMinimum'])}"
    if "minimum" not in node:
        return ""
    if "maximum" not in node:
        return f", at least {_readable(node['minimum'])}"
    return f" from {_readable(node['minimum'])} to {_readable(node['maximum'])}"


def _readable(bound: float) -> str:
    """Limits of machine integers are known by their powers, and 0.0 by 0."""
    if bound != int(bound):
        return str(bound)
    power = int(bound).bit_length()
    return f"2^{power} - 1" if power >= 31 and bound == 2**power - 1 else str(int(bound))
