"""Ranks of a data-parallel group that compute the same from their data are named, and only those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from recorded_job import RecordedRank
from reported_job import STEPS, record, reported
from sink_rows import Measured

from monitor.report.checks import CheckResult
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT
from monitor.stats.partials import Floats

NAMES = {"grad_unreduced": ["layers.1.weight", "layers.0.weight"], "param_origin": ["layers.0.weight"]}


def same(step: int, name: str) -> Floats:
    """Values that all ranks have."""
    return np.random.default_rng(crc32(f"{step} {name}".encode())).standard_normal(8)


def same_data(when: Callable[[int], bool], names: Mapping[str, float]) -> Callable[..., Floats]:
    """Local gradients that are equal on both ranks in some steps, times a factor of each name."""

    def fault(_rank: int, step: int, kind: str, name: str, values: Floats) -> Floats:
        return same(step, name) * names[name] if kind == "grad_unreduced" and name in names and when(step) else values

    return fault


def check(base: Path) -> CheckResult:
    with reported(base) as (_, checks, _):
        return next(one for one in checks if one.name == "Data of ranks")


ALL = dict.fromkeys(NAMES["grad_unreduced"], 1.0)


def test_ranks_with_the_same_data_are_named(tmp_path: Path) -> None:
    found = check(record(tmp_path, same_data(lambda _: True, ALL), names=NAMES))
    assert found.state == BAD
    assert found.finding.says.startswith("Ranks 0, 1 of a data-parallel group had equal local gradients in each of 8 steps")
    assert found.finding.place[:3] == (STEPS - 8, 1, "grad_unreduced")
    assert "DistributedSampler" in found.finding.then


@pytest.mark.parametrize(
    "fault",
    {
        "other data": same_data(lambda _: False, {}),
        "the same data in other steps": same_data(lambda step: step != STEPS - 3, ALL),
        "one tensor of two that is the same": same_data(lambda _: True, {"layers.0.weight": 1.0}),
        "one tensor of two without gradients": same_data(lambda _: True, {"layers.0.weight": 0.0}),
    }.values(),
)
def test_ranks_with_other_data_are_good(fault: Callable[..., Floats], tmp_path: Path) -> None:
    assert check(record(tmp_path, fault, names=NAMES)).state == GOOD


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_gradients_that_say_nothing_are_not_looked_at(factor: float, tmp_path: Path) -> None:
    fault = same_data(lambda _: True, dict.fromkeys(ALL, factor))
    assert check(record(tmp_path, fault, names=NAMES)).state == NOT_LOOKED_AT


def test_a_run_without_local_gradients_is_not_looked_at(tmp_path: Path) -> None:
    assert check(record(tmp_path, names={"param_origin": ["layers.0.weight"]})).state == NOT_LOOKED_AT


def test_a_short_run_is_not_looked_at(tmp_path: Path) -> None:
    assert check(record(tmp_path, same_data(lambda _: True, ALL), steps=7, names=NAMES)).state == NOT_LOOKED_AT


def test_the_last_steps_of_a_rank_that_was_killed_are_left_out(tmp_path: Path) -> None:
    assert check(record(tmp_path, same_data(lambda _: True, ALL), names=NAMES, open_after={1: STEPS - 4})).state == BAD


GROUPS: Mapping[str, tuple[dict[int, tuple[int, ...]], int]] = {
    "tensor-parallel ranks have the same data": ({0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}, 2),
    "all are data-parallel": (dict.fromkeys(range(4), (0, 1, 2, 3)), 4),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_only_ranks_of_one_data_parallel_group_are_compared(groups: str, tmp_path: Path) -> None:
    """Ranks 0 and 1 have the same data, and so have ranks 2 and 3."""
    group_of, world = GROUPS[groups]
    for rank in range(4):
        one = RecordedRank(tmp_path, rank, 4, "parquet", {"dp": group_of[rank]}, ops=("norm",))
        for step in range(10):
            rows = [Measured(name, same(step, f"{name} {rank // 2}").tolist()) for name in NAMES["grad_unreduced"]]
            one.write(step, {"grad_unreduced": rows})
        one.close()
    found = check(tmp_path)
    assert found.state == (GOOD if world == 2 else BAD)
    assert world == 2 or found.finding.says.startswith("Ranks 0, 1 of")


def test_one_rank_or_an_unknown_group_is_not_looked_at(tmp_path: Path) -> None:
    for world in (1, 2):
        base = tmp_path / str(world)
        for rank in range(world):
            one = RecordedRank(base, rank, world, "parquet", {}, ops=("norm",))
            for step in range(10):
                one.write(step, {"grad_unreduced": [Measured("weight", same(step, "weight").tolist())]})
            one.close()
        found = check(base)
        assert found.state == NOT_LOOKED_AT
        assert found.finding.says.startswith("One rank" if world == 1 else "It is not known")


def test_one_rank_of_each_group_is_not_looked_at(tmp_path: Path) -> None:
    for rank, group in ((0, (0, 1)), (2, (2, 3))):
        one = RecordedRank(tmp_path, rank, 4, "parquet", {"dp": group}, ops=("norm",))
        for step in range(10):
            one.write(step, {"grad_unreduced": [Measured("weight", same(step, "weight").tolist())]})
        one.close()
    assert check(tmp_path).state == NOT_LOOKED_AT


def test_ranks_whose_gradients_are_zero_are_not_alike(tmp_path: Path) -> None:
    for rank in range(4):
        one = RecordedRank(tmp_path, rank, 4, "parquet", {"dp": (0, 1, 2, 3)}, ops=("norm",))
        for step in range(10):
            one.write(step, {"grad_unreduced": [Measured("weight", (same(step, str(rank)) * (rank < 2)).tolist())]})
        one.close()
    assert check(tmp_path).state == GOOD


def test_ranks_of_hybrid_shards_are_data_parallel_in_both_ways(tmp_path: Path) -> None:
    """Ranks 1 and 3 have the same data, and only ``dp_replicate`` joins them."""
    for rank in range(4):
        groups = {"dp_shard": (rank // 2 * 2, rank // 2 * 2 + 1), "dp_replicate": (rank % 2, rank % 2 + 2)}
        one = RecordedRank(tmp_path, rank, 4, "parquet", groups, ops=("norm",))
        for step in range(10):
            one.write(step, {"grad_unreduced": [Measured("weight", same(step, "0121"[rank]).tolist())]})
        one.close()
    found = check(tmp_path)
    assert found.state == BAD
    assert found.finding.says.startswith("Ranks 1, 3 of")


@pytest.mark.parametrize("kind", ["grad_unreduced", "actv"])
def test_gradients_of_a_linear_loss_do_not_accuse_ranks_that_differ_elsewhere(kind: str, tmp_path: Path) -> None:
    """Whatever the data, the gradient of a mean of the last module's output is the same."""
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", {"dp": (0, 1)}, ops=("norm",))
        for step in range(10):
            rows = {"actv_grad": [Measured("head.input", same(step, "head").tolist(), micro_step=0)]}
            other = Measured("head", same(step, str(rank)).tolist(), micro_step=0 if kind == "actv" else -1)
            one.write(step, {**rows, kind: [other]})
        one.close()
    assert check(tmp_path).state == GOOD


