"""From a training YAML to a ``TrainingConfig``, or to one clear message that says why not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from monitor.config.errors import explain, nearest, shown
from monitor.config.jsonc import Path
from monitor.config.loading import content_of, decoded, unusable
from monitor.config.unused_fields import said_of, without
from monitor.failures import LOGGER
from monitor.training.model import Callbacks, TrainingConfig
from monitor.training.unused_fields import UNUSED
from monitor.training.yaml_document import YamlDocument, YamlError, parse

SECTIONS: Final = ("monitor_config", "tensorboard", "callbacks")
CALLBACKS: Final = tuple(Callbacks.model_fields)


def load_training_config(path: str | os.PathLike[str]) -> TrainingConfig:
    """Read a training YAML. What it says of other things than metrics is left to others.

    Fields of MindSpore Transformers that have no effect here are left out with a warning.

    Args:
        path: A leading ``~`` is the home directory.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or asks for what is not allowed.
    """
    name = os.path.expanduser(os.fsdecode(path))
    return training_config_in(name, decoded(name, content_of(name, "a YAML file")))


def training_config_in(name: str, text: str) -> TrainingConfig:
    """The configuration that ``text`` spells.

    Args:
        name: Of the file that it was read from, for the messages.

    Raises:
        ConfigError: As ``load_training_config``, except that the file was read.
    """
    try:
        document = parse(text)
    except YamlError as error:
        raise unusable(name, str(error)) from None
    if document.value is None:
        document = YamlDocument({}, {})
    if not isinstance(document.value, dict):
        raise unusable(name, f"expected a mapping of sections, found {shown(document.value)}")
    return _validated(name, document)


def _validated(name: str, document: YamlDocument) -> TrainingConfig:
    sections, lines, problems = _sections(document)
    sections, unused = without(sections, UNUSED)
    try:
        config = TrainingConfig.model_validate(sections)
    except ValidationError as error:
        raise unusable(name, *problems, *explain(TrainingConfig, error, lines)) from None
    if problems:
        raise unusable(name, *problems)
    if unused:
        LOGGER.warning("%s: %s", name, said_of(unused))
    return config.model_copy(update={"document": {**document.value, **_with_defaults(config)}})


def _with_defaults(config: TrainingConfig) -> dict[str, Any]:
    """The sections that are ours."""
    sections = {"monitor_config": config.monitor_config, "tensorboard": config.tensorboard}
    return {name: section.model_dump(mode="json") for name, section in sections.items() if section is not None}


def _sections(document: YamlDocument) -> tuple[dict[str, Any], dict[Path, int], list[str]]:
    """What is ours of a file: the sections, with callbacks by their type; the lines; what is wrong beside."""
    value, lines = document.value, dict(document.lines)
    problems = [problem for key in value if (problem := _misspelled(key, value, lines)) is not None]
    sections = {key: value[key] for key in SECTIONS if key in value}
    if sections.get("callbacks", ()) is None:
        del sections["callbacks"]
    if isinstance(sections.get("callbacks"), list):
        sections["callbacks"], more = _by_type(sections["callbacks"], lines)
        problems += more
    elif "callbacks" in sections:
        problems.append(
            f"callbacks: {shown(sections.pop('callbacks'))} is not allowed: expected a list, each item with a `type`"
        )
    return sections, lines, problems


def _misspelled(key: Any, value: Mapping[Any, Any], lines: Mapping[Path, int]) -> str | None:
    """A section whose name nearly is one of ours, which is missing: others have sections of their own."""
    near = None if key in SECTIONS else nearest(str(key), [one for one in SECTIONS if one not in value])
    return None if near is None or near[0] != str(key)[:1] else f"{_at(lines.get((str(key),)))}{key}: did you mean `{near}`?"


def _by_type(callbacks: list[Any], lines: dict[Path, int]) -> tuple[dict[str, Any], list[str]]:
    """The callbacks that are about metrics, by type, and what is wrong. ``lines`` learns where their fields are."""
    found: dict[str, Any] = {}
    problems = []
    for index, one in enumerate(callbacks):
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in CALLBACKS:
            problems += _unknown_type(kind, lines.get(("callbacks", index)))
        elif kind in found:
            problems.append(f"{_at(lines.get(('callbacks', index)))}callbacks: {kind} stands there twice")
        else:
            found[kind] = {key: value for key, value in one.items() if key != "type"}
            at = ("callbacks", index)
            lines.update({("callbacks", kind, *path[2:]): line for path, line in list(lines.items()) if path[:2] == at})
    return found, problems


def _at(line: int | None) -> str:
    """Where it stands; nothing of what a merge key has brought from elsewhere."""
    return "" if line is None else f"line {line}: "


def _unknown_type(kind: object, line: int | None) -> list[str]:
    """Another program's callback is its business, one that nearly is ours a mistake."""
    if not isinstance(kind, str):
        return [f"{_at(line)}callbacks: each item needs a `type`, such as `MFLossMonitor`"]
    by_lower = {one.lower(): one for one in CALLBACKS}
    near = nearest(kind, by_lower)
    return [] if near is None else [f"{_at(line)}callbacks: {kind}: did you mean `{by_lower[near]}`?"]
