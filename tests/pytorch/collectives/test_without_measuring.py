"""``cc_log_only``, and runs that have nothing to communicate."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable

import pytest
import torch
from jobs import Job
from torch import nn
from watching import Output, attached, train

from monitor.config.model import CcDistribution
from monitor.failures import Failures
from monitor.pytorch.collectives import recording


@pytest.fixture
def output(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Output:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    return Output(tmp_path)  # type: ignore[arg-type]


def test_with_log_only_the_run_ends_on_every_rank_with_a_log_and_without_rows(run_ranks: Callable[..., Job]) -> None:
    job = run_ranks("log_only.py", 2, cc_log_only=True, others={"module_ranks": [0]})
    with open(job.directories[0] / "communication_log.csv", newline="") as file:
        (entry,) = csv.DictReader(file)
    assert (entry["op"], entry["shape"], entry["calls"]) == ("all_reduce", "[3]", "2")
    assert job.rows("other", 0) == []
    assert all("cc_log_only ends the run here" in said for said in job.said)


def test_without_a_process_group_that_is_said_and_the_rest_is_recorded(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="monitor")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with attached(output, model, optimizer, cc_distribution={"enable": True}, param_distribution=True):
        train(model, optimizer, 1, torch.randn(3, 2))
    assert "there is no process group" in caplog.text
    assert {row.name for row in output.rows("param_origin")} == {"weight", "bias"}


def test_where_a_launcher_has_announced_ranks_the_process_group_may_still_come(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 2)
    with attached(output, model, torch.optim.SGD(model.parameters()), cc_distribution={"enable": True}):
        assert "process group" not in caplog.text


def test_a_torch_without_distributed_records_no_communication_and_that_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(recording.dist, "is_available", lambda: False)
        assert recording.communication(CcDistribution(enable=True), Failures()) is None
    assert "this build of torch has no torch.distributed, so no communication is recorded" in caplog.text
