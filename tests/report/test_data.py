"""Ranks of a data-parallel group that compute the same from their data are named, and only those. And so are ranks whose data
stays the same from step to step.
"""

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


def check(base: Path, of: str = "ranks") -> CheckResult:
    with reported(base) as (_, checks, _):
        return next(one for one in checks if one.name == f"Data of {of}")


def written(
    base: Path,
    groups: Mapping[int, Mapping[str, tuple[int, ...]]],
    values: Callable[[int, int], Mapping[tuple[str, str], Floats]],
    world: int = 0,
    steps: Callable[[int], int] = lambda _: 10,
) -> Path:
    """Ranks in these groups. ``values`` of a rank and a step are by kind and name, ``steps`` the number of a rank's steps."""
    for rank, of in groups.items():
        one = RecordedRank(base, rank, world or len(groups), "parquet", of, ops=("norm",))
        for step in range(steps(rank)):
            rows: dict[str, list[Measured]] = {}
            for (kind, name), found in values(rank, step).items():
                micro_step = 0 if kind.startswith("actv") else -1
                rows.setdefault(kind, []).append(Measured(name, found.tolist(), micro_step=micro_step))
            one.write(step, rows)
        one.close()
    return base


WEIGHT = ("grad_unreduced", "weight")


def together(ranks: int) -> Mapping[int, Mapping[str, tuple[int, ...]]]:
    """All are in one data-parallel group."""
    return {rank: {"dp": tuple(range(ranks))} for rank in range(ranks)}


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


