"""Write the table of all fields into ``docs/configuration.md``, from the model that validates them.

With ``--check`` nothing is written, and the exit status is 1 if the table is not what the model says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from monitor import MonitorConfig
from monitor.config.jsonc import FieldSchema, SchemaNode
from monitor.config.model import Capability

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN: Final = "<!-- generated from the model: begin -->\n"
END: Final = "<!-- generated from the model: end -->\n"
COLUMNS: Final = ("Field", "Type", "Default", "Allowed", "Meaning", "Capability")
SWITCHABLE: Final = "on_alert.set"
"""Holds every field again; one row says so."""


def main(arguments: list[str]) -> int:
    present = DOCUMENT.read_text(encoding="utf-8")
    wanted = with_fields(present)
    if "--check" in arguments:
        return int(present != wanted)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


def with_fields(document: str) -> str:
    """The document with the part between its markers made anew."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *_rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _rows() -> Iterator[tuple[str, ...]]:
    schema = FieldSchema(MonitorConfig)
    for name, field in MonitorConfig.model_fields.items():
        capability = next(mark for mark in field.metadata if isinstance(mark, Capability))
        for path, node, required in _tree(schema, name, schema.at((name,)), required=False):
            yield (*_cells(schema, path, node, required=required), capability)


def _tree(schema: FieldSchema, path: str, node: SchemaNode, *, required: bool) -> Iterator[tuple[str, SchemaNode, bool]]:
    """A field and all fields below it."""
    yield path, node, required
    if path == SWITCHABLE:
        return
    holder, suffix = _holder(schema, schema.resolved(node))
    for name, below in holder.get("properties", {}).items():
        yield from _tree(schema, f"{path}{suffix}.{name}", below, required=name in holder.get("required", ()))


def _holder(schema: FieldSchema, node: SchemaNode) -> tuple[SchemaNode, str]:
    """The object that has the fields, which may be an item of a list or a value under a free name, and how that is written."""
    if node.get("type") == "array":
        return schema.resolved(node["items"]), "[i]"
    if isinstance(node.get("additionalProperties"), dict):
        return schema.resolved(node["additionalProperties"]), "[name]"
    return node, ""


def _cells(schema: FieldSchema, path: str, node: SchemaNode, *, required: bool) -> tuple[str, ...]:
    meaning = " ".join(node.get("description", "").split())
    default = "required" if required else _default(schema, node)
    allowed = "any field but `on_alert`" if path == SWITCHABLE else schema.allowed(node)
    return tuple(cell.replace("|", r"\|") for cell in (f"`{path}`", _type(schema, node), default, allowed, meaning))


def _default(schema: FieldSchema, node: SchemaNode) -> str:
    """As one would write it in the file; an object with fields of its own has a row for each of them."""
    if schema.resolved(node).get("type") == "object" and node.get("default", {}) is not None:
        return "`{}`"
    if node["default"] is None and "anyOf" not in node:
        return "not set"
    return f"`{json.dumps(node['default'])}`"


def _type(schema: FieldSchema, node: SchemaNode) -> str:
    kind = str(schema.resolved(node).get("type"))
    return {"array": "list"}.get(kind, kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
