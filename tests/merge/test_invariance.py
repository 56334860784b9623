"""What a merge makes of a job does not depend on how its rows came to lie where they lie, nor on who does the work."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence import examples
from hypothesis import HealthCheck, example, given, settings, strategies as st
from recorded_job import EXACT_AND_ROUNDED, FORMATS, RecordedRank, files, merged, table, tensors
from sink_rows import Measured, partials_of

from monitor.merge import execution, statistics
from monitor.series import LOCAL, Placement, Shard
from monitor.stats.ops import NUMERIC_OPS, derive
from monitor.stats.partials import M2, M4, Partials

few = settings(max_examples=examples(3, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
KINDS = ("grad_reduced", "exp_avg")


@dataclass(frozen=True)
class Job:
    """What some ranks have to record.

    Attributes:
        held: Of each tensor how the ranks hold it: ``cut`` among them, a ``copy`` each, of their ``own``, or a ``term``.
        absent: Steps that a rank has not recorded.
    """

    ranks: int
    held: tuple[str, ...]
    steps: tuple[int, ...]
    absent: Mapping[int, int]
    seed: int

    def record(self, base: Path, format: str = "hdf5", order: Sequence[int] = (), **how: Any) -> None:  # noqa: A002
        """Have the ranks record, one after the other in this order."""
        for rank in order or range(self.ranks):
            one = RecordedRank(base, rank, self.ranks, format, {"dp": range(self.ranks)}, ops=NUMERIC_OPS, **how)
            for kind, (index, held) in itertools.product(KINDS, enumerate(self.held)):
                one.place(kind, f"layers.{index}.w", self.placement(rank, held))
            for step in self.steps:
                if self.absent.get(rank) != step:
                    rows = [Measured(f"layers.{i}.w", self.values(rank, i, step)) for i in range(len(self.held))]
                    one.write(step, dict.fromkeys(KINDS, rows))
            one.close()

    def placement(self, rank: int, held: str) -> Placement:
        every = tuple(range(self.ranks))
        return {
            "cut": Placement(shard=Shard(every, (3 * self.ranks,), (3 * rank,))),
            "copy": Placement(unclaimed=every),
            "own": LOCAL,
            "term": Placement(partial=True),
        }[held]

    def values(self, rank: int, index: int, step: int) -> list[float]:
        """Three elements, of any magnitude."""
        who = 0 if self.held[index] == "copy" else rank
        random = np.random.default_rng((self.seed, who, index, step))
        return list(random.normal(size=3) * 10.0 ** random.integers(-4, 4))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks = draw(st.integers(1, 4))
    steps = tuple(sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=8))))
    return Job(
        ranks,
        tuple(draw(st.lists(st.sampled_from(["cut", "copy", "own", "term"]), min_size=1, max_size=4))),
        steps,
        draw(st.dictionaries(st.integers(0, ranks - 1), st.sampled_from(steps), max_size=int(len(steps) > 1))),
        draw(st.integers(0, 2**16)),
    )


def content(base: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of the merged data set, by folder and kind."""
    kinds = {path.name.rsplit("_", 1)[0] for path in (base / "merged" / "per_rank").iterdir()}
    return {f"{folder} {kind}": table(base, folder, kind).to_pylist() for folder in ("per_rank", "global") for kind in kinds}