def test_equal_gradients_of_activations_alone_leave_a_doubt(tmp_path: Path) -> None:
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", {"dp": (0, 1)}, ops=("norm",))
        for step in range(10):
            one.write(step, {"actv_grad": [Measured("head.input", same(step, "head").tolist(), micro_step=0)]})
        one.close()
    found = check(tmp_path)
    assert found.state == BAD
    assert "if the loss is linear" in found.finding.then


def test_nothing_is_said_of_ranks_and_steps_that_were_not_looked_at(tmp_path: Path) -> None:
    """The other rank is missing, or stopped long before the last step."""
    for last in (0, 20):
        base = tmp_path / str(last)
        for rank in range(2 if last else 1):
            one = RecordedRank(base, rank, 2, "parquet", {"dp": (0, 1)}, ops=("norm",))
            for step in range(last if rank else 40):
                one.write(step, {"grad_unreduced": [Measured("weight", same(step, "weight").tolist())]})
            one.close()
        found = check(base)
        assert found.state == NOT_LOOKED_AT
        assert found.finding.says.startswith("Among the last steps" if last else "One rank recorded: there is no other")


@pytest.mark.parametrize(("factor", "state"), [(1 + 1e-6, BAD), (1 + 1e-3, GOOD)])
def test_kernels_may_round_otherwise_on_each_rank(factor: float, state: str, tmp_path: Path) -> None:
    for rank in range(3):
        one = RecordedRank(tmp_path, rank, 3, "parquet", {"dp": (0, 1, 2)}, ops=("norm",))
        for step in range(10):
            one.write(step, {"grad_unreduced": [Measured("weight", (same(step, "weight") * factor**rank).tolist())]})
        one.close()
    assert check(tmp_path).state == state
