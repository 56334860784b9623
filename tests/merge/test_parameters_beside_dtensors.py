"""Tensor parallelism without a ``tp_group``: what stays a plain tensor beside DTensors counts once, or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from recorded_job import merged, tensors

RANKS = {"tp": 2, "experts": 2, "sequence": 2, "sequence-plain": 2, "by-hand": 4, "ddp": 4, "fsdp1": 4, "fsdp2": 4}
RANKS["by-hand-no-group"] = 4
REPLICAS = ["tp", "by-hand", "ddp", "fsdp1", "fsdp2", "by-hand-no-group"]
LIKE_BY_HAND = ["ddp", "fsdp1"]
"""These have local tensors in the place of DTensors, which cannot be gathered; they train what ``by-hand`` does."""

UNPLANNED = {f"{name}.{what}" for name in ("norm", "head", "extra") for what in ("weight", "bias")} | {"embedding.weight"}

Ran = Callable[[str], "Merged"]


class Merged:
    """A job's merged data set, and what the framework and gathered tensors say of it."""

    def __init__(self, directory: Path) -> None:
        self.base = directory / "out"
        self.told: list[dict[str, Any]] = json.loads((directory / "told.json").read_text())
        self.report = merged(self.base)

    def norms(self, kind: str, step: int) -> dict[str, float]:
        rows = [row for row in tensors(self.base, kind) if row["step"] == step]
        assert len({row["name"] for row in rows}) == len(rows), "a tensor stands there twice"
        return {row["name"].removeprefix("module."): row["norm"] for row in rows}

    def absent(self, kind: str) -> set[str]:
        listed = self.report.told()["without_global"]["listed"]
        return {one["name"] for one in listed if one["kind"] == kind}


@pytest.fixture(scope="module")
def ran(launch: Callable[..., Path]) -> Ran:
    return cache(lambda how: Merged(launch("beside_dtensors.py", how, RANKS[how])))


@pytest.mark.parametrize("how", sampled(REPLICAS, 0, 1, 2, 4, 5))
@pytest.mark.parametrize("kind", ["grad_reduced", "param_origin"])
def test_a_parameter_that_the_plan_leaves_out_counts_once(ran: Ran, how: str, kind: str) -> None:
    truth = ran("by-hand" if how in LIKE_BY_HAND else how).told
    for step, told in enumerate(truth):
        found = ran(how).norms(kind, step)
        assert found == pytest.approx(told[kind], rel=1e-5)
        if kind == "grad_reduced":
            assert math.hypot(*found.values()) == pytest.approx(told["total"], rel=1e-6)
    assert ran(how).report.clean


def test_gradients_that_are_terms_have_no_global_norm_and_the_others_have_the_true_one(ran: Ran) -> None:
    job = ran("sequence")
    assert not job.report.clean
    assert job.absent("grad_reduced") == UNPLANNED == job.absent("grad_unreduced")
    for step, told in enumerate(job.told):
        expected = {name: norm for name, norm in told["grad_reduced"].items() if name not in UNPLANNED}
        assert job.norms("grad_reduced", step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["sequence-plain", "experts"])
def test_plain_tensors_that_differ_between_the_ranks_have_no_global_number(ran: Ran, how: str) -> None:
    """Terms of a sum that no tensor says it is, and experts of each rank's own."""
    job = ran(how)
    assert not job.report.clean
    assert {"extra.weight", "extra.bias"} <= job.absent("grad_reduced") & job.absent("param_updated")
    for step, told in enumerate(job.told):
        found = job.norms("grad_reduced", step)
        assert {"up.weight", "up.bias", "down.weight", "down.bias"} <= set(found)
        assert found == pytest.approx({name: told["grad_reduced"][name] for name in found}, rel=1e-5)
