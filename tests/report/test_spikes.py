"""The report says why a loss jumped, only as certainly as what was recorded allows. ``bench/spikes.py`` has forty cases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_job import RecordedRank, merged
from reported_job import record, reported
from sink_rows import Measured
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from monitor.config import MonitorConfig
from monitor.pytorch import TrainerMon
from monitor.report.cli import app
from monitor.report.facts import facts_of
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding
from monitor.report.spike_links import Around, Spike, replicas
from monitor.report.spikes import cycles_of, jumps, weighed
from monitor.stats.partials import COUNT, SUM

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


def mislabelled(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """From ``AT`` on, for some steps: nothing but the loss and its gradients shows it."""
    return (x, (y + 1) % 6) if AT <= step < AT + 6 else (x, y)


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


def faster(_model: nn.Module, optimizer: Any, factor: float = 400) -> None:
    optimizer.param_groups[0]["lr"] *= factor


def scaled(model: nn.Module, _optimizer: Any = None) -> None:
    model.get_parameter("2.weight").mul_(20)


def forgotten(_model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(500)


CAUSES: dict[str, tuple[Event, Batch, str]] = {
    "learning rate": (
        in_step(AT - 1, faster),
        usual,
        f"the learning rate rose from 0.003 to 1.2 in step {AT - 1}, and updates",
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


def test_what_is_advised_can_be_added_to_the_configuration_and_then_tells_the_cause(tmp_path: Path) -> None:
    fields = {**EVERYTHING, "wg_reduced_only": True, "monitor_mbs_grad": False, "mv_distribution": False}
    train(tmp_path / "before", batch=bad, **fields)
    advised = found(tmp_path / "before").then
    added = {name: value == "true" for name, value in re.findall(r'"(\w+)": (true|false)', advised)}
    assert added.keys() >= {"wg_distribution", "mv_distribution"}
    train(tmp_path / "after", batch=bad, **{**fields, **added})
    (first, *_) = found(tmp_path / "after").listed
    assert (first["cause"], first["certainty"]) == ("batch", "because")


def test_labels_that_are_wrong_in_one_step_are_what_is_left_to_look_at(tmp_path: Path) -> None:
    def wrong(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, (y + 1) % 6) if step == AT else (x, y)

    train(tmp_path / "out", batch=wrong)
    spikes = found(tmp_path / "out")
    assert (spikes.listed[0]["certainty"], spikes.listed[0]["record"]) == ("cannot tell", [])
    assert spikes.then == "Look at the labels of this step and at the loss function: no row shows them."


def test_two_causes_at_once_are_never_certain(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(AT - 3, lambda *of: faster(*of, factor=60)), bad)
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


def test_other_data_from_a_step_on_is_not_one_batch(tmp_path: Path) -> None:
    def other(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (20 * x, y.flip(0)) if step >= AT else (x, y)

    train(tmp_path / "out", batch=other)
    spikes = found(tmp_path / "out")
    assert (spikes.listed[0]["certainty"], spikes.listed[0]["cause"]) == ("cannot tell", "")
    assert "the data of all ranks, the code, a buffer or the loss function may have changed" in spikes.says


def harder(steps: Callable[[int], bool], spoiled: int = -1) -> Batch:
    """Batches without a rule in some steps, and one that is bad."""

    def batch(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == spoiled:
            return 20 * x, y.flip(0)
        return (x, torch.randint(0, 6, (len(x),))) if steps(step) else (x, y)

    return batch


@pytest.mark.parametrize("phases", [(3,), (3, 4)])
def test_other_data_at_regular_intervals_is_no_fault_and_is_told(phases: tuple[int, ...], tmp_path: Path) -> None:
    train(tmp_path / "out", batch=harder(lambda step: step % 10 in phases), steps=100)
    with reported(tmp_path / "out") as (_, checks, verdict):
        spikes = next(one.finding for one in checks if one.name == "Spikes")
    assert (spikes.state, verdict.state) == (GOOD, GOOD)
    told = re.findall(r"The loss is about 1\.\d times as high every 10 recorded steps since step (\d+)\.", verdict.says)
    assert sorted(int(step) % 10 for step in told) == [*phases]
    assert verdict.says.endswith("That is right if these steps have other data.")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_at_regular_intervals_are_faults(value: float) -> None:
    steps = np.arange(200)
    values = np.where(steps % 30 == 3, value, np.random.default_rng(0).lognormal(0, 0.01, 200))
    found = [*jumps("loss", steps, values, np.zeros(0, np.int64))]
    assert [one.step for one in found] == [33, 63, 93, 123, 153, 183]
    assert [*cycles_of(steps, values, found)] == []


def test_a_fault_beside_other_data_at_regular_intervals_is_told_as_ever(tmp_path: Path) -> None:
    train(tmp_path / "out", batch=harder(lambda step: step % 10 == 3, spoiled=56), steps=100)
    spikes = found(tmp_path / "out")
    assert (spikes.state, len(spikes.listed)) == (BAD, 1)
    assert ", because the batch stands out in step 56 (batch 'shard-7:56' on rank 0)" in spikes.says


@pytest.mark.parametrize("since", [0, 40])
def test_a_fault_that_comes_back_at_regular_intervals_is_a_fault(since: int, tmp_path: Path) -> None:
    def saves(step: int, model: nn.Module, _optimizer: Any) -> None:
        if step % 10 == 3 and not since:  # a checkpoint that is saved changes a weight
            with torch.no_grad():
                scaled(model)
        elif step % 10 == 4 and not since:
            with torch.no_grad():
                model.get_parameter("2.weight").div_(20)

    train(tmp_path / "out", saves, harder(lambda step: step % 10 == 3 and step >= (since or 1000)), steps=100)
    spikes = found(tmp_path / "out")
    assert spikes.state == BAD
    assert spikes.listed[0]["cause"] == ("" if since else "weights")


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
    spikes = found(tmp_path / "out")
    assert spikes.state == NOT_LOOKED_AT
    assert re.fullmatch(r"grad_norm and loss had no more than \d+ values\.", spikes.says)


def stage(_model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2.5


def nudged(factor: float) -> Callable[[nn.Module, Any], object]:
    return lambda model, _: model.get_parameter("2.bias").mul_(factor)


HARMLESS: dict[str, Event] = {
    "a rate of a new stage long before": in_step(AT - 6, stage),
    "a rate of a new stage right before it acts": in_step(AT - 2, stage),
    "a weight that changed by less than an update": in_step(AT, nudged(1 + 1e-5)),
    "a weight that changed by 5 % long before": in_step(AT - 5, nudged(1.05)),
}


@pytest.mark.parametrize("event", HARMLESS)
def test_what_did_not_show_for_some_steps_or_is_negligible_is_no_certain_cause(event: str, tmp_path: Path) -> None:
    train(tmp_path / "out", HARMLESS[event], mislabelled)
    first = found(tmp_path / "out").listed[0]
    assert first["step"] == AT
    assert first["certainty"] != "because"


def test_a_small_change_of_a_weight_is_said_with_digits_that_show_it(tmp_path: Path) -> None:
    train(tmp_path / "out", HARMLESS["a weight that changed by less than an update"], mislabelled)
    (said,) = re.findall(r"its norm was (\S+) and became ([^\s;.]+\.\d+)", found(tmp_path / "out").says)
    assert 0 < abs(float(said[1]) / float(said[0]) - 1) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_any_more_is_called_so(value: float, tmp_path: Path) -> None:
    def spoiled(model: nn.Module, _optimizer: Any) -> None:
        model.get_parameter("2.weight")[0, 0] = value

    train(tmp_path / "out", in_step(AT, spoiled), usual)
    (said,) = re.findall(r"its norm was \S+ and became (.*?)[;.]", found(tmp_path / "out").says)
    assert said == "NaN or infinite"


GRADIENTS: Mapping[str, Any] = {"wg_distribution": True, "wg_reduced_only": True, "format": "parquet", "ops": ["norm", "nans"]}
ALERTS: Mapping[str, Any] = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}


@pytest.mark.parametrize("more", [{}, ALERTS, {"xy_distribution": True, "all_xy": True}])
def test_a_gradient_is_not_the_cause_of_a_loss_that_is_not_finite_in_the_same_step(more: Any, tmp_path: Path) -> None:
    def unknown(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, F.one_hot(y, 6) * (torch.nan if step == AT else 1.0)

    train(tmp_path / "out", batch=unknown, **{**GRADIENTS, **more})
    with reported(tmp_path / "out") as (_, checks, verdict):
        says = {one.name: one.finding.says for one in checks}
    assert says["NaN and infinity"].startswith(f"First came loss on rank 0 in step {AT}: its value is nan")
    assert says["Spikes"].startswith(f"The loss was nan in step {AT}")
    assert "grad_reduced" not in says["Spikes"]
    if "alert" in more:
        assert verdict.says.startswith("First came grad_reduced")
        assert verdict.then.startswith(f"The loss was not finite in step {AT}, before any gradient of that step. ")
    else:
        assert verdict.says.startswith(("First came loss", "The loss was nan"))


def test_a_loss_that_stays_finite_is_not_named_before_a_gradient(tmp_path: Path) -> None:
    def spoiled(model: nn.Module) -> None:
        def spoil(p: Tensor) -> None:
            assert p.grad is not None
            p.grad[0] = torch.nan

        model.get_parameter("2.bias").register_post_accumulate_grad_hook(spoil)

    train(tmp_path / "out", in_step(AT, lambda model, _: spoiled(model)), **GRADIENTS, **ALERTS)
    with reported(tmp_path / "out") as (_, _checks, verdict):
        assert verdict.says.startswith("First came grad_reduced 2.bias")
        assert "loss was not finite" not in verdict.then


def test_a_batch_is_not_compared_with_a_further_micro_step_of_the_same_step(tmp_path: Path) -> None:
    """The loop drops the gradients of a bad batch. So its step has a second forward, which has no usual size."""
    one = RecordedRank(tmp_path / "out", format="parquet", ops=("norm",), micro_step_kinds=["actv"])
    random = np.random.default_rng(0)
    for step in range(48):
        inputs = (random.standard_normal(64) * (1e4 if step == AT else 1)).tolist()
        rows = [Measured(".input", inputs, micro_step=0)]
        if step == AT:
            rows.append(Measured(".input", random.standard_normal(64).tolist(), micro_step=1))
        loss = float(random.lognormal(0, 0.1)) * (1e4 if step == AT else 1)
        one.write(step, {"actv": rows, "run": [Measured("loss", numbers={SUM: loss, COUNT: 1.0})]})
    one.close()
    said = found(tmp_path / "out").says
    assert "its input is" in said
    assert "those of the others" not in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_called_so(value: float, tmp_path: Path) -> None:
    one = RecordedRank(tmp_path / "out", format="parquet", ops=("norm",), micro_step_kinds=["actv"])
    random = np.random.default_rng(0)
    for step in range(48):
        inputs = random.standard_normal(64).tolist()
        inputs[5] = value if step == AT else inputs[5]
        loss = value if step == AT else float(random.lognormal(0, 0.1))
        rows = {"actv": [Measured(".input", inputs, micro_step=0)], "run": [Measured("loss", numbers={SUM: loss, COUNT: 1.0})]}
        one.write(step, rows)
    one.close()
    assert "its input is NaN or infinite" in found(tmp_path / "out").says


def test_a_weight_that_changed_some_steps_before_is_not_called_as_usual(tmp_path: Path) -> None:
    train(tmp_path / "out", HARMLESS["a weight that changed by 5 % long before"], mislabelled)
    assert "eights" not in found(tmp_path / "out").says.split(" as usual")[0]


@pytest.mark.parametrize("where", [(0, 1), (1,)])
@pytest.mark.parametrize("since", [37, 40])
def test_replicas_that_differ_are_certain_only_if_that_rank_stands_out_alone_and_soon(
    where: tuple[int, ...], since: int, tmp_path: Path
) -> None:
    def fault(rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        if kind == "param_origin" and rank == 1 and step >= since and name == "layers.1.weight":
            return values * (1 + 1e-6)
        larger = step == 40 and (kind == "grad_reduced" or (kind == "grad_unreduced" and rank in where))
        return values * 1000 if larger else values

    def changing(*of: Any) -> np.ndarray:
        return fault(*of) * np.random.default_rng(of[1]).lognormal(0, 0.1)

    record(tmp_path / "out", changing, steps=48, checked=True)
    (first,) = found(tmp_path / "out").listed
    is_lone_and_soon = where == (1,) and since == 40
    assert (first["step"], first["cause"] == "device") == (40, where == (1,) or since == 40), first["says"]
    with facts_of(str(tmp_path / "out")) as facts:
        around = Around(facts, Spike("grad_norm", 40, 1.0, 0.1, lasts=False))
        own = weighed(around, replicas(around).evidence)
    assert own is not None
    assert own.is_exclusive == is_lone_and_soon


def test_weights_of_which_one_rank_alone_has_rows_are_one_copy(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for rank in range(2):
        one = RecordedRank(tmp_path / "out", rank, 2, "parquet", {"dp": (0, 1)}, ops=("norm",))
        for step in range(48):
            values = (random.standard_normal(64) * (1000 if step == 40 else 1)).tolist()
            rows = {"grad_unreduced": [Measured("layer.weight", values)]}
            if rank == 0:
                rows |= {kind: [Measured("layer.weight", [1.0])] for kind in ("param_origin", "param_updated")}
                rows["grad_reduced"] = [Measured("layer.weight", values)]
            one.write(step, rows)
        one.close()
    assert re.search(r"it lacks[^.]*replicas.* One copy of the weights .*as usual", found(tmp_path / "out").says)


@pytest.mark.parametrize(
    ("later", "says"),
    [((39,), "Another jump began in step 39."), ((39, 54, 69, 84, 99), "More jumps began in steps 39, 54, 69, 84 and 1 more.")],
    ids=["once", "often"],
)
def test_the_same_fault_is_found_again(later: tuple[int, ...], says: str, tmp_path: Path) -> None:
    def again(step: int, model: nn.Module, _optimizer: Any) -> None:
        if step in (AT - 10, *later):
            with torch.no_grad():
                scaled(model)

    train(tmp_path / "out", again, steps=later[-1] + 8)
    check = found(tmp_path / "out")
    assert says in check.says
    causes = {one["step"]: one["cause"] for one in check.listed}
    assert causes == dict.fromkeys((AT - 10, *later[:2]), "weights")


def test_a_rate_that_rises_over_several_steps_is_a_cause(tmp_path: Path) -> None:
    def rises(step: int, _model: nn.Module, optimizer: Any) -> None:
        if AT - 5 <= step < AT + 2:
            optimizer.param_groups[0]["lr"] *= 1.9

    train(tmp_path / "out", rises)
    spikes = found(tmp_path / "out")
    assert (spikes.state, spikes.listed[0]["cause"]) == (BAD, "learning rate")


def test_weights_are_not_known_if_steps_between_were_not_collected(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(AT, scaled), **{**EVERYTHING, "step_interval": 2}, steps=2 * STEPS)
    says = found(tmp_path / "out").says
    assert re.search(r"(Not known|it lacks)[^.]*weights[^.]*moments", says)


def test_a_loss_below_zero_is_said_not_to_be_looked_at(tmp_path: Path) -> None:
    train(tmp_path / "out", logged=lambda step: {"signed_loss": -1.0 - step % 3})
    spikes = found(tmp_path / "out")
    assert spikes.state == GOOD
    assert spikes.says == (
        "grad_norm and loss stayed in the band of the values before. "
        "signed_loss had values below zero, which have no logarithm: not looked at."
    )


def test_a_loss_that_is_not_finite_from_the_beginning_is_not_called_in_its_band(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(9, lambda model, _: model.get_parameter("2.weight").fill_(torch.nan)))
    spikes = found(tmp_path / "out")
    assert spikes.state == NOT_LOOKED_AT
    assert spikes.says == "grad_norm and loss had values that are not finite before there was a band: not looked at."


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


def test_a_jump_before_the_first_alert_is_the_verdict(tmp_path: Path) -> None:
    """The second moments deviate a step after the batch, since they grow with the squares of its gradients."""
    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 50.0}}]
    train(tmp_path / "out", batch=bad, **{**EVERYTHING, "alert": {"rules": rules, "dump": True}})
    with reported(tmp_path / "out") as (facts, checks, verdict):
        assert facts.ranking is not None
        assert facts.ranking.first_origin is not None
        assert (facts.ranking.first_origin.subject.series.kind, facts.ranking.first_origin.step) == ("exp_avg_sq", AT + 1)
        assert {one.name for one in checks if one.state == BAD} >= {"Alert rules", "Spikes"}
    assert (verdict.place.step, verdict.place.kind) == (AT, "grad_unreduced")
    assert "Also bad: Alert rules" in verdict.then


def test_moments_that_were_reset_are_the_verdict_and_not_the_weights_that_the_optimizer_made_of_them(tmp_path: Path) -> None:
    """A rule with a threshold above 1 does not see that they fell."""

    def without_second_moments(_model: nn.Module, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()

    def empty(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (0 * x if step == AT else x, y)

    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 20.0}}]
    train(
        tmp_path / "out", in_step(AT, without_second_moments), empty, **{**EVERYTHING, "alert": {"rules": rules, "dump": True}}
    )
    with reported(tmp_path / "out") as (facts, _checks, verdict):
        assert facts.ranking is not None
        assert facts.ranking.first_origin is not None
        assert (facts.ranking.first_origin.subject.series.kind, facts.ranking.first_origin.step) == ("param_updated", AT)
    assert (verdict.place.step, verdict.place.kind) == (AT, "exp_avg_sq")


def test_a_jump_that_became_a_nan_is_named_beside_it(tmp_path: Path) -> None:
    """A rule that looks for NaN alone calls the inputs of the first layer clean."""
    rules = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
    train(tmp_path / "out", batch=lambda step, x, y: (1e38 * x if step == AT else x, y), **{**EVERYTHING, **rules})
    with reported(tmp_path / "out") as (_, _checks, verdict):
        assert verdict.says.startswith("First came ")
        assert verdict.then.startswith("Before it came actv ")
        assert f"in step {AT}, micro-step 0: its norm is " in verdict.then


def test_a_loss_that_is_not_finite_names_the_first_value_that_is_not(tmp_path: Path) -> None:
    train(tmp_path / "out", in_step(AT, lambda model, _: model.get_parameter("0.weight").view(-1)[:1].fill_(torch.nan)))
    spikes = found(tmp_path / "out")
    assert "0.weight" in spikes.says
    assert spikes.listed[0]["step"] == AT


@pytest.mark.parametrize("early", [12, AT])
def test_the_cause_of_a_later_spike_does_not_hide_what_changed_first(early: int, tmp_path: Path) -> None:
    """The first steps are not judged as spikes: a bad batch there is a sudden change alone."""

    def batch(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (60 * x, y.flip(0)) if step in (early, AT) else (x, y)

    train(tmp_path, batch=batch)
    with reported(tmp_path) as (_, checks, verdict):
        (spikes,) = (one.finding for one in checks if one.name == "Spikes")
        assert (spikes.listed[0]["cause"], spikes.place.step) == ("batch", AT)
        assert verdict.place.step == early
        assert (verdict.says == spikes.says) == (early == AT)
