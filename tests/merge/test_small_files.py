"""Many small files of CSV are read in a call, with the rows and the complaints of files that are read alone."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import RecordedRank, merged
from sink_rows import Measured

from monitor.merge import tables
from monitor.merge.discovery import SetAside
from monitor.merge.tables import Columns, in_groups, read_group, shards_in
from monitor.sinks.files import ALL_STEPS, StepSpan

STEPS = 12
NAMES = ("w", "a,b", 'with "quotes"', "0:x")


def recorded(base: Path, *names: str, **options: object) -> Path:
    rank = RecordedRank(base, format="csv", steps_per_record=1, **options)  # type: ignore[arg-type]
    for step in range(STEPS):
        rank.write(step, {"grad_reduced": [Measured(name, [step + 1.0, -2.0]) for name in names or NAMES]})
    rank.close()
    return rank.directory


def read(directory: Path, steps: StepSpan = ALL_STEPS) -> tuple[list[dict[str, object]], list[SetAside], list[int]]:
    """All rows, what is set aside, and how many files are in each group."""
    shards = sorted(shards_in(directory, 0, STEPS)[0], key=lambda one: (one.steps, one.path.name), reverse=True)
    groups = list(in_groups(shards))
    found = [read_group(group, steps, Columns("grad_reduced")) for group in groups]
    rows = [row for each, _ in found for table in each for row in table.to_pylist()]
    return rows, [one for _, aside in found for one in aside], list(map(len, groups))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def of_other_steps(path: Path) -> None:
    path.write_text(path.read_text().replace(",6,", ",7,"))


def of_other_columns(path: Path) -> None:
    with path.open(newline="") as file:
        rows = [row[:-1] for row in csv.reader(file)]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def with_a_cell_too_many(path: Path) -> None:
    path.write_text(path.read_text() + "0,w,6,1,2,3,4,5,6,7,8,9\n")


def with_columns_alone(path: Path) -> None:
    path.write_text(path.read_text().splitlines()[0] + "\n")


def twice(path: Path) -> None:
    path.with_suffix(".2.csv").write_bytes(path.read_bytes())


def gone_before(path: Path) -> None:
    path.unlink()


def unchanged(_path: Path) -> None:
    return


@pytest.mark.parametrize(
    ("change", "torn"),
    [
        (unchanged, 0),
        (cut_off, 1),
        (of_other_steps, 1),
        (of_other_columns, 0),
        (with_a_cell_too_many, 1),
        (with_columns_alone, 0),
        (twice, 0),
        (gone_before, 0),
    ],
)
@pytest.mark.parametrize("names", [NAMES, ("over\ntwo lines", "w")])
def test_files_together_have_the_rows_of_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], torn: int, names: tuple[str, ...]
) -> None:
    directory = recorded(tmp_path, *names)
    change(directory / "grad_reduced_6-6.csv")
    for steps in (ALL_STEPS, StepSpan(3, 8)):
        together = read(directory, steps)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "ROWS_TOGETHER", 0)
            alone = read(directory, steps)
        assert (together[:2], set(alone[2]), len(alone[1])) == (alone[:2], {1}, torn)
        assert max(together[2]) >= STEPS // 2 - 1


def test_a_file_that_goes_while_they_are_read_is_named(tmp_path: Path) -> None:
    directory = recorded(tmp_path)
    (group,) = in_groups(sorted(shards_in(directory, 0, STEPS)[0], key=lambda one: one.steps, reverse=True))
    gone = group[4].path
    gone.unlink()
    found, aside = read_group(group, ALL_STEPS, Columns("grad_reduced"))
    assert sum(map(len, found)) == (STEPS - 1) * len(NAMES)
    assert [one.path for one in aside] == [str(gone)]


def test_a_torn_file_among_many_takes_no_other_rows_along(tmp_path: Path) -> None:
    directory = recorded(tmp_path)
    cut_off(directory / "grad_reduced_6-6.csv")
    report = merged(tmp_path)
    assert [Path(one.path).name for one in report.set_aside] == ["grad_reduced_6-6.csv"]
    assert sum(report.rows.values()) == (STEPS - 1) * len(NAMES)