@few
@given(values=st.lists(floats, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
@example(values=[1.0, 2.0, 30.0, 32.0], cuts=[2])
@example(values=[math.nan, math.inf], cuts=[1])
@example(values=[0.0, 3.4e-96, 1.0], cuts=[2])  # the first part varies too little for its fourth powers to be known
@pytest.mark.parametrize("format", FORMATS)
def test_how_a_tensor_is_cut_changes_no_statistic(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,  # noqa: A002
    values: list[float],
    cuts: list[int],
) -> None:
    base = tmp_path_factory.mktemp("job")
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    ranks = tuple(range(len(edges) - 1))
    for rank, (first, end) in enumerate(itertools.pairwise(edges)):
        one = RecordedRank(base, rank, len(ranks), format, ops=NUMERIC_OPS)
        one.place("grad_reduced", "w", Placement(shard=Shard(ranks, (len(values),), (first,))))
        one.write(0, {"grad_reduced": [Measured("w", values[first:end])]})
        one.close()
    merged(base)
    (row,) = tensors(base)
    whole = Partials.from_rows(np.array([partials_of(values)]))
    parts = [partials_of(values[first:end]) for first, end in itertools.pairwise(edges)]
    all_known = all(part[M4] > 0 or not part[M2] > 0 for part in parts)
    scale = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    for op in NUMERIC_OPS:
        (value,), (known,) = derive(op, whole)
        if op in ("kurtosis", "skewness"):
            expected = value if known and all_known and (format != "csv" or len(ranks) == 1) else None
            assert row[op] == (None if expected is None else pytest.approx(expected, rel=1e-5, abs=1e-5)), op
        elif row[op] is None:  # CSV does not say of a part without a number whether its elements are all 0, or not finite
            assert not known or (op == "smallest_nonzero" and format == "csv" and len(ranks) > 1), op
        else:
            assert value == pytest.approx(row[op], rel=1e-6, abs=1e-7 * scale, nan_ok=True), op
    shutil.rmtree(base)


@few
@given(job=jobs(), order=st.permutations(range(4)), suffixes=st.permutations("abcd"))
@pytest.mark.parametrize("format", FORMATS)
def test_the_order_of_shards_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,  # noqa: A002
    job: Job,
    order: list[int],
    suffixes: list[str],
) -> None:
    """Neither that in which they were written, nor that of their names."""
    base = tmp_path_factory.mktemp("job")
    job.record(base / "in-order", format)
    for rank in order:
        if rank < job.ranks:
            job.record(base / "otherwise", format, [rank], suffix=suffixes[rank] * 8)
    found = []
    for how in ("in-order", "otherwise"):
        merged(base / how)
        found.append({name: each for name, each in files(base / how / "merged").items() if name != "report.json"})
    assert found[0] == found[1]
    shutil.rmtree(base)


@few
@given(job=jobs(), records=st.integers(1, 12), rows=st.integers(1, 60))
@pytest.mark.parametrize("format", FORMATS)
def test_how_steps_are_cut_into_shards_and_work_into_pieces_changes_no_row(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,  # noqa: A002
    job: Job,
    records: int,
    rows: int,
) -> None:
    base = tmp_path_factory.mktemp("job")
    job.record(base / "long", format, steps_per_record=100)
    job.record(base / "short", format, steps_per_record=records)
    reports = [merged(base / "long"), merged(base / "short", rows=rows)]
    assert content(base / "long") == content(base / "short")
    assert reports[0].spelled() == reports[1].spelled()
    shutil.rmtree(base)


@settings(few, max_examples=2)
@given(job=jobs(), workers=st.integers(2, 3), rows=st.integers(1, 30), format=st.sampled_from(["hdf5", "csv", "parquet"]))
def test_the_number_of_workers_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory,
    job: Job,
    workers: int,
    rows: int,
    format: str,  # noqa: A002
) -> None:
    base = tmp_path_factory.mktemp("job")
    job.record(base)
    merged(base, "one", rows=rows, format=format)
    merged(base, "many", rows=rows, format=format, workers=workers)
    assert files(base / "one") == files(base / "many")
    shutil.rmtree(base)


@few
@given(job=jobs(), rows=st.integers(1, 12))
@pytest.mark.parametrize("format", EXACT_AND_ROUNDED)
def test_how_many_rows_a_table_of_partials_has_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,  # noqa: A002
    job: Job,
    rows: int,
) -> None:
    base = tmp_path_factory.mktemp("job")
    job.record(base, format)
    merged(base, "large")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(statistics, "TABLE_ROWS", rows)
        merged(base, "small")
    assert files(base / "large") == files(base / "small")
    shutil.rmtree(base)


@few
@given(job=jobs(), rows=st.integers(1, 60))
def test_formats_with_partials_are_merged_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, job: Job, rows: int
) -> None:
    base = tmp_path_factory.mktemp("job")
    for format in ("hdf5", "parquet"):  # noqa: A001
        job.record(base / format, format)
        merged(base / format, rows=rows)
    assert files(base / "hdf5" / "merged") == files(base / "parquet" / "merged")
    shutil.rmtree(base)


@few
@given(job=jobs(), ndigits=st.integers(2, 12))
def test_of_both_formats_the_same_is_merged_up_to_rounding(
    tmp_path_factory: pytest.TempPathFactory, job: Job, ndigits: int
) -> None:
    base = tmp_path_factory.mktemp("job")
    for format in EXACT_AND_ROUNDED:  # noqa: A001
        job.record(base / format, format, ndigits=ndigits)
        merged(base / format)
    for kind in KINDS:
        exact, rounded = (tensors(base / each, kind) for each in EXACT_AND_ROUNDED)
        for one, other in zip(exact, rounded, strict=True):
            for column, value in one.items():
                close = isinstance(value, float)
                unit = 10.0**-ndigits
                expected = pytest.approx(value, rel=unit, abs=2 * job.ranks * unit, nan_ok=True) if close else value
                # Higher moments of several parts do not follow from CSV.
                if column not in ("kurtosis", "skewness") or other[column] is not None:
                    assert other[column] == expected, column
    shutil.rmtree(base)


def test_any_executor_will_do() -> None:
    with ThreadPoolExecutor(2) as pool:
        done = dict(execution.run(pool, 2, str, range(50)))
    assert done == {number: str(number) for number in range(50)}
