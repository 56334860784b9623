"""Jobs that continued each other in directories of their own: one line of steps, where the manifests tell it for certain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_job import RecordedRank, merged, table, tensors
from sink_rows import Measured
from typer.testing import CliRunner

from monitor import QueryError, open_run
from monitor.merge.cli import app
from monitor.merge.discovery import choose, discover
from monitor.merge.execution import MergeError

MODEL = {"role": "torch/Net/AdamW/trained", "names": "0" * 16, "number": 0, "shapes": "0" * 16}
A, B, C = (letter * 32 for letter in "abc")


def job(
    base: Path,
    name: str,
    steps: range,
    value: float,
    *,
    hour: int = 0,
    until: int | None = None,
    closed: bool = False,
    rank: int = 0,
    world_size: int = 1,
    **facts: Any,
) -> RecordedRank:
    """A rank of a job that began in this hour and was saved for the last time in the next one, or ``until``."""
    one = RecordedRank(base, rank, world_size, job=name, suffix=f"{name[:6]}{rank:02x}")
    for step in steps:
        one.write(step, {"grad_reduced": [Measured("w", [value + step])]})
    one.close()
    path = one.directory / "manifest.json"
    known = json.loads(path.read_text())
    started, saved = (f"2026-01-01T{at:02}:00:00+00:00" for at in (hour, hour + 1 if until is None else until))
    known |= {"watched": MODEL, "started": started, "saved": saved, "closed": closed}
    config = known["config"] | facts.pop("config", {})
    path.write_text(json.dumps(known | {"config": config} | facts))
    return one


def curve(base: Path) -> dict[int, float]:
    """The value of the tensor by step."""
    rows = open_run(base).rows("grad_reduced", columns=["step", "max"]).to_pylist()
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["max"] for row in rows}


def asked(base: Path) -> str:
    with pytest.raises(MergeError) as refused:
        choose(discover(base), None)
    return str(refused.value)


def test_a_killed_job_and_the_one_that_was_requeued_are_one_line_of_steps_with_the_joint_named(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(4, 9), 100.0, hour=1, closed=True)
    report = merged(tmp_path).told()
    assert {row["step"]: row["max"] for row in tensors(tmp_path)} == {
        **{s: float(s) for s in range(4)},
        **{s: 100.0 + s for s in range(4, 9)},
    }
    assert curve(tmp_path) == {row["step"]: row["max"] for row in tensors(tmp_path)}
    joint = {"job_id": B, "continued": A, "step": 4, "redone": {"count": 2, "ranges": [[4, 5, 1]]}}
    assert report["joints"] == {"count": 1, "listed": [joint]}
    assert (report["job_id"], report["clean"]) == (B, True)


@pytest.mark.parametrize("names", [(A, B), (B, A)], ids=["in order", "the other way round"])
def test_jobs_that_began_in_the_same_second_are_in_order_of_their_first_steps(tmp_path: Path, names: tuple[str, str]) -> None:
    job(tmp_path, names[0], range(6), 0.0, until=0)
    job(tmp_path, names[1], range(4, 9), 100.0, closed=True)
    assert curve(tmp_path) == {**{s: float(s) for s in range(4)}, **{s: 100.0 + s for s in range(4, 9)}}


def test_the_command_names_the_joint_and_the_steps_that_were_recorded_again(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(4, 9), 100.0, hour=1, closed=True)
    said = CliRunner().invoke(app, [str(tmp_path)], env={"COLUMNS": "400"}).output
    assert "job bbbbbbbb continued job aaaaaaaa at step 4; known to be recorded again: steps 4 to 5" in said


def test_job_still_picks_the_one_before_the_joint(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(4, 9), 100.0, hour=1, closed=True)
    assert open_run(tmp_path, job="aaa").rows("grad_reduced")["step"].to_pylist() == [*range(6)]
    merged(tmp_path, job=A)
    assert table(tmp_path, "per_rank")["max"].to_pylist() == [float(step) for step in range(6)]


def test_a_job_that_was_killed_again_and_again_is_one_line_however_often(tmp_path: Path) -> None:
    """Two restarts from the same checkpoint, one that recorded nothing, and one that goes back behind the checkpoint before."""
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(4, 5), 100.0, hour=1)
    job(tmp_path, C, range(4, 8), 200.0, hour=2)
    job(tmp_path, "d" * 32, range(0), 300.0, hour=3)
    job(tmp_path, "e" * 32, range(2, 4), 400.0, hour=4, closed=True)
    assert curve(tmp_path) == {0: 0.0, 1: 1.0, 2: 402.0, 3: 403.0}
    told = merged(tmp_path).told()
    assert [(one["job_id"][0], one["continued"][0], one["step"]) for one in told["joints"]["listed"]] == [
        ("b", "a", 4),
        ("c", "b", 4),
        ("e", "c", 2),
    ]


def test_a_job_that_ended_cleanly_is_continued_where_it_ended(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0, closed=True)
    job(tmp_path, B, range(6, 9), 100.0, hour=1, closed=True)
    assert sorted(curve(tmp_path)) == [*range(9)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"steps": range(9)}),
        ({"steps": range(4, 8)}, {}),
        ({"closed": True}, {"steps": range(7, 9)}),
        ({}, {"watched": MODEL | {"names": "1" * 16}}),
        ({}, {"watched": MODEL | {"shapes": "1" * 16}}),
        ({}, {"watched": MODEL | {"number": 1}}),
        ({}, {"watched": None}),
        ({}, {"world_size": 2}),
        ({}, {"groups": {"dp": [0]}}),
        ({"until": 3}, {}),
        ({}, {"job_agreed": False}),
    ],
    ids=[
        "both begin at step 0",
        "both begin at the same step",
        "steps are left out after a clean end",
        "other parameters",
        "parameters of another size",
        "another recording of the process",
        "an unknown model",
        "another number of ranks",
        "other groups",
        "both ran at the same time",
        "a rank without the others",
    ],
)
def test_jobs_that_may_be_independent_are_asked_for(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    job(tmp_path, A, **{"steps": range(6), "value": 0.0, **first})
    job(tmp_path, B, **{"steps": range(4, 9), "value": 100.0, "hour": 1, **second})
    assert "there are 2 jobs here" in asked(tmp_path)
    with pytest.raises(QueryError, match="there are 2 jobs here"):
        open_run(tmp_path)


def test_a_restart_that_fits_two_earlier_jobs_is_asked_for(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(6), 100.0, hour=1)
    job(tmp_path, C, range(4, 8), 200.0, hour=2)
    assert "there are 3 jobs here" in asked(tmp_path)


def test_what_began_while_a_job_of_the_same_model_ran_is_asked_for(tmp_path: Path) -> None:
    job(tmp_path, A, range(6), 0.0)
    job(tmp_path, B, range(6), 100.0, until=5)
    job(tmp_path, C, range(4, 8), 200.0, hour=2)
    assert "there are 3 jobs here" in asked(tmp_path)


def test_with_auto_a_restart_at_step_0_after_a_kill_replaces_what_the_killed_run_recorded(tmp_path: Path) -> None:
    auto = {"config": {"append_output": "auto"}}
    job(tmp_path, A, range(3), 0.0, **auto)
    job(tmp_path, B, range(2), 100.0, hour=1, **auto)
    assert curve(tmp_path) == {0: 100.0, 1: 101.0}
    job(tmp_path, C, range(2), 200.0, hour=2, closed=True, **auto)
    assert curve(tmp_path) == {0: 200.0, 1: 201.0}
    job(tmp_path, "d" * 32, range(2), 300.0, hour=3, closed=True, **auto)
    assert "there are 2 jobs here" in asked(tmp_path)  # the one before had ended cleanly


@pytest.mark.parametrize(("first", "count"), [(4, 0), (3, 1)], ids=["done again", "lost in part"])
def test_an_unfinished_file_whose_steps_were_all_done_again_is_not_set_aside(first: int, count: int, tmp_path: Path) -> None:
    killed = job(tmp_path, A, range(4), 0.0)
    (killed.directory / f".grad_reduced_{first}-{first + 4}.csv.part").write_text("vpp_stage,name,step,max\n")
    job(tmp_path, B, range(4, 9), 100.0, hour=1, closed=True)
    assert merged(tmp_path).told()["set_aside"]["count"] == count


def test_a_rank_that_was_killed_before_its_first_step_adds_nothing_to_the_steps_that_others_did_again(tmp_path: Path) -> None:
    """What rank 1 still has of the run before is of other numbers than what rank 0 recorded anew."""
    for rank in range(2):
        job(tmp_path, A, range(6), 0.0, rank=rank, world_size=2)
    job(tmp_path, B, range(4, 6), 100.0, hour=1, rank=0, world_size=2)
    job(tmp_path, B, range(0), 100.0, hour=1, rank=1, world_size=2)
    rows = open_run(tmp_path).rows("grad_reduced", columns=["step", "rank", "max"]).to_pylist()
    assert {(row["step"], row["rank"]): row["max"] for row in rows} == {
        **{(step, rank): float(step) for step in range(4) for rank in range(2)},
        **{(step, 0): 100.0 + step for step in (4, 5)},
    }
    (gap,) = merged(tmp_path).told()["gaps"]["listed"]
    assert (gap["rank"], gap["steps"]["ranges"]) == (1, [[4, 5, 1]])


def test_nor_does_a_rank_that_continued_in_its_directory_and_was_killed_before_its_first_step(tmp_path: Path) -> None:
    """Run B recorded step 4 on rank 0 alone, and run C continued both directories at step 5."""
    for rank, first_of_b in enumerate((4, None)):
        runs = [
            {
                "job_id": name,
                "timestamp": "Dec03_21-34-40",
                "started": f"2026-01-01T{hour:02}:00:00+00:00",
                "saved": "2026-01-01",
            }
            | {"closed": False, "first_step": first, "last_step": last, "series": None}
            for hour, (name, first, last) in enumerate([(A, 0, 5), (B, first_of_b, 5)])
        ]
        job(tmp_path, C, range(8), 0.0, hour=2, rank=rank, world_size=2, resumed=runs, first_step=5)
    rows = open_run(tmp_path).rows("grad_reduced", columns=["step", "rank"]).to_pylist()
    assert [row["step"] for row in rows if row["rank"] == 0] == [*range(8)]
    assert [row["step"] for row in rows if row["rank"] == 1] == [0, 1, 2, 3, 5, 6, 7]
    assert [(one["step"], one["redone"]["ranges"]) for one in merged(tmp_path).told()["joints"]["listed"]] == [
        (4, [[4, 5, 1]]),
        (5, [[5, 5, 1]]),
    ]
