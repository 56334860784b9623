"""What is said when a run begins: once, for the whole job."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import EVERYTHING, Output, attached, footprint, train, warnings_in

from monitor.pytorch import TrainerMon

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "max"]}


def small_model(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)), nn.Tanh(), nn.Linear(5, 3))


def test_targets_that_match_nothing_are_named_with_the_nearest_names(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """Peers, fault 18: they were passed over in silence."""
    model = small_model()
    model.add_module("decoder", nn.Linear(5, 3))
    targets = {"decodr": {}, "decoder": {}, "1": {}}
    attached(output, model, SGD(model.parameters(), lr=0.1), targets=targets, **GRADIENTS).close()
    (said,) = warnings_in(caplog)
    assert "'decodr' (nearest: 'decoder'" in said


def said_at_the_start(output: Output, caplog: pytest.LogCaptureFixture, **config: Any) -> str:
    model = small_model()
    with caplog.at_level(logging.INFO):
        attached(output, model, SGD(model.parameters(), lr=0.1), **config).close()
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["wg_distribution", "param_distribution", "xy_distribution"])
def test_where_no_target_matches_it_is_said_that_nothing_is_recorded(
    kind: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {"alert": {"rules": [{"rule_name": "AnomalyNan"}]}}
    said = said_at_the_start(output, caplog, targets={"decodr": {}}, **{kind: True}, **rules)
    assert "This configuration records nothing on this rank: no target matches" in said
    assert "The alert rules have nothing to judge." in said
    assert "will write" not in said


def test_the_start_says_how_long_the_disk_lasts_and_when_thinning_begins(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_at_the_start(output, caplog, wg_distribution=True, max_output_bytes=100_000)
    (line,) = [one for one in said.splitlines() if "will write" in one]
    assert re.search(r" free, about [\d,]+ collected steps if all ranks write to it\. After about [\d,]+ collected steps", line)
    assert line.endswith("a rank reaches max_output_bytes (98 KiB), and thins its oldest steps")


def test_where_no_kind_is_switched_on_no_rows_are_estimated(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    said = said_at_the_start(output, caplog)
    assert ("This configuration records nothing" in said, "will write" in said) == (True, False)


def test_module_ranks_that_match_no_rank_are_named_and_nothing_is_attached(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers, fault 18: as silent."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = footprint(model, optimizer)
    with attached(output, model, optimizer, module_ranks=[3, 5], **EVERYTHING) as monitor:
        assert footprint(model, optimizer) == before
        train(model, optimizer, 1, X)
        assert monitor.generate_wgrad_metrics() == ({}, {})
    (said,) = warnings_in(caplog)
    assert "[3, 5]" in said
    assert output.directories() == []


def test_forward_only_and_backward_only_together_are_a_warning_and_the_rest_runs(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    config = {"forward_only": True, "backward_only": True}
    with attached(output, model, optimizer, **{**EVERYTHING, **config}):
        train(model, optimizer, 1, X)
    (said,) = warnings_in(caplog)
    assert "no activations" in said
    assert output.rows("actv") == output.rows("actv_grad") == []
    assert len(output.rows("grad_reduced")) == 4


def test_there_are_as_many_lines_for_many_modules_as_for_one(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """Peers, fault 23: one line for each hooked module."""
    caplog.set_level(logging.DEBUG, "monitor")
    lines = []
    for layers in (1, 30):
        caplog.clear()
        model = small_model(layers)
        attached(output, model, SGD(model.parameters(), lr=0.1), **EVERYTHING).close()
        lines.append(len(caplog.records))
    assert lines == [2, 2]


@pytest.mark.parametrize(
    ("config", "grad_acc_steps"),
    [
        (GRADIENTS, 2),
        ({**GRADIENTS, "monitor_mbs_grad": True}, 3),
        ({"param_distribution": True, "mv_distribution": True}, 1),
        ({"xy_distribution": True, "all_xy": True}, 2),
        ({"xy_distribution": True, "forward_only": True, "targets": {"0": {}}}, 2),
        ({"xy_distribution": True, "micro_steps": "combined"}, 2),
        (EVERYTHING, 1),
        ({"recording_l2_features": True, "l2_targets": {"moe_router_load_hook": ["0"]}}, 2),
        ({"ur_distribution": True, "mg_direction": True, "update_ratio": True, "format": ["csv", "tensorboard"]}, 1),
    ],
    ids=str,
)
def test_the_estimate_is_what_a_step_of_a_simple_model_writes(
    output: Output, caplog: pytest.LogCaptureFixture, config: dict[str, Any], grad_acc_steps: int
) -> None:
    model = small_model()
    model[2].requires_grad_(False)
    vars(model[0])["top_k"] = 2  # as of a router of five experts
    optimizer = Adam(model.parameters())
    x = X.clone().requires_grad_()
    with attached(output, model, optimizer, grad_acc_steps, **config):
        for _ in range(2):
            for _ in range(grad_acc_steps):
                model(x).square().sum().backward()
            optimizer.step()
    (said,) = [message for message in caplog.messages if "each collected step" in message]
    rows, series, files = re.search(r"write (\d+) rows? of (\d+) series .* in (\d+) file", said).groups()
    written = {path.stem.rpartition("_")[0] for path in output.directory().glob("*_1-1.csv")}
    found = {kind: [row for row in output.rows(kind) if row.step == 1] for kind in written}
    assert int(rows) == sum(map(len, found.values()))
    assert int(series) == sum(len({row.name for row in one}) for one in found.values())
    assert int(files) == len(written)


@pytest.mark.parametrize("bound", ["warn_rows_per_step", "warn_bytes_per_step", "warn_files_per_step"])
def test_above_a_bound_the_line_is_a_warning(output: Output, caplog: pytest.LogCaptureFixture, bound: str) -> None:
    model = small_model()
    attached(output, model, SGD(model.parameters(), lr=0.1), **{bound: 1}, **EVERYTHING).close()
    (said,) = warnings_in(caplog)
    assert "each collected step" in said
    assert "more than 1" in said
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("replica_check", "series"), [(False, 24), (True, 32)])
def test_the_estimate_is_for_the_whole_job_and_said_by_one_rank(
    output: Output, caplog: pytest.LogCaptureFixture, replica_check: bool, series: int
) -> None:
    """Of two data-parallel pairs each holds its reduced gradients once, and every rank its own unreduced ones.

    A rank that does not write a reduced gradient may keep its norm.
    """
    said = []
    for rank in (0, 1):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            model = small_model()
            optimizer = SGD(model.parameters(), lr=0.1)
            monitor = attached(output, model, optimizer, replica_check=replica_check, **GRADIENTS)
            caplog.clear()
            monitor.set_monitor(small_model(), 1, SGD(small_model().parameters()), dp_group=dist.new_group([0, 1]))
            monitor.close()
        finally:
            dist.destroy_process_group()
        said.append([message for message in caplog.messages if "each collected step" in message])
    assert f"{series} rows of {series} series on 4 ranks" in said[0][0]
    assert said[1] == []


@pytest.mark.parametrize(("dp", "warnings"), [(None, 1), ([0], 0)], ids=["without", "of one rank"])
@pytest.mark.usefixtures("output")
def test_a_pipeline_of_some_ranks_without_a_data_parallel_group_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, dp: list[int] | None, warnings: int
) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = small_model()
        group = None if dp is None else dist.new_group(dp)
        with TrainerMon(GRADIENTS, process_group=dist.new_group([0, 1]), params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, 1, SGD(model.parameters(), lr=0.1), dp_group=group)
    finally:
        dist.destroy_process_group()
    assert len([one for one in warnings_in(caplog) if "Pass dp_group" in one]) == warnings


def test_a_configuration_may_have_a_path_that_is_no_text(output: Output) -> None:
    path = os.fsencode(output.base.parent) + b"/\xff.json"
    with open(path, "w") as file:
        file.write('{"format": "api"}')
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with TrainerMon(path, params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        train(model, optimizer, 1, X)
    assert output.manifest()["config_path"].endswith("/\\udcff.json")


@pytest.mark.parametrize("start", [0, 2])
def test_who_continues_in_a_directory_and_begins_at_step_0_again_learns_what_is_replaced(
    output: Output, caplog: pytest.LogCaptureFixture, start: int
) -> None:
    all_year = {"append_output": ["Jan01_00-00-00", "Dec31_23-59-59"]}
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **GRADIENTS):
        train(model, optimizer, 3, X)
    assert warnings_in(caplog) == []
    with attached(output, model, optimizer, start_iteration=start, **GRADIENTS, **all_year):
        train(model, optimizer, 1, X)
    said = warnings_in(caplog)
    assert len(output.directories()) == 1
    assert len(said) == (start == 0)
    assert all("steps 0 to 2 in" in one and "start_iteration" in one for one in said)
