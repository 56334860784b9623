"""A YAML file as plain values, with the line of each, and as strict as a configuration is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from monitor.config.jsonc import MAX_DEPTH, Path


class YamlError(ValueError):
    """The text is not YAML, or not that of a configuration. Says the line where that is known."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A parsed file.

    Attributes:
        value: What it holds, as PyYAML's safe loader gives it.
        lines: The line of every name and list element, by its path.
    """

    value: Any
    lines: dict[Path, int]


def parse(text: str) -> YamlDocument:
    """Parse a file that holds one document.

    Raises:
        YamlError: It does not, it has a tag that only another program can read, or a name stands twice in a mapping.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines = {} if node is None else dict(_lines(node, (), frozenset()))
        return YamlDocument(None if node is None else loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_told(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(str(error) or "nested too deeply") from None
    finally:
        loader.dispose()


def _lines(node: yaml.Node, path: Path, around: frozenset[int]) -> Iterator[tuple[Path, int]]:
    if len(path) > MAX_DEPTH or id(node) in around:
        raise YamlError(f"line {_line(node)}: nested more than {MAX_DEPTH} levels deep, or within itself")
    for name, anchor, value in _members(node):
        yield (*path, name), _line(anchor)
        yield from _lines(value, (*path, name), around | {id(node)})


def _members(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.SequenceNode):
        for index, one in enumerate(node.value):
            yield index, one, one
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise YamlError(f'line {_line(key)}: "{name}" stands twice in the same mapping')
            seen.add(name)
            yield name, key, value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _told(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{error.problem or error.context}"
