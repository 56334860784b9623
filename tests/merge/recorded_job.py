"""Jobs of several ranks for the tests of the merge: files of the real sinks, manifests of the real writer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sink_rows import SIX_OPS, Measured, table_rows

from monitor.coordinator.manifest import Earlier, Manifest, RankFacts
from monitor.coordinator.output import JobIdentity, RankDirectory
from monitor.failures import Failures
from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.merge.report import Report
from monitor.series import Placement, Series, SeriesTable, Shard
from monitor.sinks import csv, hdf5, parquet, tensorboard
from monitor.sinks.protocol import SinkContext
from monitor.stats.partials import KindRows, TensorLayout
from monitor.stats.table import StepRows

JOB = "1a2b3c4d" * 4
TIMESTAMP = "Dec03_21-34-40"
SINKS = {
    "csv": csv.CsvSink,
    "hdf5": hdf5.Hdf5Sink,
    "parquet": parquet.ParquetSink,
    "tensorboard": tensorboard.TensorBoardSink,
}
FORMATS = ("hdf5", "csv", "parquet")
EXACT_AND_ROUNDED = ("hdf5", "csv")
"""A format with partials, and one with ops alone."""
VALUES = (3.0, 4.0, -12.0, 0.0, 0.5)

Kinds = Mapping[str, Sequence[Measured]]


class RecordedRank:
    """One rank, which writes what it is asked to.

    Args:
        format: One, or several at once.
        config: What else its manifest says of the configuration.
    """

    def __init__(
        self,
        base: Path,
        rank: int = 0,
        world_size: int = 1,
        format: str | Sequence[str] = "hdf5",  # noqa: A002
        groups: Mapping[str, Sequence[int]] | None = None,
        job: str = JOB,
        launch: str = "",
        suffix: str = "",
        earlier: Earlier | None = None,
        ops: tuple[str, ...] = SIX_OPS,
        ndigits: int = 16,
        steps_per_record: int = 5,
        micro_step_kinds: Collection[str] = ("actv", "actv_grad"),
        counted_kinds: Collection[str] = (),
        **config: object,
    ) -> None:
        self.directory = base / str(RankDirectory(TIMESTAMP, rank, suffix or f"{rank:08x}"))
        self.directory.mkdir(parents=True)
        self.series, self.ops, self.layouts = SeriesTable(), ops, []
        self._micro_step_kinds, self._counted_kinds = frozenset(micro_step_kinds), frozenset(counted_kinds)
        formats = [format] if isinstance(format, str) else list(format)
        used = {"ndigits": ndigits, "ops": list(ops), **config}
        facts = RankFacts(JobIdentity(job, TIMESTAMP, launch=launch), rank, world_size, groups or {}, {}, used, "", formats)
        self.failures = Failures(rank)
        self.manifest = Manifest(self.directory, facts, self.series, self.failures, earlier)
        context = SinkContext(self.directory, rank, self.series, ndigits, steps_per_record, 1e-8)
        self._sinks = [SINKS[one](context) for one in formats]

    def place(self, kind: str, name: str, placement: Placement) -> None:
        self.series.place(Series(kind, 0, name), placement)

    def write(self, step: int, kinds: Kinds) -> None:
        rows = StepRows(
            step,
            self.ops,
            {kind: self._rows(kind, each) for kind, each in kinds.items()},
            self.layouts,
            micro_step_kinds=self._micro_step_kinds,
            counted_kinds=self._counted_kinds,
        )
        for sink in self._sinks:
            sink.write(rows)
        self.manifest.written(rows)

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self.manifest.close()

    def _rows(self, kind: str, measured: Sequence[Measured]) -> KindRows:
        return KindRows(
            np.array([self.series.index_of(Series(kind, m.vpp_stage, m.name)) for m in measured], dtype=np.int64),
            np.array([m.micro_step for m in measured], dtype=np.int64),
            np.arange(len(measured)),
            np.array([self._layout(m) for m in measured], dtype=np.int64),
            table_rows(measured, counted=kind in self._counted_kinds),
        )

    def _layout(self, measured: Measured) -> int:
        layout = TensorLayout((len(measured.values),) if measured.shape is None else measured.shape, "torch.float32")
        if layout not in self.layouts:
            self.layouts.append(layout)
        return self.layouts.index(layout)


def sharded(base: Path, format: str | Sequence[str] = "hdf5", cut: int = 2, steps: int = 3, **options: Any) -> None:  # noqa: A002
    """Two ranks with a part each of ``w``, which grows from step to step, and a replica that the first one writes."""
    for rank, held in enumerate((VALUES[:cut], VALUES[cut:])):
        one = RecordedRank(base, rank, 2, format, **{"groups": {"dp": [0, 1]}, **options})
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (5,), (rank * cut,))))
        one.place("grad_reduced", "b", Placement(replicas=(0, 1)))
        for step in range(steps):
            rows = [Measured("w", [value * (step + 1) for value in held])]
            one.write(step, {"grad_reduced": [*rows, Measured("b", [1.0])] if rank == 0 else rows})
        one.close()


def alone(base: Path, *names: str, **options: Any) -> RecordedRank:
    """One rank that has recorded a step of tensors of these names."""
    one = RecordedRank(base, **options)
    one.write(0, {"grad_reduced": [Measured(name) for name in names or ("w",)]})
    one.close()
    return one


def merged(base: Path, output: str = "merged", **wanted: object) -> Report:
    return merge(Wanted(base, base / output, **wanted))  # type: ignore[arg-type]


def table(base: Path, folder: str, kind: str = "grad_reduced", output: str = "merged") -> pa.Table:
    """The rows of a kind, in order of steps, and of one step as the files have them."""
    files = [path for path in (base / output / folder).iterdir() if path.name.rsplit("_", 1)[0] == kind]
    files.sort(key=lambda path: int(path.stem.rsplit("_", 1)[1].split("-")[0]))
    rows = pa.concat_tables([read_merged(path) for path in files]).unify_dictionaries()
    return rows.take(pa.array(np.argsort(rows["step"].to_numpy(), kind="stable")))


def files(directory: Path) -> dict[str, bytes]:
    """The content of every file, by its path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def tensors(base: Path, kind: str = "grad_reduced", output: str = "merged") -> list[dict[str, object]]:
    return table(base, "global", kind, output).to_pylist()
