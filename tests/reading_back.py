"""What a test's monitors have written, read back."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from monitor.sinks.csv import read_csv

EVERYTHING: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ops": ["min", "max", "mean", "norm", "zeros", "nans", "infs", "std"],
    "ndigits": 17,
}


class Row(NamedTuple):
    """One row of a CSV file. ``values`` holds its ops; a missing one is None."""

    kind: str
    name: str
    step: int
    micro_step: int | None
    values: dict[str, Any]
    chunk: int = 0


class Output:
    """The base directory of a test's recordings."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def directories(self) -> list[Path]:
        """The rank directories, in order of rank, and those of one rank as they were made."""
        return sorted((path for path in self.base.iterdir() if "-rank" in path.name), key=_order)

    def directory(self) -> Path:
        """The only rank directory."""
        (only,) = self.directories()
        return only

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.directory() / "manifest.json").read_text())

    def rows(self, kind: str, directory: Path | None = None) -> list[Row]:
        """All rows of a kind, file by file in order of steps, in the order in which they stand."""
        directory = directory or self.directory()
        files = [path for path in directory.glob(f"{kind}_*.csv") if path.stem[len(kind) + 1 :].replace("-", "").isdigit()]
        found: list[Row] = []
        for path in sorted(files, key=lambda path: int(path.stem[len(kind) + 1 :].split("-")[0])):
            for record in read_csv(path).to_pylist():
                place = [record.pop(key, None) for key in ("name", "step", "micro_step")]
                chunk = record.pop("vpp_stage")
                found.append(Row(kind, *place, record, chunk))
        return found

    def table(self, kind: str, op: str) -> dict[tuple[str, int, int | None], Any]:
        """``{(name, step, micro_step): value}``; a row that stands twice fails."""
        rows = self.rows(kind)
        found = {(row.name, row.step, row.micro_step): row.values[op] for row in rows}
        assert len(found) == len(rows)
        return found


def _order(directory: Path) -> tuple[int, str, int, str]:
    """Rank, second, and of recordings that one process began in the same second their number."""
    second, _, rest = directory.name.partition("-rank")
    number = 0
    with suppress(OSError, ValueError):  # a test may have torn it
        number = json.loads((directory / "manifest.json").read_bytes()).get("recording", 0)
    return int(rest.split("-")[0]), second, number, directory.name
