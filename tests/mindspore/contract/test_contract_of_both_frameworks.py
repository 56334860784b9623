"""One contract for both frameworks: each job of a table records the same in PyTorch and in MindSpore."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from both_frameworks import Recorded, recorded, trained
from contract_jobs import DIFFERENCES, FIELDS_OUTSIDE, JOBS, KINDS_OUTSIDE, Difference, Job
from pydantic import BaseModel
from twins import FRAMEWORKS, Twin
from typer.testing import CliRunner

import monitor.mindspore
import monitor.pytorch
from monitor.cli import app
from monitor.config.model import MonitorConfig
from monitor.series import KINDS
from monitor.stats.ops import OPS

ROOT = Path(__file__).resolve().parents[3]
WITHIN = 1e-5
IN_UNITS_OF_ELEMENTS = ("min", "max", "mean", "norm", "std", "absmax", "rms", "absmean")
"""Sums may cancel: their errors are relative to the largest element."""


class Both(NamedTuple):
    """What a job recorded in PyTorch and in MindSpore."""

    torch: Recorded
    mindspore: Recorded


RunJob = Callable[[str], Both]


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> RunJob:
    """Runs a job in both frameworks, once."""
    done: dict[str, Both] = {}

    def run(name: str) -> Both:
        if name not in done:
            done[name] = Both(*(recorded(one, JOBS[name], tmp_path_factory.mktemp("job")) for one in FRAMEWORKS))
        return done[name]

    return run


@pytest.fixture(scope="module")
def bits_without_monitor() -> Callable[[type[Twin], Job], dict[str, bytes]]:
    """Trains a job without a monitor, once for all jobs that train the same."""
    done: list[tuple[type[Twin], Job, dict[str, bytes]]] = []

    def bits(framework: type[Twin], job: Job) -> dict[str, bytes]:
        training = job.without_monitor()
        known = [found for one, other, found in done if (one, other) == (framework, training)]
        if not known:
            known = [trained(framework, training)]
            done.append((framework, training, known[0]))
        return known[0]

    return bits


# --- Rows: the same places, and in each the same numbers.


class Unlike(NamedTuple):
    """One number that the frameworks do not have in common. A row of one framework has the column ``row``."""

    kind: str
    place: tuple[Any, ...]
    column: str
    torch: Any
    mindspore: Any

    def is_covered_by(self, difference: Difference, job: str) -> bool:
        return difference.covers(job, self.kind, self.place[1], self.column)


def compared(both: Both) -> Iterator[Unlike]:
    for kind in {*both.torch.rows, *both.mindspore.rows}:
        one, other = both.torch.rows.get(kind, {}), both.mindspore.rows.get(kind, {})
        for place in {*one, *other}:
            if place not in one or place not in other:
                yield Unlike(kind, place, "row", place in one, place in other)
            else:
                yield from (Unlike(kind, place, *found) for found in compared_rows(one[place], other[place]))


def compared_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    scale = max((abs(x) for x in (one.get("absmax"), other.get("absmax")) if x is not None and math.isfinite(x)), default=0.0)
    for column in {*one, *other}:
        a, b = one.get(column), other.get(column)
        if not are_alike(a, b, scale if column in IN_UNITS_OF_ELEMENTS else 0.0):
            yield column, a, b


def are_alike(a: Any, b: Any, scale: float = 0.0) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a.removeprefix("torch.") == b.removeprefix("mindspore.")
    if not isinstance(a, float) or not isinstance(b, float):
        return bool(a == b)
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=WITHIN, abs_tol=WITHIN * scale)


@pytest.mark.parametrize("name", JOBS)
def test_the_rows_of_a_job_are_the_same_in_both(run_job: RunJob, name: str) -> None:
    both = run_job(name)
    assert set(both.torch.rows) == set(both.mindspore.rows) == set(JOBS[name].kinds)
    unlike = [one for one in compared(both) if not any(one.is_covered_by(known, name) for known in DIFFERENCES)]
    assert sorted(unlike, key=str) == []


@pytest.mark.parametrize("known", DIFFERENCES, ids=lambda one: one.job)
def test_a_difference_that_is_allowed_is_there(run_job: RunJob, known: Difference) -> None:
    assert any(one.is_covered_by(known, known.job) for one in compared(run_job(known.job)))


def test_gradients_of_micro_batches_add_up_to_those_of_pytorch(run_job: RunJob) -> None:
    both = run_job("micro-batches")
    sums, parts = (one.rows["grad_unreduced"] for one in both)
    assert set(sums) == set(parts)
    for (chunk, name, step, micro_step), row in sums.items():
        means = [parts[chunk, name, step, each]["mean"] for each in range((micro_step or 0) + 1)]
        assert are_alike(row["mean"], sum(means), row["absmax"])


@pytest.mark.parametrize("kind", ["adam_update", "adam_ratio"])
def test_histograms_of_updates_are_the_same_but_for_elements_on_an_edge(run_job: RunJob, kind: str) -> None:
    of_torch, of_mindspore = (one.histograms(kind) for one in run_job("updates"))
    assert set(of_torch) == set(of_mindspore)
    for place, counts in of_torch.items():
        moved = np.abs(np.cumsum(np.array(counts) - np.array(of_mindspore[place])))
        if kind == "adam_update" or place[1]:  # the ratios of the first step are 1 or -1, all on an edge
            assert moved.max() <= 1, place


# --- What is recorded beside rows.


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_training_has_the_same_bits_as_without_a_monitor(
    run_job: RunJob,
    bits_without_monitor: Callable[[type[Twin], Job], dict[str, bytes]],
    framework: type[Twin],
    name: str,
) -> None:
    assert run_job(name)[FRAMEWORKS.index(framework)].bits == bits_without_monitor(framework, JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_the_same_steps_were_written_or_skipped(run_job: RunJob, name: str) -> None:
    of_torch, of_mindspore = (one.steps() for one in run_job(name))
    assert of_torch == of_mindspore


def test_identifiers_of_batches_are_the_same(run_job: RunJob) -> None:
    of_torch, of_mindspore = (one.batches() for one in run_job("numbers of the run"))
    assert of_torch == of_mindspore
    assert len(of_torch) == JOBS["numbers of the run"].steps


def test_the_calls_that_read_the_current_step_return_the_same(run_job: RunJob) -> None:
    of_torch, of_mindspore = (one.metrics for one in run_job("in memory"))
    assert all(of_torch)
    for ours, theirs in zip(of_torch, of_mindspore, strict=True):
        assert set(ours) == set(theirs)
        assert [found for tag in ours for found in compared_rows(ours[tag], theirs[tag])] == []


def test_the_same_alerts_reach_callbacks_and_files(run_job: RunJob) -> None:
    both = run_job("alerts")
    of_torch, of_mindspore = (set(one.alerts) for one in both)
    assert of_torch == of_mindspore
    assert {rule for *_, rule, _ in of_torch} == {"AnomalyNan", "AnomalyTurbulence"}
    # The number of the recording is part of a file's name.
    files = [{re.sub(r"-\d+", "", path.name) for path in one.base.glob("anomaly_detected/rank0/*.json")} for one in both]
    assert files == [{"anomaly.json", "judged.json"}] * 2


def test_the_same_numbers_are_passed_on(run_job: RunJob) -> None:
    both = run_job("forwarded")
    for of_torch, of_mindspore in ([one.passed_on for one in both], [one.exported() for one in both]):
        assert of_torch == pytest.approx(of_mindspore, rel=WITHIN, abs=WITHIN)
        assert of_torch


def test_the_structure_and_the_modules_with_a_call_stack_are_the_same(run_job: RunJob) -> None:
    of_torch, of_mindspore = (one.structure() for one in run_job("structure"))
    for name in ("0:", "0:first"):  # MindSpore lists the gradient of the network's input, too: a program may ask for it
        assert {*of_mindspore[name].pop("input_grad")} - {*of_torch[name].pop("input_grad")} == {"0"}
    assert of_torch == of_mindspore
    assert of_torch
    ours, theirs = (one.stacks() for one in run_job("stacks"))
    assert ours == theirs
    assert ours


COMMANDS = {
    "merge": ("alerts", ["merge", "BASE", "-o", "OUT/merged"]),
    "report": ("alerts", ["report", "BASE", "--json"]),
    "top": ("alerts", ["top", "BASE", "--once"]),
    "query": ("alerts", ["query", "BASE", "--csv", "select name, step, norm from param_updated order by step, name"]),
    "convert": ("alerts", ["convert", "BASE", "--to", "sqlite", "-o", "OUT"]),
    "precision": ("alerts", ["precision", "BASE"]),
    "rank-anomalies": ("alerts", ["rank-anomalies", "-d", "BASE", "-o", "OUT/found.json"]),
    "ctl": ("dynamic", ["ctl", "BASE", "status"]),
}
"""Those that read one run. The next test runs ``compare``."""

OF_A_RUN = re.compile(r"\b[0-9a-f]{12,32}\b|\b\d\d:\d\d:\d\d\b|\b[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d\b|(?<=\n0 {5})\d+(?= +ended)")
"""The id of a job, times, and the number of a recording in this process: they differ between any two runs."""
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")


def said_by(arguments: list[str], one: Recorded, outside: Path) -> tuple[int, list[str], list[float]]:
    """The exit status of a command, its words, and its numbers, both sorted: frameworks choose the order of calls in a step."""
    places = {"BASE": str(one.base), "OUT": str(outside)}
    given = [re.sub("^(BASE|OUT)", lambda found: places[found[0]], argument) for argument in arguments]
    outcome = CliRunner().invoke(app, given, env={"COLUMNS": "300"})
    text = OF_A_RUN.sub("", outcome.output.replace(str(one.base), "BASE").replace(str(outside), "OUT"))
    return outcome.exit_code, sorted(NUMBER.sub("", text).split()), sorted(map(float, NUMBER.findall(text)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same_of_both(run_job: RunJob, command: str, tmp_path: Path) -> None:
    job, arguments = COMMANDS[command]
    of_torch, of_mindspore = (said_by(arguments, one, tmp_path / f"{i}") for i, one in enumerate(run_job(job)))
    assert of_torch[:2] == of_mindspore[:2]
    assert of_torch[0] in (0, 1), of_torch
    assert of_torch[2] == pytest.approx(of_mindspore[2], rel=WITHIN, abs=WITHIN)


@pytest.mark.parametrize("how", [(), ("--whole",)])
def test_the_command_compare_finds_both_the_same(run_job: RunJob, how: tuple[str, ...]) -> None:
    bases = [str(one.base) for one in run_job("micro-batches")]
    outcome = CliRunner().invoke(app, ["compare", *how, *bases], env={"COLUMNS": "300"})
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.startswith("the same: ")
    assert "only the first is compared" in outcome.output


# --- Nothing can be forgotten: kinds, fields, statistics and calls are in the table, or outside with a reason.


def fields_in(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The paths of all fields."""
    for name, one in model.model_fields.items():
        inner = one.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields_in(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def paths_in(fields: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """The paths of the fields that a configuration sets."""
    for name, value in fields.items():
        if prefix + name in known:
            yield prefix + name
        else:
            yield from paths_in(value, known, f"{prefix}{name}.")


def test_every_kind_is_in_a_job_or_outside_with_a_reason() -> None:
    assert sorted([*{kind for job in JOBS.values() for kind in job.kinds}, *KINDS_OUTSIDE]) == sorted(KINDS)


def test_every_field_is_in_a_job_or_outside_with_a_reason() -> None:
    known = set(fields_in(MonitorConfig))
    assert sorted([*{path for job in JOBS.values() for path in paths_in(job.fields, known)}, *FIELDS_OUTSIDE]) == sorted(known)


def test_every_statistic_is_in_a_job() -> None:
    assert {op for job in JOBS.values() for op in job.fields.get("ops", ())} == set(OPS)


@pytest.mark.parametrize("reason", sorted({*KINDS_OUTSIDE.values(), *FIELDS_OUTSIDE.values()}))
def test_what_is_outside_has_tests_of_its_own(reason: str) -> None:
    (path,) = re.findall(r"tests/\S+\.py", reason)
    assert (ROOT / path).is_file()


def test_both_monitors_have_the_same_methods() -> None:
    of_torch, of_mindspore = (
        {
            name: list(inspect.signature(one).parameters) if callable(one) else type(one)
            for name in dir(room.TrainerMon)
            if not name.startswith("_") and (one := getattr(room.TrainerMon, name)) is not None
        }
        for room in (monitor.pytorch, monitor.mindspore)
    )
    assert of_torch == of_mindspore


# --- The table of the document names all of it.


@pytest.fixture(scope="module")
def table() -> str:
    text = (ROOT / "docs" / "mindspore.md").read_text(encoding="utf-8")
    return text.partition("capability by capability\n")[2].partition("\n## ")[0]


def test_the_document_names_every_kind_field_and_job(table: str) -> None:
    named = set(re.findall(r"`([^`]+)`", table))
    assert {*KINDS, *MonitorConfig.model_fields, *JOBS} - named == set()


def test_every_command_of_the_document_is_run_on_both(table: str) -> None:
    (row,) = (line for line in table.splitlines() if line.startswith("| commands |"))
    assert set(re.findall(r"`([^`]+)`", row.split("|")[2])) == {*COMMANDS, "compare"}


def test_the_tests_that_the_document_names_exist(table: str) -> None:
    paths = re.findall(r"`(tests/[^`]+)`", table)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert paths
