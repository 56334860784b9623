"""``dump.json``, ``stack.json``, ``construct.json`` and ``debug.json``, made of a step's records. Each appears whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from monitor.coordinator.output import write_whole
from monitor.dump.records import FILE, Damage, Record, read
from monitor.dump.safe_files import opened

HEADER: Final = "header"
STACK: Final = "frames"
ENTRY: Final = "entry"


MAIN: Final = ("dump.json", "debug.json")
"""The files that hold entries; one of them is in each complete dump."""

LARGEST: Final = 1 << 32
"""Bytes of such a file that is read back."""


class OtherDumpError(Exception):
    """A directory holds entries that its records do not."""


class Assembled(NamedTuple):
    """What became of a step's records.

    Attributes:
        entries: How many the files have.
        damaged: Lines of the records that could not be read, each a record or more that the files lack.
    """

    entries: int
    damaged: int


def assemble(directory: Path, *, check: bool = False) -> Assembled:
    """Make the files of a rank's step, replacing those of an earlier segment of the step.

    Args:
        check: Whether files may be there that were made of other records.

    Raises:
        OtherDumpError: There are such files. They stay.
        OSError: The records cannot be read, or a file cannot be written.
    """
    header: Mapping[str, Any] = {}
    frames: dict[int, list[str]] = {}
    entries: list[Record] = []
    damage = Damage()
    for record in read(directory / FILE, damage):
        if HEADER in record:
            header = record[HEADER]
        elif STACK in record:
            frames[record["stack"]] = record[STACK]
        else:
            entries.append(record)
    # Gradients of a call arrive one by one, and its record is written when the last of them has, or none is to be expected.
    entries.sort(key=lambda entry: entry["at"])
    files = _files(header, entries, frames)
    if check:
        _check_earlier(directory, files)
    for name, content in files.items():
        write_whole(directory / name, _spelled(content).encode())
    return Assembled(len(entries), damage.lines)


def finish(directory: Path, *, check: bool = False) -> Assembled:
    """``assemble``, and remove the records. They stay if some of them could not be read."""
    assembled = assemble(directory, check=check)
    if not assembled.damaged:
        (directory / FILE).unlink()
    return assembled


def damage_found(damaged: int, directory: Path) -> str:
    """What to say where records could not be read."""
    lost = f"{damaged:,} damaged lines were skipped: at least as many records are lost"
    return f"{lost}. {directory / FILE} was kept: remove it to accept the dump as it is."


def _check_earlier(directory: Path, files: Mapping[str, Any]) -> None:
    """That no entry is lost which a file has now."""
    for name in MAIN:
        if not os.path.lexists(directory / name):
            continue
        with opened(directory / name, most=LARGEST) as file:
            earlier = json.load(file)["data"]
        entries = files.get(name, {"data": {}})["data"]
        if any(called not in entries or json.dumps(entries[called]) != json.dumps(one) for called, one in earlier.items()):
            raise OtherDumpError(f"{name} has entries that were not recorded by the process that was killed: it stays")


def _files(header: Mapping[str, Any], entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    data = {entry[ENTRY]: entry["content"] for entry in entries}
    if header.get("level") == "debug":
        return {"debug.json": {**header, "data": data}}
    return {
        "dump.json": {**header, "data": data},
        "stack.json": _stacks(entries, frames),
        "construct.json": {entry[ENTRY]: entry["parent"] for entry in entries} if header.get("level") != "L1" else {},
    }


def _spelled(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry: spread out over more, a step of a large model is a million lines."""
    lines = []
    for key, value in content.items():
        below = isinstance(value, dict) and key == "data"
        lines.append(f"{json.dumps(key)}: {_spelled(value) if below else json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _stacks(entries: Iterable[Record], frames: Mapping[int, list[str]]) -> dict[str, Any]:
    """The names that share a stack, and the stack."""
    names: dict[int, list[str]] = {}
    for entry in entries:
        if entry["stack"] is not None:
            names.setdefault(entry["stack"], []).append(entry[ENTRY])
    return {str(number): [called, frames.get(stack, [])] for number, (stack, called) in enumerate(names.items())}
