"""How much was looked at: a ranking is green only where the rules have judged every step of every rank."""

from __future__ import annotations

import json

import pytest
from played_job import PlayedRank, ranked, replicas
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app
from monitor.anomalies.ranking.report import advice, notes
from monitor.coordinator.manifest_format import KILLED

ROWS = len(list(PlayedRank().rows()))


def ran(base, *options):
    """Exit status and what was said, in one line."""
    result = CliRunner().invoke(app, ["-d", str(base), *options], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.split())


def test_without_an_event_the_rows_ranks_and_steps_are_counted_that_were_judged(tmp_path):
    found = ranked(tmp_path, *replicas(4))
    assert (advice(found), found.is_well) == (f"No event in {4 * 3 * ROWS:,} rows of 4 ranks in 3 steps.", True)
    assert list(notes(found)) == []


def test_rules_without_a_row_to_judge_have_looked_at_nothing(tmp_path):
    found = ranked(tmp_path, PlayedRank(rows_judged=0))
    assert not found.is_well
    assert advice(found) == "Nothing was judged. No events does not mean healthy."
    [note] = notes(found)
    assert note.startswith("Not judged: no rank recorded a row that alert rules judge.")
    assert '"wg_distribution": true' in note


def test_a_rank_without_a_row_beside_others_is_named(tmp_path):
    one, other = replicas()
    other.rows_judged = 0
    found = ranked(tmp_path, one, other)
    assert (advice(found).partition(".")[0], found.is_well) == (f"No event in {3 * ROWS:,} rows of 1 rank in 3 steps", False)
    assert list(notes(found)) == ["Not judged: rank 1 recorded no row that alert rules judge."]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trained": (0, 9)}, "steps 3 to 9: they were not collected"),
        ({"trained": (0, 9), "config": {"collect_times": 3, "start_step": 0}}, "steps 3 to 9: collect_times is 3"),
        ({"steps": (5, 6), "trained": (0, 6), "config": {"start_step": 5}}, "steps 0 to 4: start_step is 5"),
        (
            {"steps": (0, 10, 20), "trained": (0, 29), "config": {"step_interval": 10, "start_step": 0}},
            "27 of the steps 1 to 29: step_interval is 10",
        ),
        (
            {"written": range(5), "trained": (0, 4)},
            "steps 3 to 4: they were recorded, but no alert rule was on or could judge them",
        ),
        ({"not_judged": {"the rules failed: ValueError": [3]}}, "step 3: the rules failed: ValueError"),
        ({"not_judged": {"queue full": [3, 4]}}, "steps 3 to 4: queue full"),
        ({"steps": (0, 2)}, "step 1: they were not collected"),
        (
            {"steps": (1, 3), "trained": (0, 3), "notes": {"micro_steps": "…"}},
            "step 0: they showed how many micro-batches a step has",
        ),
        ({"closed": False, "written": range(5)}, "steps 3 to 4: the rank did not end cleanly, or still runs"),
    ],
)
def test_steps_that_no_rule_has_judged_are_said_with_the_reason_and_the_status_is_1(changes, said, tmp_path):
    PlayedRank(**changes).write(tmp_path)
    status, told = ran(tmp_path)
    assert (status, f"Not judged: {said}." in told) == (1, True), told
    assert told.endswith("Not everything was judged.")


def test_steps_that_one_rank_alone_has_not_judged_are_said_to_be_its_own(tmp_path):
    one, other = replicas(steps=range(10))
    other.steps = range(6)
    found = ranked(tmp_path, one, other)
    assert list(notes(found)) == ["Not judged: steps 6 to 9 of rank 1: they were not collected."]


def test_of_chosen_steps_only_those_count(tmp_path):
    PlayedRank(steps=range(0, 30, 10), trained=(0, 29), config={"step_interval": 10}).write(tmp_path)
    assert ran(tmp_path, "-s", "0::10") == (0, ran(tmp_path, "-s", "0::10")[1])
    assert ran(tmp_path, "-s", "0::10")[1].endswith("No event in 3 steps of 1 rank.")
    assert ran(tmp_path, "-s", "0:10")[0] == 1


def test_chosen_steps_that_no_one_has_judged_are_not_called_clean(tmp_path):
    PlayedRank().write(tmp_path)
    status, said = ran(tmp_path, "-s", "100:200")
    assert (status, "Not judged: no rank has judged any of these steps." in said) == (1, True)
    assert "No event in" not in said


def test_a_rank_of_the_job_that_left_no_file_is_missing_whatever_groups_are_known(tmp_path):
    PlayedRank(1, {"mp": (1, 2)}).write(tmp_path)
    status, said = ran(tmp_path)
    assert (status, "ranks 0, 2 wrote no events and judged no step." in said) == (1, True)


def test_replicas_that_the_configuration_leaves_out_are_said(tmp_path):
    found = ranked(tmp_path, *replicas(config={"replica_check": False}))
    [note] = notes(found)
    assert note.startswith("replica_check is false: a tensor that one rank writes for several was judged on that rank only.")


def test_events_are_not_well_even_where_all_was_looked_at(tmp_path):
    PlayedRank().fire("actv", "b.output").write(tmp_path)
    assert ran(tmp_path)[0] == 1


def test_a_number_of_steps_that_no_run_has_is_not_gone_through_to_its_end(tmp_path):
    PlayedRank(trained=(0, 10**17)).write(tmp_path)
    assert ran(tmp_path)[0] == 1


def resumed_at_5(base, *, aside):
    """A rank that was killed after it had written steps 0 to 2, and resumed at step 5."""
    PlayedRank(steps=range(5, 8)).write(base)
    [path] = base.glob("*-rank0-*/manifest.json")
    manifest = json.loads(path.read_text())
    first = {key: manifest[key] for key in ("started", "saved", "series", "timestamp")}
    manifest |= {"resumed": [{**first, "job_id": "0" * 32, "closed": False, "first_step": 0}], "first_step": 5}
    manifest["steps"]["written"] = {"count": 6, "ranges": [[0, 2, 1], [5, 7, 1]], "rest": None}
    manifest["dropped"] = {KILLED: {"count": 2, "ranges": [[3, 4, 1]], "rest": None}}
    path.write_text(json.dumps(manifest))
    directory = base / f"anomaly_detected-before-{manifest['timestamp']}-{manifest['job_id'][:8]}"
    if aside:
        (directory / "rank0").mkdir(parents=True)
    return directory


def test_a_resumed_run_is_not_green_and_the_events_of_the_run_before_are_named(tmp_path):
    directory = resumed_at_5(tmp_path, aside=True)
    status, told = ran(tmp_path)
    where = f"Rank its events with -d {directory}."
    assert status == 1
    assert f"Not judged: steps 0 to 2: an earlier run recorded them. {where}" in told
    assert f"Not judged: steps 3 to 4: an earlier run was killed before they were written. {where}" in told


def test_a_resumed_run_without_the_events_of_the_run_before_is_not_green_either(tmp_path):
    resumed_at_5(tmp_path, aside=False)
    status, told = ran(tmp_path)
    assert status == 1
    assert f"steps 0 to 2: an earlier run recorded them. Its events are not beside {tmp_path / 'anomaly_detected'}." in told


def test_of_a_resumed_run_chosen_steps_of_its_own_are_whole(tmp_path):
    resumed_at_5(tmp_path, aside=True)
    assert ran(tmp_path, "-s", "5:7")[0] == 0
