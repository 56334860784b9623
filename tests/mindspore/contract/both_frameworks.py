"""Runs a job of the table in one framework, and reads back what it recorded."""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_jobs import Job
from twins import BATCH, Twin
from watching_cells import batch

import monitor
from monitor.coordinator.batches import read_batches
from monitor.query.sources import QueryError
from monitor.recording.run import RunEnded
from monitor.sinks.hdf5 import read_hdf5

COMMON: dict[str, Any] = {
    "format": "parquet",
    "ops": ["min", "max", "mean", "norm", "std", "zeros", "nans", "infs", "absmax", "rms", "shape", "dtype"],
    "run_numbers": False,
}
"""The fields of a job that does not say otherwise."""

NOT_COMPARED = {"kind", "rank", "dp", "tp", "pp", "stage", "global_name", "call_id"}
"""Columns of a row that say nothing of the tensor. ``call_id`` is the order of measurement, which the frameworks choose."""

Place = tuple[int, str, int, int | None]
"""Chunk, name, step and micro-step."""
Rows = dict[Place, dict[str, Any]]


@dataclass
class Recorded:
    """What a job recorded in one framework.

    Attributes:
        bits: The parameters after the last step.
        rows: By kind.
        metrics: What the calls that read the current step returned after each step.
        alerts: What alert callbacks were given, without values: step, kind, name, micro-step, rule, statistic.
        passed_on: What a function of ``forward_to`` was given, by name and step.
    """

    base: Path
    bits: dict[str, bytes] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[tuple[Any, ...]] = field(default_factory=list)
    passed_on: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        (found,) = self.base.glob("*-rank0-*")
        return found

    def steps(self) -> dict[str, Any]:
        """What happened to each step."""
        found: dict[str, Any] = json.loads((self.directory / "manifest.json").read_text())["steps"]
        return found

    def batches(self) -> dict[int, Any]:
        return dict(read_batches(self.directory, range(100)))

    def structure(self) -> Any:
        """The structure of the model. Types are called ``float32`` in both."""
        (path,) = self.base.glob("module_struct/rank0/module_struct.json")
        return json.loads(re.sub(r"dtype=(?:torch\.)?(\w+)", lambda found: f"dtype={found[1].lower()}", path.read_text()))

    def stacks(self) -> set[str]:
        """The modules that have a call stack."""
        with open(self.directory / "stack_info.csv", newline="") as file:
            return {row["module_name"] for row in csv.DictReader(file) if row["stack_info"]}

    def exported(self) -> dict[str, float]:
        """The numbers of the text file that ``forward`` names, which has those of the last step."""
        lines = [line for line in (self.base / "forwarded.prom").read_text().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def histograms(self, kind: str) -> dict[tuple[str, int], list[int]]:
        (path,) = self.directory.glob("*.h5")
        return {(row["name"], row["step"]): row["histogram"] for row in read_hdf5(path, kinds=[kind]).to_pylist()}


class Loop:
    """A training loop without a monitor."""

    def __init__(self, framework: type[Twin], job: Job) -> None:
        self.job, self.twin = job, framework(job.network, job.optimizers, recomputes=job.recomputes)

    def train(self) -> None:
        job, twin = self.job, self.twin
        for step in range(job.first, job.first + job.steps):
            self.step_begins(step)
            twin.evaluate(batch(99)[0])
            for number in range(job.micro_batches):
                x, y = batch(step * job.micro_batches + number)
                loss = twin.backward(x, np.full_like(y, np.nan) if step == job.faulty else y)
                self.micro_batch_ended(step, number, loss)
            if job.clips is not None:
                twin.clip(job.clips)
            if step not in job.skipped:
                twin.step()
            twin.forget()
            self.step_ended()

    def step_begins(self, step: int) -> None:
        """Nothing else is called."""

    def micro_batch_ended(self, step: int, number: int, loss: Any) -> None:
        """Nothing else is called."""

    def step_ended(self) -> None:
        """Nothing else is called."""


class MonitoredLoop(Loop):
    """The same loop, which calls its monitor as programs do."""

    def __init__(self, framework: type[Twin], job: Job, found: Recorded) -> None:
        super().__init__(framework, job)
        self.found, self.monitor = found, self._attached()
        if "alert" in job.fields:
            self.monitor.add_alert_callback(lambda events: found.alerts.extend(event[1:7] for event in events))
        if "forward" in job.fields:
            self.monitor.forward_to(self._passed_on)

    def train(self) -> None:
        with self.monitor, suppress(RunEnded):
            super().train()

    def step_begins(self, step: int) -> None:
        if step in self.job.switched:
            with pytest.deprecated_call():
                self.monitor.reload_xy(self.job.switched[step])

    def micro_batch_ended(self, step: int, number: int, loss: Any) -> None:
        self.monitor.log(loss=loss, tokens=BATCH, batch=[f"shard-{step}", number])

    def step_ended(self) -> None:
        self.monitor.batch_ended()
        if "api" in self.monitor.config.formats:
            self.found.metrics += [*self.monitor.generate_wgrad_metrics(), *self.monitor.generate_xy_metrics()]

    def _passed_on(self, numbers: dict[str, float], step: int) -> None:
        self.found.passed_on |= {(name, step): x for name, x in numbers.items()}

    def _attached(self) -> Any:
        job, twin, fields = self.job, self.twin, {**COMMON, **self.job.fields}
        if job.watched:
            return monitor.watch(twin.model, twin.optimizers, None, start_iteration=job.first, **fields)
        path = Path("config.json")
        path.write_text(json.dumps(fields))
        made = twin.monitor.TrainerMon(path, params_have_main_grad=False)
        made.set_monitor(twin.model, job.micro_batches, twin.optimizers, start_iteration=job.first)
        return made


def recorded(framework: type[Twin], job: Job, base: Path) -> Recorded:
    """Train a job in a framework, with its monitor attached."""
    found = Recorded(base)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MONITOR_OUTPUT_DIR", str(base))
        patched.chdir(base)
        for name, value in job.environment.items():
            patched.setenv(name, value)
        loop = MonitoredLoop(framework, job, found)
        loop.train()
    found.bits = loop.twin.bits()
    with suppress(QueryError):  # some jobs write no rows
        run = monitor.open_run(base)
        found.rows = {kind: _rows(run.rows(kind).to_pylist()) for kind in run.kinds}
    return found


def trained(framework: type[Twin], job: Job) -> dict[str, bytes]:
    """The parameters after the same training without a monitor."""
    loop = Loop(framework, job)
    loop.train()
    return loop.twin.bits()


def _rows(found: list[dict[str, Any]]) -> Rows:
    rows: Rows = {}
    for row in found:
        place = row["vpp_stage"], row["name"], row["step"], row["micro_step"]
        assert place not in rows
        rows[place] = {column: value for column, value in row.items() if column not in NOT_COMPARED}
    return rows
