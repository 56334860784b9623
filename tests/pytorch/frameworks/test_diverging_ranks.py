"""Ranks whose copies of the weights have diverged: the report blames neither device nor data for alerts that came later."""

from __future__ import annotations

import json
from collections.abc import Callable

from jobs import Job
from typer.testing import CliRunner

from monitor.report.cli import app

WATCHED = {
    "xy_distribution": True,
    "all_xy": True,
    "update_ratio": True,
    "replica_check": True,
    "run_numbers": True,
    "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 10}}], "dump": True},
    "format": "parquet",
}


def test_a_learning_rate_of_one_rank_is_the_cause_of_what_this_rank_computes_later(run_job: Callable[..., Job]) -> None:
    job = run_job("diverging_ranks.py", 3, brief=False, **WATCHED)
    result = CliRunner().invoke(app, [str(job.base), "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert "the learning rate of rank 1 rose from 0.003 to 0.3 in step 20" in told["verdict"]
    assert told["place"] == {"step": 20, "rank": 1, "kind": "run", "name": "learning_rate.0"}
    assert "device" not in told["next"]
    assert min(event["step"] for event in told["first_events"]) > 20
    assert {check["name"] for check in told["checks"] if check["state"] == "bad"} >= {"Alert rules", "Replicas agree"}
