"""Jobs of several ranks that train with a framework, and what all of their files say together."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher
from watching import Output, Row

from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestRecord, read_manifest
from monitor.coordinator.series_file import MeasuredSeries, read_series

SCRIPTS = Path(__file__).resolve().parent / "scripts"
OF_PARAMETERS: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "run_numbers": None,
    "ops": ["min", "max", "mean", "norm", "zeros", "nans", "shape"],
    "ndigits": 17,
}


@dataclass(frozen=True)
class Job:
    """What the ranks of a job computed, unmonitored and monitored, and what they recorded.

    Attributes:
        plain: What ``train`` returned on each rank when no one watched.
        monitored: The same when the monitor did.
        said: Standard error of each rank.
    """

    base: Path
    plain: list[Any]
    monitored: list[Any]
    said: list[str]

    @cached_property
    def directories(self) -> list[Path]:
        """Of the ranks, in order."""
        return Output(self.base).directories()

    def manifest(self, rank: int) -> ManifestRecord:
        return read_manifest(self.directories[rank] / MANIFEST_FILE)

    def series(self, rank: int) -> dict[tuple[str, str], MeasuredSeries]:
        """By kind and name."""
        found = read_series(self.directories[rank], self.manifest(rank))
        return {(one.series.kind, one.series.name): one for one in found}

    def rows(self, kind: str, rank: int) -> list[Row]:
        return Output(self.base).rows(kind, self.directories[rank])

    def total_norm(self, kind: str, step: int) -> float:
        """The root of the sum of squares of all rows of a kind that all ranks wrote of a step."""
        rows = [row for rank in range(len(self.directories)) for row in self.rows(kind, rank) if row.step == step]
        assert rows, f"no rank has rows of {kind} in step {step}"
        return math.sqrt(sum(row.values["norm"] ** 2 for row in rows))

    def numbers(self, name: str, rank: int) -> list[float]:
        """The run's own numbers of a name, in order of steps."""
        return [row.values["value"] for row in sorted(self.rows("run", rank), key=lambda row: row.step) if row.name == name]

    @property
    def warnings(self) -> list[str]:
        """What the monitor warned of on any rank."""
        return [line for said in self.said for line in said.splitlines() if line.startswith("[monitor] WARNING")]


PRELOADED = {
    "compiled.py": "compiler",
    "compiled_wrapped.py": "compiler",
    "deepspeed_zero.py": "deepspeed",
    "lightning_run.py": "lightning",
    "megatron_features.py": "megatron",
    "megatron_run.py": "megatron",
    "trainers.py": "transformers",
}
"""What is imported already when a script starts; see ``launching.PRELOADS``."""


def start(
    launcher: Launcher,
    directory: Path,
    script: str,
    ranks: int,
    *arguments: object,
    preload: str = "",
    brief: bool = True,
    **config: Any,
) -> Job:
    """Run ``scripts/{script}`` as each of ``ranks`` ranks, and wait for them. It calls ``framework_run.run``.

    Args:
        preload: What it finds imported, where ``PRELOADED`` does not say it.
        brief: Whether its end is of no interest; see ``launching``.
        config: What is monitored; ``OF_PARAMETERS`` where it says nothing.
    """
    results = directory / "results"
    results.mkdir()
    how = {"preload": preload or PRELOADED.get(Path(script).name, ""), "brief": brief, "FRAMEWORK_RESULTS": str(results)}
    started = launcher.start_ranks(ranks, str(SCRIPTS / script), *arguments, config=OF_PARAMETERS | config, **how)
    ends = [one.end() for one in started]
    assert [ended.status for ended in ends] == [0] * ranks, "\n".join(ended.err[-3000:] for ended in ends)
    told = [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    plain, monitored = ([one[how] for one in told] for how in ("plain", "monitored"))
    return Job(launcher.base, plain, monitored, [ended.err for ended in ends])


def shape_of(row: Row) -> tuple[int, ...]:
    """What the rank that wrote it held; a file writes it as JSON."""
    return tuple(json.loads(row.values["shape"]))


def sum_of(row: Row) -> float:
    """Of the elements that the rank held; of none, 0, and the mean is an empty cell."""
    return row.values["mean"] * math.prod(shape_of(row)) if math.prod(shape_of(row)) else 0.0


def assert_norms_of_clipping(job: Job, limit: float) -> None:
    """The norms before and after clipping are those that the framework reports; without a limit (0) there is none after it."""
    reported = job.plain[0]["gradients"]
    if limit:
        assert job.numbers("grad_norm", 0) == pytest.approx(reported, rel=1e-5)
        assert job.numbers("grad_norm_clipped", 0) == pytest.approx([min(norm, limit) for norm in reported], rel=1e-5)
    else:
        assert job.numbers("grad_norm", 0) in ([], pytest.approx(reported, rel=1e-5))
        assert job.numbers("grad_norm_clipped", 0) == []
