"""The rooms of the package import one way: each only from those above it in the table of ``docs/architecture.md``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "monitor"
FRAMEWORKS = ("pytorch", "mindspore")
FINDERS = ("anomalies/ranking/", "dynamic/cli.py")
"""Commands that find the files of a job as a merge does."""


def rooms() -> list[str]:
    """The folders directly below the package, in the order of the table."""
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = document.partition("| room |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([a-z]+)/`", row.split("|")[1] if "|" in row else "")]
    return list(dict.fromkeys(named))


def imports() -> Iterator[tuple[str, str]]:
    """Path of an importing module, and the imported one."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("monitor."):
                yield str(path.relative_to(PACKAGE)), node.module.removeprefix("monitor.")


def is_allowed(importer: str, imported: str, order: list[str]) -> bool:
    room, other = importer.partition("/")[0], imported.partition(".")[0]
    if room not in order or other not in order or order.index(other) <= order.index(room):
        return {room, other} != set(FRAMEWORKS)
    part = importer.split("/")[1]
    return (room in FRAMEWORKS and part == other) or (importer.startswith(FINDERS) and other == "merge")


def test_the_table_names_every_room() -> None:
    assert set(rooms()) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_rooms_import_from_rooms_above_them_only() -> None:
    order = rooms()
    found = set(imports())
    assert len(found) > 500
    assert sorted((here, there) for here, there in found if not is_allowed(here, there, order)) == []
