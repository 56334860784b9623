"""Two data-parallel ranks of MindSpore, started by ``msrun``: what they record, what comes of it, and that they train alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, ended_job
from reading_back import Output
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app as rank_anomalies
from monitor.coordinator.manifest_format import read_manifest
from monitor.coordinator.series_file import read_series
from monitor.merge.cli import app as monitor_merge
from monitor.merge.outputs import read_merged
from monitor.series import Placement

STEPS, FAULTY_STEP, FAULTY_RANK = 4, 2, 1
PARAMETERS = ("first.weight", "first.bias", "second.weight", "second.bias")
OF_FAULTS = ("AnomalyNan", "Copies of", "changed after the optimizer's step")
SHAPES = dict(zip(PARAMETERS, ([5, 4], [5], [2, 5], [2]), strict=True))
OF_EVERY_RANK = {"actv", "actv_grad", "grad_unreduced", "other", "run"}
OF_THE_FIRST = {"grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"}

Numbers = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("data_parallel.py", tmp_path_factory.mktemp("job"), base, 2, msrun=True)


@pytest.fixture
def everything(job: Ranks, base: Path) -> Output:  # noqa: ARG001
    return Output(base / "everything" / "output")


@pytest.fixture
def fault(job: Ranks, base: Path) -> Output:  # noqa: ARG001
    return Output(base / "fault" / "output")


def kinds_in(directory: Path) -> set[str]:
    return {path.stem.rsplit("_", 1)[0] for path in directory.glob("*_*-*.csv")}


def seen(job: Ranks, rank: int, step: int, what: str, part: str = "plain") -> dict[str, Numbers]:
    """What the loop of a rank saw."""
    found: dict[str, Any] = job.ranks[rank].told[0][part]["seen"][step][what]
    return {name: np.array(values, np.float32) for name, values in found.items()}


def row_of(*tensors: Numbers) -> dict[str, Any]:
    """The statistics of tensors, as one; the shape is that of the first."""
    together = np.concatenate([one.astype(np.float64).ravel() for one in tensors])
    close = {"mean": together.mean(), "norm": np.linalg.norm(together)}
    approximate = {op: pytest.approx(value, rel=1e-6, abs=1e-9) for op, value in close.items()}
    exact = {"min": together.min(), "max": together.max(), "nans": 0, "dtype": "mindspore.float32"}
    return exact | approximate | {"shape": json.dumps(list(tensors[0].shape))}


def rows_of(output: Output, kind: str, rank: int, step: int) -> dict[str, dict[str, Any]]:
    return {row.name: row.values for row in output.rows(kind, output.directories()[rank]) if row.step == step}


def test_ranks_end_well_and_say_nothing_that_is_none_of_the_fault(job: Ranks) -> None:
    assert (job.status, [rank.status for rank in job.ranks]) == (0, [0, 0])
    assert [line for rank in job.ranks for line in rank.warnings if not any(of in line for of in OF_FAULTS)] == []


@pytest.mark.parametrize(("monitored", "plain"), [("everything", "plain"), ("fault", "plain fault")])
def test_losses_and_weights_of_both_ranks_are_those_of_unmonitored_ones_in_every_bit(
    job: Ranks, monitored: str, plain: str
) -> None:
    for rank in job.ranks:
        (told, _) = rank.told
        assert len(told[plain]["losses"]) == STEPS
        assert len(told[plain]["weights"]) == len(PARAMETERS)
        assert told[monitored] == {what: told[plain][what] for what in ("losses", "weights")} | {"seen": []}


def test_ranks_learn_alike_from_data_of_their_own(job: Ranks) -> None:
    one, other = (rank.told[0]["plain"] for rank in job.ranks)
    assert one["weights"] == other["weights"]
    assert set(one["losses"]).isdisjoint(other["losses"])


def test_what_ranks_hold_alike_is_written_by_the_first_and_the_rest_by_both(everything: Output) -> None:
    first, second = everything.directories()
    assert kinds_in(first) == OF_EVERY_RANK | OF_THE_FIRST
    assert kinds_in(second) == OF_EVERY_RANK | {"replica"}


def test_ranks_are_in_one_job_and_in_one_group_and_nothing_was_lost(everything: Output) -> None:
    first, second = (read_manifest(directory / "manifest.json") for directory in everything.directories())
    assert first.job_id == second.job_id
    assert first.timestamp == second.timestamp
    for rank, one in enumerate((first, second)):
        assert (one.rank, one.world_size, one.groups, one.job_agreed) == (rank, 2, {"dp": (0, 1)}, True)
        assert (list(one.steps.written.steps()), one.dropped, one.lost, one.failures) == (list(range(STEPS)), {}, {}, {})
        assert one.closed


def test_manifests_say_which_series_are_replicas(everything: Output) -> None:
    for directory in everything.directories():
        placed = {one.series: one.placement for one in read_series(directory, read_manifest(directory / "manifest.json"))}
        replicas = {one.kind for one, placement in placed.items() if placement == Placement(replicas=(0, 1))}
        assert replicas in (OF_THE_FIRST, {"replica"})
        assert {one.kind for one, placement in placed.items() if placement == Placement()} <= OF_EVERY_RANK


@pytest.mark.parametrize("rank", [0, 1])
def test_unreduced_gradients_are_those_that_each_rank_computed(job: Ranks, everything: Output, rank: int) -> None:
    for step in range(STEPS):
        expected = {name: row_of(one) for name, one in seen(job, rank, step, "unreduced").items()}
        assert rows_of(everything, "grad_unreduced", rank, step) == expected


def test_reduced_gradients_are_the_means_of_both_unreduced_ones(job: Ranks, everything: Output) -> None:
    for step in range(STEPS):
        one, other = (seen(job, rank, step, "unreduced") for rank in (0, 1))
        expected = {name: row_of((one[name] + other[name]) / np.float32(2)) for name in PARAMETERS}
        found = rows_of(everything, "grad_reduced", 0, step)
        assert {name: {op: row[op] for op in row if op != "checksum"} for name, row in found.items()} == expected
        assert {len(row["checksum"]) for row in found.values()} == {16}


def test_the_reducer_of_mindspore_gives_means_too(job: Ranks, fault: Output) -> None:
    one, other = (seen(job, rank, 0, "unreduced", "plain fault") for rank in (0, 1))
    expected = {name: row_of((one[name] + other[name]) / np.float32(2)) for name in PARAMETERS}
    found = rows_of(fault, "grad_reduced", 0, 0)
    assert {name: row["norm"] for name, row in found.items()} == {name: row["norm"] for name, row in expected.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_activations_are_of_the_data_of_each_rank(job: Ranks, everything: Output, rank: int) -> None:
    for step in range(STEPS):
        batch = np.array(job.ranks[rank].told[0]["plain"]["seen"][step]["input"], np.float32)
        found = rows_of(everything, "actv", rank, step)
        assert [found[name] for name in (".input", "first.input")] == [row_of(batch)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_communicated_in_a_step_is_one_row_of_what_goes_in_and_one_of_what_comes_out(
    job: Ranks, everything: Output, rank: int
) -> None:
    for step in range(STEPS):
        both = [seen(job, one, step, "unreduced") for one in (0, 1)]
        given = [both[rank][name] for name in PARAMETERS]
        sums = [both[0][name] + both[1][name] for name in PARAMETERS]
        assert rows_of(everything, "other", rank, step) == {
            "all_reduce.pre_0": row_of(*given) | {"calls": 4},
            "all_reduce.post_0": row_of(*sums) | {"calls": 4},
        }


def test_replicas_that_another_rank_writes_have_the_norms_that_it_wrote(everything: Output) -> None:
    for step in range(STEPS):
        expected = {
            f"{kind}/{name}": row["norm"] for kind in OF_THE_FIRST for name, row in rows_of(everything, kind, 0, step).items()
        }
        assert len(expected) == len(PARAMETERS) * (5 if step else 3)  # an optimizer that has not stepped has no moments
        assert {name: row["norm"] for name, row in rows_of(everything, "replica", 1, step).items()} == expected


@pytest.mark.parametrize("written", ["csv", "hdf5"])
def test_the_files_of_both_ranks_merge_without_a_flaw_and_each_tensor_is_there_once(
    job: Ranks, everything: Output, tmp_path: Path, written: str
) -> None:
    result = CliRunner().invoke(monitor_merge, [str(everything.base), "-o", str(tmp_path / "merged"), "--format", written])
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "merged" / "global").glob("grad_reduced_*")
    rows = {(row["name"], row["step"]): (row["norm"], row["ranks"]) for row in read_merged(path).to_pylist()}
    assert rows == {
        (name, step): (row_of(one)["norm"], "0") for step in range(STEPS) for name, one in seen(job, 0, step, "reduced").items()
    }
    report = json.loads((tmp_path / "merged" / "report.json").read_text())
    assert (report["ranks"], report["clean"], report["rows"]["replica"]) == ([0, 1], True, 4 * (3 + 5 * (STEPS - 1)))


def test_files_in_csv_alone_merge_too(fault: Output, tmp_path: Path) -> None:
    result = CliRunner().invoke(monitor_merge, [str(fault.base), "-o", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    (path, *_) = sorted((tmp_path / "merged" / "global").glob("grad_unreduced_*"))
    assert {row["ranks"] for row in read_merged(path).to_pylist()} == {"0", "1"}


def test_of_a_nan_in_the_data_of_one_rank_the_ranking_names_tensor_rank_and_step(fault: Output, tmp_path: Path) -> None:
    found = tmp_path / "first.json"
    result = CliRunner().invoke(rank_anomalies, ["-d", str(fault.base), "-k", "1", "-o", str(found)], env={"COLUMNS": "300"})
    assert result.exit_code == 1, result.output
    (first,) = json.loads(found.read_text()).values()
    assert (first["tag_name"], first["step"]) == (f"0:.input:0/rank{FAULTY_RANK}/actv", FAULTY_STEP)
    assert "only on rank 1 of its 2 data-parallel replicas" in " ".join(result.output.split())


def test_the_other_rank_is_reached_by_the_fault_where_gradients_are_reduced(fault: Output) -> None:
    events = json.loads((fault.base / "anomaly_detected" / "rank0" / "anomaly-1.json").read_text())
    of_the_step = {event["tag_name"].rsplit("/", 1)[1] for event in events.values() if event["step"] == FAULTY_STEP}
    assert of_the_step == {"grad_reduced", "param_updated"}


def test_with_the_log_alone_both_ranks_end_after_the_first_step_and_the_log_is_there(job: Ranks, base: Path) -> None:
    ended = {"ended": "cc_log_only ends the run here, after the first step.", "status": 0}
    assert [rank.told[1] for rank in job.ranks] == [ended, ended]
    for directory in Output(base / "log" / "output").directories():
        with open(directory / "communication_log.csv", newline="") as text:
            entries = list(csv.DictReader(text))
        assert [{key: entry[key] for key in ("op", "group", "dtype", "shape", "calls")} for entry in entries] == [
            {"op": "all_reduce", "group": "world", "dtype": "mindspore.float32", "shape": str(SHAPES[name]), "calls": "1"}
            for name in PARAMETERS
        ]
        assert "data_parallel.py[" in entries[0]["stack"]
        assert list(read_manifest(directory / "manifest.json").steps.written.steps()) == [0]
        assert "other" not in kinds_in(directory)


def test_nothing_is_left_that_is_not_finished(job: Ranks, base: Path) -> None:  # noqa: ARG001
    directories = [found for part in ("everything", "fault", "log") for found in Output(base / part / "output").directories()]
    assert len(directories) == 6
    assert [path.name for directory in directories for path in directory.iterdir() if path.name.startswith(".")] == []


def test_a_flipped_bit_is_said_while_the_ranks_train_and_is_an_event_of_both(job: Ranks, base: Path) -> None:  # noqa: ARG001
    flipped = Output(base / "flipped" / "output")
    (said,) = (
        one.said
        for directory in flipped.directories()
        for one in read_manifest(directory / "manifest.json").wrong_bits
        if one.check == "copies"
    )
    assert said.startswith(f"Copies of param_origin differ in step {FAULTY_STEP}: first.weight: ranks 0 (")
    for rank in (0, 1):
        events = json.loads((flipped.base / "anomaly_detected" / f"rank{rank}" / "anomaly-2.json").read_text())
        rules = [one["message"].split()[1] for one in events.values()]
        assert rules == ["ChangedBetweenSteps", "UnlikeCopies"][1 - rank :]
