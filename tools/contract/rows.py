"""What a run recorded, and what it should have recorded: float64 statistics of the tensors of the same unmonitored run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.parquet

from monitor import open_run, read_csv, read_hdf5

OPS: Final = ("norm", "min", "max", "mean", "nans")
RELATIVE: Final = 1e-6
CONFIG: Final[dict[str, Any]] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "format": ["csv", "hdf5", "parquet"],
    "ops": list(OPS),
    "ndigits": 12,
    "step_count_per_record": 2,
}


class Series(NamedTuple):
    """A tensor of a run, by the names that its rows have."""

    kind: str
    name: str
    step: int


Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
"""What a run ended with: losses, weights, moments and random state, by name."""
Tensors = dict[Series, Array]
Rows = dict[Series, dict[str, Any]]


def written_config(directory: Path, **changes: Any) -> str:
    """The path of a configuration that records everything in all formats that can be merged, except for ``changes``."""
    path = directory / "monitor_config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


def recorded(output: Path, rank: int = 0) -> dict[str, Rows]:
    """The rows that a rank wrote below ``output``, by the format of the files."""
    (directory,) = output.glob(f"*-rank{rank}-*")
    return {
        "csv": by_series(row for path in directory.glob("*_*-*.csv") for row in csv_rows(path)),
        "hdf5": by_series(row for path in directory.glob("*.h5") for row in read_hdf5(path, ops=OPS).to_pylist()),
        "parquet": by_series(
            row for path in directory.glob("*.parquet") for row in pyarrow.parquet.read_table(path).to_pylist()
        ),
    }


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file, with their kind, which its name has: ``actv_grad_0-1.csv``."""
    kind = path.stem.rpartition("_")[0]
    for row in read_csv(path).to_pylist():
        yield row | {"kind": kind}


def by_series(rows: Iterator[dict[str, Any]]) -> Rows:
    """Rows of tensors by their series. Each series has one row."""
    found: Rows = {}
    for row in rows:
        if row["kind"] != "run":
            series = Series(row["kind"], row["name"], row["step"])
            assert series not in found, f"{series} has two rows"
            found[series] = row
    return found


def compare(rows: Rows, tensors: Tensors, where: str) -> None:
    """Raise an AssertionError unless ``rows`` hold the statistics of exactly these tensors."""
    assert rows, f"{where}: no rows"
    assert set(rows) == set(tensors), f"{where}: rows without a tensor or tensors without a row: {set(rows) ^ set(tensors)}"
    for series, x in tensors.items():
        expected, size = statistics(x), float(np.linalg.norm(x))
        for op in OPS:
            given = rows[series][op]
            close = given is not None and abs(given - expected[op]) <= RELATIVE * max(abs(expected[op]), size)
            assert close, f"{where}: {op} of {series} is {given}, and should be {expected[op]}"


def statistics(x: Array) -> dict[str, float]:
    """The statistics of ``x``, of any shape, in float64."""
    x = x.astype(np.float64)
    values = float(np.sqrt((x * x).sum())), x.min(), x.max(), x.mean(), np.isnan(x).sum()
    return dict(zip(OPS, map(float, values), strict=True))


def merge(output: Path) -> Path:
    """Merge what the ranks wrote below ``output`` with the command. Returns the merged set."""
    command = [sys.executable, "-m", "monitor", "merge", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"trainermon merge ended with status {done.returncode}: {done.stdout}{done.stderr}"
    return output / "merged"


def opened(path: Path, kinds: set[str], *, per_rank: bool = True) -> Rows:
    """The rows of ``kinds`` that ``open_run`` reads from directories of ranks or from a merged set."""
    run = open_run(path)
    return by_series(row for kind in kinds for row in run.rows(kind, per_rank=per_rank).to_pylist())


def compare_everything(output: Path, tensors: Tensors) -> None:
    """Compare each file format, ``open_run``, and the merged set of one rank with the tensors of the run."""
    for name, rows in recorded(output).items():
        compare(rows, tensors, name)
    kinds = {series.kind for series in tensors}
    compare(opened(output, kinds), tensors, "open_run of a directory")
    merged = merge(output)
    for per_rank in (True, False):
        compare(opened(merged, kinds, per_rank=per_rank), tensors, f"open_run of a merged set, per_rank={per_rank}")


def same_bits(one: Arrays, other: Arrays) -> None:
    """Raise an AssertionError unless both runs have the same arrays, bit for bit."""
    assert one, "nothing was compared"
    assert one.keys() == other.keys()
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different, f"with the monitor the bits differ: {different}"