GROUPS: Mapping[str, tuple[Mapping[int, Mapping[str, tuple[int, ...]]], str]] = {
    "tensor-parallel ranks have the same data": ({rank: {"dp": (rank % 2, rank % 2 + 2)} for rank in range(4)}, GOOD),
    "all are data-parallel": (together(4), BAD),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_only_ranks_of_one_data_parallel_group_are_compared(groups: str, tmp_path: Path) -> None:
    """Ranks 0 and 1 have the same data, and so have ranks 2 and 3."""
    ranks, state = GROUPS[groups]

    def values(rank: int, step: int) -> Mapping[tuple[str, str], Floats]:
        return {("grad_unreduced", name): same(step, f"{name} {rank // 2}") for name in NAMES["grad_unreduced"]}

    found = check(written(tmp_path, ranks, values))
    assert found.state == state
    assert state == GOOD or found.finding.says.startswith("Ranks 0, 1 of")


def test_one_rank_or_an_unknown_group_is_not_looked_at(tmp_path: Path) -> None:
    for world in (1, 2):
        groups: Mapping[int, Mapping[str, tuple[int, ...]]] = {rank: {} for rank in range(world)}
        found = check(written(tmp_path / str(world), groups, lambda _, step: {WEIGHT: same(step, "weight")}))
        assert found.state == NOT_LOOKED_AT
        assert found.finding.says.startswith("One rank" if world == 1 else "It is not known")


def test_one_rank_of_each_group_is_not_looked_at(tmp_path: Path) -> None:
    groups = {0: {"dp": (0, 1)}, 2: {"dp": (2, 3)}}
    found = check(written(tmp_path, groups, lambda _, step: {WEIGHT: same(step, "weight")}, world=4))
    assert found.state == NOT_LOOKED_AT


def test_ranks_whose_gradients_are_zero_are_not_alike(tmp_path: Path) -> None:
    base = written(tmp_path, together(4), lambda rank, step: {WEIGHT: same(step, str(rank)) * (rank < 2)})
    assert check(base).state == GOOD


def test_ranks_of_hybrid_shards_are_data_parallel_in_both_ways(tmp_path: Path) -> None:
    """Ranks 1 and 3 have the same data, and only ``dp_replicate`` joins them."""
    groups = {
        rank: {"dp_shard": (rank // 2 * 2, rank // 2 * 2 + 1), "dp_replicate": (rank % 2, rank % 2 + 2)} for rank in range(4)
    }
    found = check(written(tmp_path, groups, lambda rank, step: {WEIGHT: same(step, "0121"[rank])}))
    assert found.state == BAD
    assert found.finding.says.startswith("Ranks 1, 3 of")


HEAD = ("actv_grad", "head.input")


@pytest.mark.parametrize("kind", ["grad_unreduced", "actv"])
def test_gradients_of_a_linear_loss_do_not_accuse_ranks_that_differ_elsewhere(kind: str, tmp_path: Path) -> None:
    """Whatever the data, the gradient of a mean of the last module's output is the same."""
    base = written(tmp_path, together(2), lambda rank, step: {HEAD: same(step, "head"), (kind, "head"): same(step, str(rank))})
    assert check(base).state == GOOD


def test_equal_gradients_of_activations_alone_leave_a_doubt(tmp_path: Path) -> None:
    found = check(written(tmp_path, together(2), lambda _, step: {HEAD: same(step, "head")}))
    assert found.state == BAD
    assert "if the loss is linear" in found.finding.then


@pytest.mark.parametrize(("name", "state"), [(".input", BAD), (".input.tokens", BAD), ("positions.output", NOT_LOOKED_AT)])
def test_activations_accuse_if_inputs_of_the_model_are_among_them(name: str, state: str, tmp_path: Path) -> None:
    def values(_: int, step: int) -> Mapping[tuple[str, str], Floats]:
        return {("actv", name): same(step, name), ("actv", "layers.0.output"): same(step, "0")}

    found = check(written(tmp_path, together(2), values))
    assert found.state == state
    if state == BAD:
        assert found.finding.says.startswith(
            "Ranks 0, 1 of a data-parallel group had equal inputs of the model and activations"
        )


def test_equal_inputs_do_not_accuse_ranks_whose_activations_differ(tmp_path: Path) -> None:
    """The inputs that are tensors may be masks alone."""
    base = written(
        tmp_path, together(2), lambda rank, step: {("actv", ".input"): same(step, ""), ("actv", "out"): same(step, str(rank))}
    )
    assert check(base).state == GOOD


def test_nothing_is_said_of_a_rank_that_is_missing(tmp_path: Path) -> None:
    found = check(written(tmp_path, {0: {"dp": (0, 1)}}, lambda _, step: {WEIGHT: same(step, "weight")}, world=2))
    assert found.state == NOT_LOOKED_AT
    assert found.finding.says.startswith("One rank recorded: there is no other")


def test_nothing_is_said_of_steps_after_another_rank_has_stopped(tmp_path: Path) -> None:
    base = written(tmp_path, together(2), lambda _, step: {WEIGHT: same(step, "weight")}, steps=lambda rank: 20 if rank else 40)
    found = check(base)
    assert found.state == NOT_LOOKED_AT
    assert found.finding.says.startswith("Among the last steps")


@pytest.mark.parametrize(("factor", "state"), [(1 + 1e-6, BAD), (1 + 1e-3, GOOD)])
def test_kernels_may_round_otherwise_on_each_rank(factor: float, state: str, tmp_path: Path) -> None:
    base = written(tmp_path, together(3), lambda rank, step: {WEIGHT: same(step, "weight") * factor**rank})
    assert check(base).state == state


def inputs(
    base: Path, draw: Callable[[int, int, str], str], names: tuple[str, ...] = (".input.x", ".input.mask")
) -> CheckResult:
    """What is said of steps if inputs have values drawn by rank, step and name."""

    def values(rank: int, step: int) -> Mapping[tuple[str, str], Floats]:
        drawn = {("actv", name): same(0, draw(rank, step, name)) for name in names}
        return {**drawn, ("actv", "layers.0.output"): same(step, str(rank))}

    return check(written(base, together(2), values), "steps")


@pytest.mark.parametrize(("ranks", "where"), [((0, 1), "ranks 0, 1"), ((1,), "rank 1")])
def test_ranks_whose_inputs_stay_the_same_are_named_without_blame(ranks: tuple[int, ...], where: str, tmp_path: Path) -> None:
    found = inputs(tmp_path, lambda rank, step, name: name if rank in ranks else f"{name} {step}")
    assert found.state == GOOD
    assert found.finding.says.startswith(
        f"The model had the same inputs (.input.x, .input.mask) in each of the last 8 recorded steps on {where}. "
    )
    assert found.finding.then == found.finding.says


@pytest.mark.parametrize(
    "draw",
    [
        lambda _rank, step, name: name if "mask" in name else str(step),
        lambda _rank, step, name: f"{name} {step == 6}",
    ],
    ids=["all but one", "in all steps but one"],
)
def test_inputs_of_which_some_stay_the_same_are_good(draw: Callable[[int, int, str], str], tmp_path: Path) -> None:
    found = inputs(tmp_path, draw)
    assert (found.state, found.finding.then) == (GOOD, "")


def test_steps_without_inputs_of_the_model_are_not_looked_at(tmp_path: Path) -> None:
    assert inputs(tmp_path, lambda *_: "", names=()).state == NOT_LOOKED_AT
