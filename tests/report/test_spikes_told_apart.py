"""Recorded numbers tell causes apart that look alike. If they do not, no cause is certain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_job import RecordedRank
from sink_rows import Measured
from test_spikes import AT, EVERYTHING, found, in_step, judged, train
from torch import Tensor, nn

from monitor.report.facts import facts_of
from monitor.report.findings import GOOD
from monitor.report.spike_batches import batches
from monitor.report.spike_links import Around, Spike, moments, rates
from monitor.stats.partials import COUNT, SUM

WHEN = 40
NAMES = [f"layers.{layer}.weight" for layer in range(4)]


def test_a_weight_whose_bits_change_and_whose_norm_does_not_is_named(tmp_path: Path) -> None:
    def negated(model: nn.Module, _optimizer: Any) -> None:
        model.get_parameter("2.weight").neg_()

    train(tmp_path / "out", in_step(AT, negated), **{**EVERYTHING, "replica_check": True})
    (first, *_) = found(tmp_path / "out").listed
    assert (first["step"], first["cause"], first["certainty"]) == (AT, "weights", "probably")
    assert f"the bits of the weight 2.weight changed between steps {AT - 1} and {AT} on rank 0" in first["says"]


def test_a_weight_whose_bits_change_leaves_no_other_cause_certain(tmp_path: Path) -> None:
    def event(step: int, model: nn.Module, optimizer: Any) -> None:
        in_step(AT - 1, faster)(step, model, optimizer)
        in_step(AT, lambda model, _: model.get_parameter("2.weight").neg_())(step, model, optimizer)

    train(tmp_path / "out", event, **{**EVERYTHING, "replica_check": True})
    assert found(tmp_path / "out").listed[0]["certainty"] == "probably"


def faster(_model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 400


@pytest.mark.parametrize("samples", [16, 128])
def test_a_batch_of_another_size_is_not_unusual(samples: int, tmp_path: Path) -> None:
    def batch(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        more = x.repeat(2, 1), y.repeat(2)
        return (more[0][:samples], (more[1][:samples] + 1) % 6) if step == AT else (x, y)

    train(tmp_path / "out", batch=batch)
    (first, *_) = found(tmp_path / "out").listed
    assert first["step"] == AT
    assert first["certainty"] != "because"
    assert ".input" not in first["says"]


@pytest.mark.parametrize("samples", [2, 8])
def test_smaller_batches_may_have_losses_that_are_further_apart(samples: int, tmp_path: Path) -> None:
    def last_of_an_epoch(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy = (y + (torch.rand(len(y)) < 0.4)) % 6
        return (x[:samples], noisy[:samples]) if step % 10 == 9 else (x, noisy)

    train(tmp_path / "out", batch=last_of_an_epoch, steps=100)
    check = found(tmp_path / "out")
    assert (check.state, check.listed) == (GOOD, ())
    assert ("of smaller batches" in check.says) == (samples == 2)


def test_a_smaller_batch_that_is_wrong_is_told_all_the_same(tmp_path: Path) -> None:
    train(tmp_path / "out", batch=lambda step, x, y: (20 * x[:8], y[:8].flip(0)) if step == AT else (x, y))
    (first, *_) = found(tmp_path / "out").listed
    assert (first["step"], first["cause"]) == (AT, "batch")


def test_a_rate_that_a_new_stage_raises_is_never_certain(tmp_path: Path) -> None:
    def staged(_model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 3

    train(tmp_path / "out", in_step(AT - 1, staged), lambda step, x, y: (x, (y + 1) % 6) if step >= AT else (x, y))
    (first, *_) = found(tmp_path / "out").listed
    assert first["step"] == AT
    assert first["certainty"] != "because"


def test_updates_that_no_known_cause_makes_larger_are_said(tmp_path: Path) -> None:
    def event(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 1500.0 if step == AT - 1 else 0.01

    train(tmp_path / "out", event)
    (first, *_) = found(tmp_path / "out").listed
    assert first["certainty"] == "cannot tell"
    assert f" Updates in step {AT - 1} were " in first["says"]


def test_two_values_in_a_row_are_a_jump_at_which_one_is_none() -> None:
    losses = np.random.default_rng(0).lognormal(0, 0.3, 60)
    for last, expected in ((WHEN, []), (WHEN + 1, [WHEN])):
        raised = np.where((np.arange(60) >= WHEN) & (np.arange(60) <= last), 6.0, losses)
        assert judged("loss", raised) == expected


@contextmanager
def recorded(base: Path, rows: Mapping[int, Mapping[str, list[list[Measured]]]], ranks: int = 1) -> Iterator[Around]:
    """Rows by rank, kind and step."""
    for rank in range(ranks):
        one = RecordedRank(
            base, rank, ranks, "parquet", {"dp": tuple(range(ranks))}, ops=("norm",), micro_step_kinds=["grad_unreduced"]
        )
        for step in range(WHEN + 4):
            one.write(step, {kind: each[step] for kind, each in rows[rank].items()})
        one.close()
    with facts_of(str(base)) as facts:
        yield Around(facts, Spike("loss", WHEN, 1.0, 0.1, lasts=True))


def number(name: str, value: float) -> Measured:
    return Measured(name, numbers={SUM: value, COUNT: 1.0})


@pytest.mark.parametrize("decays", [False, True])
def test_moments_that_grow_as_their_weights_are_decayed(decays: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(16) * 3**at for at, name in enumerate(NAMES)}
    rows: dict[str, list[list[Measured]]] = {"param_origin": [], "exp_avg": [], "grad_reduced": []}
    for step in range(WHEN + 4):
        kept = {name: random.standard_normal(16) * 0.01 for name in NAMES}
        if step == WHEN:
            kept = {name: 5 * weights[name] if decays else 500 * one for name, one in kept.items()}
        rows["param_origin"].append([Measured(name, one.tolist()) for name, one in weights.items()])
        rows["exp_avg"].append([Measured(name, one.tolist()) for name, one in kept.items()])
        rows["grad_reduced"].append([Measured(name, (random.standard_normal(16) * 0.01).tolist()) for name in NAMES])
    with recorded(tmp_path / "out", {0: rows}) as around:
        assert (moments(around).evidence is None) == decays


@pytest.mark.parametrize("other", [1.0, 0.03])
def test_a_micro_step_stands_out_alone_only_if_the_other_is_as_usual(other: float, tmp_path: Path) -> None:
    random, rows = np.random.default_rng(0), []
    for step in range(WHEN + 4):
        factors = (other, 17.0) if step == WHEN else (1.0, 1.0)
        each = ((random.standard_normal(64) * factor).tolist() for factor in factors)
        rows.append([Measured(NAMES[0], values, micro_step=at) for at, values in enumerate(each)])
    with recorded(tmp_path / "out", {0: {"grad_unreduced": rows}}) as around:
        evidence = batches(around).evidence
    assert evidence is not None
    assert evidence.is_local == (other == 1.0)


@pytest.mark.parametrize("raised", [(1,), (0, 1)])
def test_a_rate_that_rises_on_one_rank_is_named_with_it(raised: tuple[int, ...], tmp_path: Path) -> None:
    def rows(rank: int) -> list[list[Measured]]:
        every = (0.1 if rank in raised and step >= WHEN - 1 else 0.001 for step in range(WHEN + 4))
        return [[number("learning_rate.0", rate)] for rate in every]

    steps, one = np.arange(WHEN + 4), np.where(np.arange(WHEN + 4) >= WHEN - 1, 0.1, 0.001)
    with recorded(tmp_path / "out", {rank: {"run": rows(rank)} for rank in range(2)}, ranks=2) as around:
        around.rates["learning_rate.0"] = (steps, one)
        evidence = rates(around).evidence
    assert evidence is not None
    assert (evidence.is_local, " of rank 1 rose" in evidence.says) == (raised == (1,), raised == (1,))


@pytest.mark.parametrize("reduced", [False, True])
def test_a_mean_that_all_ranks_log_is_no_loss_of_a_rank(reduced: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows: dict[int, dict[str, list[list[Measured]]]] = {rank: {"run": [], "grad_unreduced": []} for rank in range(2)}
    for step in range(WHEN + 4):
        losses = random.lognormal(0, 0.1, 2) * (50 if step == WHEN else 1)
        for rank in range(2):
            rows[rank]["run"].append([number("loss", float(losses.mean() if reduced else losses[rank]))])
            rows[rank]["grad_unreduced"].append([Measured(NAMES[0], random.standard_normal(64).tolist(), micro_step=0)])
    with recorded(tmp_path / "out", rows, ranks=2) as around:
        assert (batches(around).evidence is None) == reduced


@pytest.mark.parametrize(("last", "weight", "is_device"), [(WHEN, 1.0, True), (WHEN, 9.0, False), (WHEN + 3, 1.0, False)])
def test_an_activation_is_the_devices_unless_a_weight_grew_or_it_stays(
    last: int, weight: float, is_device: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    rows: dict[str, list[list[Measured]]] = {"actv": [], "grad_unreduced": [], "param_origin": []}
    for step in range(WHEN + 4):
        wrong = 40.0 if WHEN <= step <= last else 1.0
        noise = {name: random.standard_normal(256) for name in (".input", "0.output", "2.output")}
        noise["2.output"] = noise["2.output"] * wrong
        rows["actv"].append([Measured(name, one.tolist()) for name, one in noise.items()])
        rows["grad_unreduced"].append([Measured("2.weight", (random.standard_normal(64) * wrong).tolist(), micro_step=0)])
        rows["param_origin"].append([Measured("2.weight", (np.ones(64) * (weight if step >= WHEN else 1.0)).tolist())])
    with recorded(tmp_path / "out", {0: rows}) as around:
        evidence = batches(around).evidence
    assert evidence is not None
    assert (evidence.cause == "device") == is_device
