"""What the demo says at its end: where the files are, what is in them, and what it cost."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cost import Cost
from monitor import read_csv

FIRST_ROWS = 8
FIRST_LOOK = "grad_reduced"


def show(console: Console, directories: list[Path], cost: Cost | None) -> None:
    """Print the report on the ranks' ``directories``, the first of which is looked into.

    Raises:
        SystemExit: Nothing was recorded.
    """
    if not directories or not any(directories[0].glob("*.csv")):
        raise SystemExit("Nothing was recorded. The monitor has said why in a warning above.")
    for directory in directories:
        console.print(f"Recorded in {directory}", soft_wrap=True)
    console.print(_contents(directories[0]))
    console.print(_first_rows(directories[0]))
    console.print(_cost(cost), highlight=False)


def _contents(directory: Path) -> Table:
    files = defaultdict(list)
    for path in sorted(directory.glob("*_*-*.csv")):
        files[path.name.rpartition("_")[0]].append(path)
    table = Table("kind", "files", "rows", title="What the first rank recorded", box=SIMPLE)
    for kind, paths in files.items():
        table.add_row(kind, str(len(paths)), str(sum(read_csv(path).num_rows for path in paths)))
    return table


def _first_rows(directory: Path) -> Table:
    path = directory / f"{FIRST_LOOK}_0-0.csv"
    rows = read_csv(path).drop_columns("vpp_stage")  # 0 throughout, and a terminal is narrow
    table = Table(title=f"The first of {rows.num_rows} rows of {path.name}", box=SIMPLE, padding=(0, 1, 0, 0))
    for name, column_type in zip(rows.column_names, rows.schema.types, strict=True):
        table.add_column(name, justify="right" if _is_number(column_type) else "left", no_wrap=True)
    for row in rows.slice(0, FIRST_ROWS).to_pylist():
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _is_number(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(column_type) or pa.types.is_integer(column_type))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return "Too few steps to say what monitoring cost."
    return (
        f"A collected step took {cost.ratio:.2f} times a step that was not collected: {1000 * cost.added:.1f} ms on top of "
        f"{1000 * cost.plain:.1f} ms, the writer thread's part included (medians over {cost.samples} collected steps)."
    )
