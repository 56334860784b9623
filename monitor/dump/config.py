"""The configuration of a precision dump: ``config.json``, the arguments of ``PrecisionDebugger``, and the choice of calls."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from monitor.config.jsonc import JsonError, Path, explain, parse, path_text, shown
from monitor.config.loading import ConfigError, content_of, unused_warning, without
from monitor.failures import LOGGER

# --- Fields of the original's ``config.json`` that have no effect on this dump.
#
# Source: the default ``config.json`` of mindstudio-probe 26.2.0 and the fields in its documentation (8.3, 26.0). A name
# that is in neither is a typo, and an error.

OTHER_TASKS: Final = (
    "acc_check",
    "run_ut",
    "overflow_check",
    "free_benchmark",
    "grad_probe",
    "nan_check",
    "structure",
    "exception_dump",
)
"""Sections of tasks that are not supported here. Their contents are ignored."""

SWITCHES: Final = ("extra_info", "async_dump", "enable_dataloader", "precision", "dump_enable")
"""Options without an effect: tensors are read at once, statistics have high precision, and stacks are always stored."""

OF_SECTIONS: Final = {
    "statistics": ("tensor_list", "device"),
    "tensor": ("file_format", "backward_input", "summary_mode", "bench_path", "diff_nums"),
}

UNUSED: Final[frozenset[Path]] = frozenset(
    {(name,) for name in (*OTHER_TASKS, *SWITCHES)}
    | {(section, name) for section, names in OF_SECTIONS.items() for name in names}
)


@dataclass(frozen=True, slots=True)
class DumpLevel:
    """What a level records.

    Attributes:
        apis: Whether calls of APIs are recorded.
        sources: Other sources of entries, which need the model: names in ``SOURCES`` of ``monitor/dump/levels.py``.
        values: Whether ``save`` records values.
        file: The file with its entries.
        refused: Why ``start`` refuses the level; empty if the level can be recorded.
    """

    apis: bool = False
    sources: tuple[str, ...] = ()
    values: bool = False
    file: Literal["dump.json", "debug.json"] = "dump.json"
    refused: str = ""


LEVELS: Final = {
    "L0": DumpLevel(sources=("modules",)),
    "L1": DumpLevel(apis=True),
    "mix": DumpLevel(apis=True, sources=("modules",)),
    "L2": DumpLevel(refused="kernels can be recorded only by the dump tools of an Ascend device"),
    "debug": DumpLevel(values=True, file="debug.json"),
}
_RANGE: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_MOST_NUMBERS: Final = 1_000_000


def _numbers(value: object) -> list[int]:
    """``[0, 4, "6-8"]`` is 0, 4, 6, 7, 8; a single number becomes a list."""
    items = value if isinstance(value, list | tuple) else [value]
    found: dict[int, None] = {}
    for item in items:
        found.update(dict.fromkeys(_number_or_range(item)))
    return list(found)


def _number_or_range(item: object) -> range:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return range(item, item + 1)
    match = _RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None or not 0 <= int(match[2]) - int(match[1]) < _MOST_NUMBERS:
        raise ValueError(f'{shown(item)} is neither a number from 0 on nor a range like "4-6"')
    return range(int(match[1]), int(match[2]) + 1)


def _none_or_two(value: object) -> list[str]:
    names = [name for name in value if isinstance(name, str) and name] if isinstance(value, list) else []
    if not isinstance(value, list) or len(names) != len(value) or len(names) not in (0, 2):
        raise ValueError("expected [] or two names: where to begin and where to end, both included")
    return names


Numbers = Annotated[
    list[int], PlainValidator(_numbers), WithJsonSchema({"allowed": 'a list of numbers from 0 on, or ranges like "4-6"'})
]
Level = Literal["L0", "L1", "mix", "L2", "debug"]
Scope = Annotated[list[str], PlainValidator(_none_or_two), WithJsonSchema({"allowed": "[] or a list of two names"})]
Names = list[Annotated[str, Field(min_length=1)]]
DataModes = list[Literal["all", "forward", "backward", "input", "output"]]


class _DumpSection(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class TaskSection(_DumpSection):
    """The part of a step that is recorded."""

    scope: Scope = []
    """The first and the last call to record: names as in ``dump.json``."""
    names: Names = Field(default=[], alias="list")
    """Record only calls whose names contain one of these as whole parts between dots, and calls inside such modules."""
    data_mode: DataModes = ["all"]
    """``forward`` or ``backward``, ``input`` or ``output``. A pair of which neither is named is recorded completely."""


class StatisticsSection(TaskSection):
    """The section of the task ``statistics``."""

    summary_mode: Literal["statistics", "md5"] = "statistics"
    """``md5`` adds the CRC-32 of each tensor's bytes."""


