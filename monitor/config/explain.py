"""What is wrong with a configuration, said for someone who has the file in front of them and never read this code."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from monitor.config.allowed import FieldSchema, one_of
from monitor.config.jsonc import Path

MAX_PROBLEMS: Final = 20
MAX_VALUE_CHARACTERS: Final = 60
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,59}")


def explain(model: type[BaseModel], error: ValidationError, lines: Mapping[Path, int]) -> list[str]:
    """One sentence for each problem, in the order of the file's lines; past ``MAX_PROBLEMS`` only their number.

    Args:
        model: What the configuration was validated against.
        lines: The line of each value, by path, as far as known.
    """
    schema = _schema_of(model)
    problems = sorted(error.errors(include_url=False), key=lambda one: _line(lines, one["loc"]))
    said = [_numbered(lines, one["loc"], _sentence(schema, one)) for one in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        said.append(f"and {len(problems) - MAX_PROBLEMS} others")
    return said


def spelled(path: Path) -> str:
    """A path as people write it: ``alert.rules[0].rule_name``, ``targets["h.0.mlp"].input``."""
    text = ""
    for step in path:
        if isinstance(step, str) and _PLAIN_NAME.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text


def shown(value: Any) -> str:
    """A value as it stands in the file, cut to what fits into a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 4] + " ..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one was probably meant to be."""
    matches = difflib.get_close_matches(name[:64].lower(), list(known), n=1, cutoff=0.7)
    return matches[0] if matches else None


@functools.cache
def _schema_of(model: type[BaseModel]) -> FieldSchema:
    """Made when the first error is explained; a configuration without one does not pay for it."""
    return FieldSchema(model)


def _sentence(schema: FieldSchema, problem: Mapping[str, Any]) -> str:
    path: Path = problem["loc"]
    if problem["type"] == "extra_forbidden":
        return _unknown(schema, path)
    if problem["type"] == "missing":
        return f"{spelled(path)} is missing: expected {schema.allowed(schema.at(path))}"
    own_words = problem.get("ctx", {}).get("error")
    reason = own_words or f"expected {schema.allowed(schema.at(path))}"
    return f"{spelled(path)}: {shown(problem['input'])} is not allowed: {reason}"


def _unknown(schema: FieldSchema, path: Path) -> str:
    known = schema.fields(path[:-1])
    near = nearest(str(path[-1]), known)
    if near is not None:
        advice = f"did you mean `{near}`?"
    elif len(known) <= 8:
        advice = f"known here are {one_of((f'`{name}`' for name in known), 'and')}"
    else:
        advice = f"{schema.documented} lists all fields"
    return f"{spelled(path)}: unknown field, {advice}"


def _line(lines: Mapping[Path, int], path: Path) -> int:
    """The line of a value, or of the nearest one around it where it does not stand in the file; 0 if none is known."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 0)


def _numbered(lines: Mapping[Path, int], path: Path, sentence: str) -> str:
    line = _line(lines, path)
    return f"line {line}: {sentence}" if line else sentence
