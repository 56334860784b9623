"""The report says why a loss jumped, only as certainly as what was recorded allows. ``bench/spikes.py`` has forty cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_job import merged
from reported_job import reported
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from monitor.config import MonitorConfig
from monitor.pytorch import TrainerMon
from monitor.report.cli import app
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding
from monitor.report.spikes import jumps

STEPS, AT = 44, 34
EVERYTHING: Mapping[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "format": "parquet",
    "ops": ["norm"],
}
Event = Callable[[int, nn.Module, Any], object]
Logged = Callable[[int], Mapping[str, float]]
Batch = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def nothing(_step: int, _model: nn.Module, _optimizer: Any) -> None: ...


def usual(_step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def bad(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (20 * x, y.flip(0)) if step == AT else (x, y)


def train(
    base: Path,
    event: Event = nothing,
    batch: Batch = usual,
    steps: int = STEPS,
    logged: Logged = lambda _step: {},
    **fields: Any,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    teacher = torch.randn(12, 6)
    with TrainerMon.of_config(MonitorConfig(**(fields or EVERYTHING)), base, params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
        for step in range(steps):
            event(step, model, optimizer)
            x = torch.randn(64, 12)
            x, y = batch(step, x, (x @ teacher).argmax(1))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            monitor.log(loss=loss, batch=f"shard-7:{step}", **logged(step))
            optimizer.step()
            optimizer.zero_grad()


def found(base: Path) -> CheckFinding:
    with reported(base) as (_, checks, _verdict):
        return next(one.finding for one in checks if one.name == "Spikes")


def in_step(at: int, change: Callable[[nn.Module, Any], object]) -> Event:
    def event(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == at:
            with torch.no_grad():
                change(model, optimizer)

    return event


def faster(_model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 60


def scaled(model: nn.Module, _optimizer: Any) -> None:
    model.get_parameter("2.weight").mul_(20)


def forgotten(_model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(500)


CAUSES: dict[str, tuple[Event, Batch, str]] = {
    "learning rate": (
        in_step(AT - 1, faster),
        usual,
        f"the learning rate rose from 0.003 to 0.18 in step {AT - 1}, and updates",
    ),
    "weights": (in_step(AT, scaled), usual, f"the weight 2.weight changed between steps {AT - 1} and {AT}: its norm was"),
    "moments": (in_step(AT - 1, forgotten), usual, "the moment exp_avg of "),
    "batch": (nothing, bad, f"the batch stands out in step {AT} (batch 'shard-7:{AT}' on rank 0): its local gradients are"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_certain_if_all_else_was_recorded_and_as_usual(cause: str, tmp_path: Path) -> None:
    event, batch, says = CAUSES[cause]
    train(tmp_path / "out", event, batch)
    with reported(tmp_path / "out") as (_, checks, verdict):
        spikes = next(one.finding for one in checks if one.name == "Spikes")
    (first, *_) = spikes.listed
    assert (spikes.state, first["cause"], first["certainty"], first["number"]) == (BAD, cause, "because", "loss")
    assert f" before, because {says}" in spikes.says
    assert verdict.says == spikes.says
    assert verdict.then.startswith("Look at ")


@pytest.mark.parametrize("cause", CAUSES)
def test_with_the_loss_alone_no_cause_is_named_and_what_to_record_is(cause: str, tmp_path: Path) -> None:
    train(tmp_path / "out", *CAUSES[cause][:2], format="parquet")
    spikes = found(tmp_path / "out")
    (first, *_) = spikes.listed
    assert (first["certainty"], first["cause"]) == ("cannot tell", "")
    assert "cannot tell why: it lacks weights, moments, learning rates, batches and activations." in spikes.says
    fields = ("param_distribution", "mv_distribution", "run_numbers", "wg_distribution")
    assert all(field in spikes.then for field in fields)


def test_two_causes_at_once_are_never_certain(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(AT - 3, faster), bad)
    certain = [one for one in found(tmp_path / "out").listed if one["step"] == AT and one["certainty"] == "because"]
    assert certain == []


@pytest.mark.parametrize("left_out", ["param_distribution", "mv_distribution"])
def test_a_cause_is_only_probable_if_another_was_not_recorded(left_out: str, tmp_path: Path) -> None:
    fields = {**EVERYTHING, left_out: False}
    train(tmp_path / "out", *CAUSES["learning rate"][:2], **fields)
    spikes = found(tmp_path / "out")
    assert (spikes.listed[0]["cause"], spikes.listed[0]["certainty"]) == ("learning rate", "probably")
    assert "Not known: " in spikes.says
    assert left_out in spikes.then


def test_a_loss_function_that_changes_is_no_batch(tmp_path: Path) -> None:
    def shuffled(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, 0 * y) if step >= AT else (x, y)

    train(tmp_path / "out", batch=shuffled)
    spikes = found(tmp_path / "out")
    assert spikes.listed[0]["certainty"] == "cannot tell"
    assert "The next batches stand out, too" in spikes.says


@pytest.mark.parametrize("field", ["param_distribution", "mv_distribution"])
def test_what_only_some_steps_have_is_not_known(field: str, tmp_path: Path) -> None:
    train(tmp_path / "out", batch=bad, **{**EVERYTHING, "intervals": {field: AT // 2}})
    spikes = found(tmp_path / "out")
    assert (spikes.listed[0]["cause"], spikes.listed[0]["certainty"]) == ("batch", "probably")
    assert any(field in one for one in spikes.listed[0]["record"])


def test_a_learning_rate_that_returns_to_what_it_was_is_a_schedule(tmp_path: Path) -> None:
    def restarts(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step % 11 / 11.5)

    train(tmp_path / "out", restarts)
    assert found(tmp_path / "out").state == GOOD


def test_small_moments_that_csv_rounds_are_not_lost(tmp_path: Path) -> None:
    train(tmp_path / "out", *CAUSES["weights"][:2], **{**EVERYTHING, "format": "csv", "ndigits": 3})
    spikes = found(tmp_path / "out")
    assert [one["cause"] for one in spikes.listed[:1]] == ["weights"]


def test_a_short_run_is_not_looked_at(tmp_path: Path) -> None:
    train(tmp_path / "out", steps=20)
    assert found(tmp_path / "out").state == NOT_LOOKED_AT


def judged(name: str, values: np.ndarray, skipped: tuple[int, ...] = ()) -> list[int]:
    return [one.step for one in jumps(name, np.arange(len(values)), values, np.array(skipped, np.int64))]


def test_a_skipped_step_without_a_finite_norm_and_a_part_of_a_loss_that_begins_are_no_jumps() -> None:
    norms = np.random.default_rng(0).lognormal(0, 0.1, 50)
    norms[40] = np.inf
    assert judged("grad_norm", norms) == [40]
    assert judged("grad_norm", norms, skipped=(40,)) == []
    assert judged("aux_loss", np.where(np.arange(50) < 40, 0.0, norms)) == []
    assert judged("loss", np.where(np.arange(50) == 40, 3.0, np.ones(50))) == [40]
    assert judged("signed_loss", np.where(np.arange(50) == 40, 30.0, np.sin(np.arange(50)))) == []


@pytest.mark.parametrize("fault", [False, True])
def test_a_loss_scale_may_double_and_a_loss_may_not(fault: bool, tmp_path: Path) -> None:
    train(tmp_path / "out", batch=bad if fault else usual, logged=lambda step: {"loss_scale": 2.0 ** (10 + step // 22)})
    assert found(tmp_path / "out").state == (BAD if fault else GOOD)


def test_programs_get_each_jump_and_a_merged_set_names_the_batch(tmp_path: Path) -> None:
    train(tmp_path / "out", batch=bad)
    merged(tmp_path / "out")
    said = [
        json.loads(CliRunner().invoke(app, [str(path), "--json"]).stdout)["spikes"]
        for path in (tmp_path / "out", tmp_path / "out" / "merged")
    ]
    assert said[0] == said[1]
    (spike,) = said[0]
    assert {**spike, "value": 0, "before": 0, "says": ""} == {
        "number": "loss",
        "step": AT,
        "value": 0,
        "before": 0,
        "certainty": "because",
        "cause": "batch",
        "says": "",
        "place": {"step": AT, "rank": 0, "kind": "grad_unreduced"},
        "record": [],
    }
    assert f"'shard-7:{AT}'" in spike["says"]


def test_the_origin_of_alerts_is_the_verdict_before_a_jump(tmp_path: Path) -> None:
    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 50.0}}]
    train(tmp_path / "out", batch=bad, **{**EVERYTHING, "alert": {"rules": rules, "dump": True}})
    with reported(tmp_path / "out") as (_, checks, verdict):
        states = {one.name: one.state for one in checks}
    if states["Alert rules"] == BAD:
        assert verdict.says.startswith("First came ")
    assert states["Spikes"] == BAD


def test_a_loss_that_is_not_finite_names_the_first_value_that_is_not(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(AT, lambda model, _: model.get_parameter("0.weight").view(-1)[:1].fill_(torch.nan)))
    spikes = found(tmp_path / "out")
    assert "0.weight" in spikes.says
    assert spikes.listed[0]["step"] == AT