class DumpConfig(_DumpSection):
    """The whole configuration."""

    task: Literal["statistics", "tensor"] = "statistics"
    dump_path: Annotated[str, Field(min_length=1)] = "./dump_path"
    rank: Numbers = []
    """The ranks to record; all if empty."""
    step: Numbers = []
    """The steps to record; all if empty."""
    level: Level = "L1"
    statistics: StatisticsSection = StatisticsSection()
    tensor: TaskSection = TaskSection()
    api_list: Annotated[str, Field(min_length=1)] | None = None
    """A file with the APIs of L1. It replaces the list of this package."""

    @property
    def records(self) -> DumpLevel:
        """What the level records."""
        return LEVELS[self.level]

    @property
    def chosen(self) -> TaskSection:
        """The section of the configured task."""
        return self.tensor if self.task == "tensor" else self.statistics

    @property
    def checksums(self) -> bool:
        return self.task == "statistics" and self.statistics.summary_mode == "md5"


def load(path: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> DumpConfig:
    """Read the file (defaults without one), and let arguments that are not None override its fields.

    Fields of the original that have no effect here are ignored, with a warning.

    Raises:
        ConfigError: The file cannot be read, or a field or an argument has a value that is not allowed.
    """
    name, fields, lines = "PrecisionDebugger", {}, {}  # type: str, dict[str, Any], Mapping[Path, int]
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"config_path is a {type(path).__name__}: expected the path of a file")
        name = os.path.expanduser(os.fsdecode(path))
        fields, lines = _read(name)
        fields = _in_use(name, fields)
    given = {field: value for field, value in arguments.items() if value is not None}
    if "dump_path" in given and isinstance(given["dump_path"], os.PathLike):
        given["dump_path"] = os.fsdecode(given["dump_path"])
    try:
        return DumpConfig.model_validate({**fields, **given})
    except ValidationError as error:
        own = {place: line for place, line in lines.items() if place[0] not in given}
        raise ConfigError(_listed(name, explain(DumpConfig, error, own))) from None


def _in_use(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that have an effect. Fields without an effect and null fields cause a warning."""
    used, unused = without(fields, UNUSED)
    if unused:
        LOGGER.warning("%s: %s", name, unused_warning(unused))
    used, null = without(used, _nulls(used))
    if null:
        LOGGER.warning("%s: %s: null is taken as not set, and the default is used.", name, ", ".join(map(path_text, null)))
    return used


def _nulls(fields: Mapping[str, Any]) -> list[Path]:
    sections: dict[Path, Any] = {(name,): one for name, one in fields.items()}
    inner = {
        (*path, name): one for path, section in sections.items() if isinstance(section, dict) for name, one in section.items()
    }
    return [path for path, value in (sections | inner).items() if value is None and path != ("api_list",)]


def _read(name: str) -> tuple[dict[str, Any], Mapping[Path, int]]:
    try:
        document = parse(content_of(name).decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: it is not UTF-8, save it as UTF-8") from None
    except JsonError as error:
        raise ConfigError(f"{name}: line {error.line}, column {error.column}: {error}") from None
    if not isinstance(document.value, dict):
        raise ConfigError(f"{name}: expected an object in braces, found {shown(document.value)}")
    return document.value, document.lines


def _listed(name: str, problems: list[str]) -> str:
    return f"{name}: {problems[0]}" if len(problems) == 1 else "\n  ".join([f"{name}: several problems", *problems])


# --- Which calls of a step are recorded, and which parts of them.

Direction = Literal["forward", "backward"]
Section = Literal["input", "output"]

DIRECTIONS: Final = ("forward", "backward")


class CallSelection:
    """Decides what is recorded, from the section of a task."""

    def __init__(self, chosen: TaskSection) -> None:
        self._listed = [tuple(name.split(".")) for name in chosen.names]
        self._scope = [_of_call(name) for name in chosen.scope]
        modes = set(chosen.data_mode) - ({"all"} if len(chosen.data_mode) > 1 else set())
        self._directions = {mode for mode in DIRECTIONS if mode in modes} or set(DIRECTIONS)
        self._sections = {mode for mode in ("input", "output") if mode in modes} or {"input", "output"}
        self._inside = not self._scope

    def restart(self) -> None:
        """Begin a step."""
        self._inside = not self._scope

    def begins(self, name: str) -> bool:
        """Note that a call begins; ``name`` is that of its forward. Returns whether the call lies in the scope."""
        if self._scope and not self._inside and _of_call(name) == self._scope[0]:
            self._inside = True
        return self._inside

    def ended(self, name: str) -> None:
        """Note that a call has ended, and with it perhaps the scope."""
        if self._scope and self._inside and _of_call(name) == self._scope[1]:
            self._inside = False

    def wants(self, direction: Direction, section: Section | None = None) -> bool:
        """Whether a direction, or a section of it, is recorded."""
        return direction in self._directions and (section is None or section in self._sections)

    def lists(self, name: str, enclosing: Sequence[str]) -> bool:
        """Whether a name is listed, or one of its enclosing modules is."""
        if not self._listed:
            return True
        return any(_contains(tuple(one.split(".")), part) for one in (name, *enclosing) for part in self._listed)


def _of_call(name: str) -> tuple[str, ...]:
    """A call's name without its direction, which a scope ignores."""
    return tuple(part for part in name.split(".") if part not in DIRECTIONS)


def _contains(name: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return any(name[start : start + len(part)] == part for start in range(len(name) - len(part) + 1))
