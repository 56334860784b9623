"""What is to be converted: the arguments that all conversions have in common, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Final

from monitor.coordinator.identity import timestamp_of
from monitor.coordinator.resume import Span, span_between
from monitor.series import KINDS, shown_kind

# --- What stops a conversion.


class ConversionError(ValueError):
    """Nothing was converted. The message says what is wrong, and what to change."""


class NothingRecordedError(ConversionError):
    """The ranks' directories can be read, and hold no CSV rows."""


DATA_TYPES: Final = tuple(dict.fromkeys(map(shown_kind, KINDS)))
"""What files are called after."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert, by how many processes.

    Attributes:
        base: The directory that the ranks' directories lie in.
        span: Timestamps of directories, the first and the last; None: all.
        job: Beginning of a job's id; None where there is only one.
        kinds: In the order of ``DATA_TYPES``; None: all.
        output: A directory, which need not be there.
    """

    base: Path
    span: Span | None
    job: str | None
    kinds: tuple[str, ...] | None
    workers: int
    output: Path

    @classmethod
    def of(
        cls,
        monitor_path: str | PathLike[str],
        time_start: str | None,
        time_end: str | None,
        process_num: int,
        data_type_list: Sequence[str] | None,
        output_dirpath: str | PathLike[str] | None,
        job: str | None,
        ending: str,
    ) -> Request:
        """The arguments as users give them.

        Args:
            ending: Of the name of the directory to write where ``output_dirpath`` is not given; the time stands before it.

        Raises:
            ConversionError: one of them cannot be what was meant.
        """
        base = Path(monitor_path).expanduser()
        output = (
            base / f"{timestamp_of(datetime.now())}_{ending}" if output_dirpath is None else Path(output_dirpath).expanduser()
        )
        span, kinds = _span(time_start, time_end), _kinds(data_type_list)
        return cls(base, span, job, kinds, natural("process_num", process_num), output)


def natural(name: str, value: int) -> int:
    """``value``, where it is an integer from 1 on.

    Raises:
        ConversionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConversionError(f"{name} is {value!r}. Give an integer from 1 on.")
    return value


def _span(start: str | None, end: str | None) -> Span | None:
    for name, value in (("time_start", start), ("time_end", end)):
        if value is not None and not isinstance(value, str):
            raise ConversionError(f"{name} is {value!r}. Give a timestamp like 'Dec03_21-34-40', or None.")
    try:
        return span_between(start, end)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def _kinds(asked: Sequence[str] | None) -> tuple[str, ...] | None:
    if not asked:
        return None
    if isinstance(asked, str):
        raise ConversionError(f"data_type_list is the text {asked!r}. Give a list: [{asked!r}].")
    if unknown := [one for one in asked if one not in DATA_TYPES]:
        raise ConversionError(f"there is no data type {unknown[0]!r}. There are {', '.join(DATA_TYPES)}.")
    return tuple(kind for kind in DATA_TYPES if kind in asked)
