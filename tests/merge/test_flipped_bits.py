"""Tensor, step and rank of each bit that is flipped in real training are named, by the ranks while they train and by the merge.
In healthy runs no rank is accused.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evidence import PROVES, sampled
from recorded_job import merged, tensors
from reference import check_sums
from torch import nn

from monitor.coordinator.manifest_format import WrongBits, read_manifest
from monitor.stats.ops import checksums
from monitor.stats.partials import COLUMNS, Partials, check_columns

TRIALS = 40 if PROVES else 4
"""Flipped bits for each layout, a healthy run besides."""

HEALTHY = 10 if PROVES else 1
LAYOUTS = [("ddp", 4), ("ddp", 2), ("hsdp", 4), ("zero1", 2), ("tp", 2)]
NAMES = ("norm.weight", "up.weight", "up.bias", "down.weight")
KINDS = {"weight": "param_origin", "gradient": "grad_reduced", "moment": "exp_avg"}
STEPS = range(1, 4)


def faults(layout: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Every bit of both dtypes, one after the other."""
    drawn = random.Random(f"{layout} {ranks}")
    for number in range(TRIALS):
        dtype = ("float32", "bfloat16")[number % 2]
        of = drawn.choice(["weight", "gradient"] if layout == "zero1" else [*KINDS])
        bits = 32 if dtype == "float32" else 16
        lowest = 6 if of == "moment" else 0  # what is lower may be rounded away by the next update
        yield {
            "dtype": dtype,
            "fault": {
                "of": of,
                "rank": drawn.randrange(ranks),
                "step": drawn.choice(STEPS),
                "kind": "exp_avg",
                "name": "norm.weight" if layout == "tp" else drawn.choice(NAMES),
                "place": drawn.randrange(96),
                "bit": max(lowest, (5 * number + drawn.randrange(5)) % bits),
            },
        }


def copies_of(layout: str, ranks: int, rank: int) -> list[int]:
    """The ranks that hold the same as ``rank``."""
    return [rank % 2, rank % 2 + 2] if layout == "hsdp" else [*range(ranks)]


@pytest.mark.parametrize(("layout", "ranks"), sampled(LAYOUTS, 0, 2))
def test_tensor_step_and_rank_of_every_flipped_bit_are_named(launch: Callable[..., Path], layout: str, ranks: int) -> None:
    trials = [*faults(layout, ranks), *({"dtype": "float32", "fault": None} for _ in range(HEALTHY))]
    directory = launch("flipped.py", layout, ranks, trials=trials, format="parquet", ops=["norm"], replica_check=True)
    wrong = {}
    for number, trial in enumerate(trials):
        report = merged(directory / str(number))
        found = report.told()["bits"]
        first = [(one["kind"], one["name"].removeprefix("module."), one["step"], one["odd_ranks"]) for one in found["first"]]
        if first != expected(trial["fault"], layout, ranks) or found["by_design"]:
            wrong[number] = (trial, found)
        assert found["compared"]["param_origin"] > 0
        notes = [one.said for one in wrong_bits(directory / str(number)) if one.check == "copies"]
        said = [re.sub(r" \([^)]*\)|(?<=: )module\.| differ from each other.*|: other bits.*", "", note) for note in notes]
        if said != sentences(trial["fault"], layout, ranks):
            wrong[number] = (trial, said)
    assert wrong == {}, json.dumps(wrong, indent=1)


@pytest.mark.parametrize(("layout", "ranks"), sampled([("ddp", 2), ("ddp", 4), ("zero1", 2)], 0))
def test_copies_that_each_rank_rounds_in_its_own_way_are_called_design_and_no_rank_is_accused(
    launch: Callable[..., Path], layout: str, ranks: int
) -> None:
    nowhere = {"of": "design", "rank": -1, "step": -1}
    trials = [{"dtype": dtype, "fault": nowhere} for dtype in ("float32", "bfloat16")]
    directory = launch("flipped.py", layout, ranks, trials=trials, format="parquet", ops=["norm"], replica_check=True)
    for number in range(len(trials)):
        told = merged(directory / str(number)).told()
        assert told["bits"]["first"] == []
        assert "param_origin" in told["bits"]["by_design"]
        notes = [one["note"] for one in told["notes"] if one["about"].startswith("copies")]
        assert notes
        assert all("so by design" in note for note in notes), notes


