"""Recordings read back, and what a reader may expect of each: files are whole, and what is missing is said to be."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestRecord, StepsRecord, read_manifest
from monitor.sinks.csv import read_csv

KINDS = ("actv", "actv_grad", "grad_reduced", "grad_unreduced", "param_origin", "param_updated")
_NAME = re.compile(r"([a-z_]+)_(\d+)-(\d+)\.csv")

Rows = dict[int, list[dict[str, Any]]]
"""The rows of a kind, by step."""


class Recorded:
    """The directory of one rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kinds = self._read()

    def manifest(self) -> ManifestRecord:
        return read_manifest(self.directory / MANIFEST_FILE)

    def steps(self) -> list[int]:
        """The steps of which there are rows: of every kind the same steps, and in every step as many rows."""
        assert tuple(sorted(self.kinds)) == KINDS
        for steps in self.kinds.values():
            assert len({len(rows) for rows in steps.values()}) == 1
        first, *others = (sorted(steps) for steps in self.kinds.values())
        assert all(other == first for other in others)
        return first

    def _read(self) -> dict[str, Rows]:
        """Every visible file, each of which must be whole and hold nothing but what its name says."""
        kinds: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
        for path in sorted(self.directory.glob("*.csv")):
            name = _NAME.fullmatch(path.name)
            assert name is not None, path.name
            for row in read_csv(path).to_pylist():
                assert int(name[2]) <= row["step"] <= int(name[3]), path.name
                kinds[name[1]][row["step"]].append(row)
        return kinds

    def assert_complete(self, steps: Iterable[int]) -> None:
        """These steps are there, whole; the run has ended cleanly, misses nothing and left nothing open."""
        assert self.steps() == list(steps)
        self.assert_accounts_for(steps)
        manifest = self.manifest()
        assert manifest.closed
        assert (manifest.dropped, manifest.lost) == ({}, {})

    def assert_accounts_for(self, steps: Iterable[int]) -> None:
        """Of these steps the manifest says of each whether it is there, and where it says so it is. No file is half done."""
        steps, manifest = list(steps), self.manifest()
        missing = listed(*manifest.dropped.values(), *manifest.lost.get("csv", {}).values())
        assert listed(manifest.steps.written) == self.steps() == [step for step in steps if step not in missing]
        assert set(missing) <= set(steps)
        assert hidden(self.directory) == []


def listed(*records: StepsRecord) -> list[int]:
    """All steps of these, ascending."""
    assert all(record.rest is None for record in records)
    return sorted(step for record in records for step in record.steps())


def hidden(directory: Path) -> list[str]:
    """Files that are not finished."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def rank_directories(base: Path) -> list[Path]:
    """Those of all runs, in order of rank."""
    return sorted(base.glob("*-rank*-*"), key=lambda path: (int(path.name.split("-rank")[1].split("-")[0]), path.name))


def only_recording(base: Path) -> Recorded:
    (directory,) = rank_directories(base)
    return Recorded(directory)
