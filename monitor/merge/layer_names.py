"""Names that hold for the whole model, where every pipeline stage numbers its layers from 0.

    stage 0   layers.0  layers.1        become   layers.0  layers.1
    stage 1   layers.0  layers.1                 layers.2  layers.3

A stage's layers come after those of the stages before it. If one of those stages is unknown, or only some modules were
recorded, the number of a layer is unknown, and the stage is put in front of the name instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?=\.)")
"""A component of a name that is a number, and not the last one."""

_MOST_DIGITS: Final = 6


class _Numbered(NamedTuple):
    """A name, taken apart at the first component that is a number."""

    before: str
    number: int
    after: str

    @classmethod
    def of(cls, name: str) -> _Numbered | None:
        match = _NUMBER.search(name)
        if match is None or len(match[0]) > _MOST_DIGITS:
            return None
        return cls(name[: match.start()], int(match[0]), name[match.end() :])


class LayerNames:
    """The names of one pipeline.

    Args:
        names: Of all series, by stage; stages in the order in which data goes through them.
        stages: How many there are.
        whole: Whether every module was recorded.
    """

    def __init__(self, names: Mapping[int, Iterable[str]], stages: int, *, whole: bool = True) -> None:
        self._numbers: dict[str, dict[int, set[int]]] = {}
        for stage, own in names.items():
            for one in filter(None, map(_Numbered.of, own)):
                self._numbers.setdefault(one.before, {}).setdefault(stage, set()).add(one.number)
        complete = whole and set(names) == set(range(stages))
        self._begin = {before: self._begins(by_stage, stages, complete) for before, by_stage in self._numbers.items()}

    def of(self, stage: int, name: str) -> str:
        """The name in the whole model of what ``stage`` calls ``name``."""
        one = _Numbered.of(name)
        begin = {} if one is None else self._begin.get(one.before, {})
        if one is None or begin == {}:
            return name
        if begin is None:
            return f"stage{stage}:{name}"
        return f"{one.before}{one.number + begin[stage]}{one.after}"

    @staticmethod
    def _begins(by_stage: Mapping[int, set[int]], stages: int, complete: bool) -> dict[int, int] | None:
        """What to add in each stage; nothing where numbers are those of the model already, None where it is not known."""
        every = [number for numbers in by_stage.values() for number in numbers]
        if len(every) == len(set(every)):
            return {}
        if not complete or any(numbers != set(range(len(numbers))) for numbers in by_stage.values()):
            return None
        begin, begins = 0, {}
        for stage in range(stages):
            begins[stage] = begin
            begin += len(by_stage.get(stage, ()))
        return begins