@pytest.mark.parametrize("layout", ["fsdp2", *(["ddp"] if PROVES else [])])
def test_a_tensor_that_changes_between_two_steps_is_named_also_in_a_shard_that_no_other_rank_holds(
    launch: Callable[..., Path], layout: str
) -> None:
    trials = [*faults(layout, 2), {"dtype": "float32", "fault": None}]
    for number, one in enumerate(trials[:-1]):
        one["fault"] |= {
            "of": ("moment", "weight between steps")[number % 2],
            "kind": ("exp_avg", "exp_avg_sq")[number // 2 % 2],
        }
    config: dict[str, Any] = {"format": "parquet", "ops": ["norm"], "replica_check": "all"}
    directory = launch("flipped.py", layout, 2, trials=trials, **config)
    for number, trial in enumerate(trials):
        report, fault = merged(directory / str(number)), trial["fault"]
        if fault is None:
            assert first_checksums(directory / str(number)) == checksums_of_new_model()
            assert "weights before step 2" in {one["about"] for one in report.told()["notes"]}  # a checkpoint was loaded
            assert wrong_bits(directory / str(number)) == []
            assert report.clean
            continue
        what = fault["kind"] if fault["of"] == "moment" else "weights"
        (told,) = [one for one in wrong_bits(directory / str(number)) if one.check == "between steps"]
        assert (told.step, told.ranks) == (fault["step"] + 1, (fault["rank"],)), trial
        assert [one["said"] for one in report.told()["bits"]["while_running"] if one["check"] == told.check] == [told.said]
        assert not report.clean
        text = told.said
        assert f"1 of 6 {what} changed after the optimizer's step {fault['step']} and before" in text, trial
        assert f": {'module.' * (layout == 'ddp')}{fault['name']}. The memory" in text, trial


def wrong_bits(base: Path) -> list[WrongBits]:
    """What all ranks have found while they trained."""
    return [found for path in sorted(base.glob("*/manifest.json")) for found in read_manifest(path).wrong_bits]


def first_checksums(base: Path) -> dict[str, str]:
    """The merged checksums of the weights that the first step began with."""
    rows = [row for row in tensors(base, "param_origin") if row["step"] == 0]
    return {str(row["name"]).removeprefix("module."): str(row["checksum"]) for row in rows}


def checksums_of_new_model() -> dict[str, str]:
    """Those of whole weights, as one rank has them."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    sums = {f"{layer}.{name}": check_sums(p) for layer, one in layers.items() for name, p in one.named_parameters()}
    columns = check_columns(np.array([*sums.values()], np.uint64).T)
    found = checksums(Partials(np.concatenate([np.zeros((len(COLUMNS) - len(columns), len(sums))), columns])))
    return {name: f"{one:016x}" for name, one in zip(sums, found.tolist(), strict=True)}


def sentences(fault: dict[str, Any] | None, layout: str, ranks: int) -> list[str]:
    """The same, as ranks say it while they train."""
    return [
        f"Copies of {kind} differ in step {step}: {name}: "
        + ("rank " if len(odd) == 1 else "ranks ")
        + ", ".join(map(str, odd))
        for kind, name, step, odd in expected(fault, layout, ranks)
    ]


def expected(fault: dict[str, Any] | None, layout: str, ranks: int) -> list[tuple[str, str, int, list[int]]]:
    if fault is None:
        return []
    alike = copies_of(layout, ranks, fault["rank"])
    step = fault["step"] + (fault["of"] == "moment")  # moments are measured when the optimizer has stepped
    return [(KINDS[fault["of"]], fault["name"], step, [fault["rank"]] if len(alike) > 2 else alike)]
