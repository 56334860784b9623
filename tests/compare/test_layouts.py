"""Runs in other layouts are compared by whole tensors; real ones are in ``bench/compare_runs.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_job import RecordedRank, merged
from sink_rows import SIX_OPS, Measured
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.series import Placement, Shard

BATCH = [[0.5, -1.0, 2.0, 0.0], [3.0, -4.0, 0.25, 1.5]]
"""What a module gives for each micro-batch."""
OPS = (*SIX_OPS, "std")


def compared(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "300"})
    return outcome.exit_code, outcome.output


def on_one_rank(base: Path, wrapper: str = "", format: str = "parquet", **more: Sequence[Measured]) -> Path:  # noqa: A002
    one = RecordedRank(base, format=format, ops=OPS)
    for step in range(3):
        rows = {
            "actv": [Measured(f"{wrapper}up.output", some, micro) for micro, some in enumerate(BATCH)],
            "actv_grad": [Measured(f"{wrapper}up.output", some, micro) for micro, some in enumerate(BATCH)],
            "grad_reduced": [Measured(f"{wrapper}up.weight", [1.0, 2.0, -3.0, step, 5.0])],
            "grad_unreduced": [Measured(f"{wrapper}up.weight", [1.0, 2.0, -3.0, step, 5.0])],
        }
        one.write(step, {kind: [*rows[kind], *more.get(kind, ())] for kind in rows})
    one.close()
    return base


def on_two_ranks(
    base: Path,
    scale: float = 2.0,
    second: Sequence[float] = (-3.0, 1.0, 5.0),
    copies: int = 1,
    without: Sequence[str] = (),
    format: str = "parquet",  # noqa: A002
) -> Path:
    """The same, each weight and each micro-batch cut in two.

    Args:
        scale: Of gradients of activations, as each rank averages its own loss.
        second: The part of the weight's gradient that rank 1 has in step 1.
        copies: How often each rank holds its activations.
        without: Kinds that rank 1 does not record.
    """
    for rank in range(2):
        one = RecordedRank(base, rank, 2, format, {"dp": (0, 1)}, ops=OPS)
        one.place("grad_reduced", "up.weight", Placement(shard=Shard((0, 1), (5,), (rank * 2,))))
        for step in range(3):
            part = [[1.0, 2.0], [-3.0, step, 5.0]][rank] if (rank, step) != (1, 1) else list(second)
            halves = [some[rank * 2 : rank * 2 + 2] * copies for some in BATCH]
            rows = {
                "actv": [Measured("up.output", some, micro) for micro, some in enumerate(halves)],
                "actv_grad": [Measured("up.output", [scale * one for one in some], m) for m, some in enumerate(halves)],
                "grad_reduced": [Measured("up.weight", part)],
                "grad_unreduced": [Measured("up.weight", [1.0, 2.0, -3.0, step, 5.0 + rank])],
            }
            one.write(step, {kind: some for kind, some in rows.items() if not (rank and kind in without)})
        one.close()
    return base


@pytest.mark.parametrize("format", ["csv", "hdf5", "parquet"])
@pytest.mark.parametrize("merges", [False, True])
def test_the_same_training_on_one_rank_and_on_two_is_the_same(tmp_path: Path, format: str, merges: bool) -> None:  # noqa: A002
    sides = [on_one_rank(tmp_path / "one", format=format), on_two_ranks(tmp_path / "two", format=format)]
    if merges:
        merged(sides[1])
        sides[1] /= "merged"
    for pair in (sides, sides[::-1]):
        status, said = compared(*pair)
        assert (status, said.partition("\n")[0]) == (0, "the same: 9 rows"), said
    assert "two has actv_grad 2 times as large" in compared(*sides)[1].replace("/merged", "")
    assert "two has grad_unreduced of single ranks, whose parts of the batch differ: up.weight" in said.replace("/merged", "")


def test_a_shard_that_differs_is_named_as_the_tensor_and_the_step(tmp_path: Path) -> None:
    sides = on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", second=(-3.0, 1.0, 5.01))
    status, said = compared(*sides)
    assert (status, said.partition("\n")[0]) == (1, "1 differences among 9 rows")
    assert "first: step 1, all ranks: grad_reduced/up.weight: absolute error 0.01" in said


def test_a_whole_tensor_of_another_size_differs(tmp_path: Path) -> None:
    sides = on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", second=(-3.0, 1.0, 5.0, 0.0))
    status, said = compared(*sides)
    assert status == 1
    assert "elements 5, min" in said
    assert "elements 6, min" in said


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (2.0, True), (0.5, True), (1.1, False), (3.0, False)])
def test_gradients_are_scaled_as_parts_of_the_batch_can_be_and_in_no_other_way(
    tmp_path: Path, scale: float, same: bool
) -> None:
    status, said = compared(on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", scale))
    assert (status, "first: step 0, all ranks: actv_grad/up.output" in said) == (int(not same), not same)


def test_copies_of_activations_count_once(tmp_path: Path) -> None:
    status, said = compared(on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", copies=3))
    assert status == 0, said
    assert "3 rows of actv are of several copies on one side, which count once" in said


def test_what_another_layout_need_not_have_is_noted_and_a_missing_weight_is_a_difference(tmp_path: Path) -> None:
    module = on_one_rank(tmp_path / "module", actv=[Measured("all.output", [1.0], 0)])
    weight = on_one_rank(tmp_path / "weight", grad_reduced=[Measured("all.weight", [1.0])])
    two = on_two_ranks(tmp_path / "two")
    status, said = compared(module, two)
    assert status == 0
    assert "module alone has actv of all.output, which the other layout need not have" in said
    status, said = compared(weight, two)
    assert status == 1
    assert "grad_reduced/all.weight: on the left side alone" in said


def test_a_rank_without_rows_is_missing(tmp_path: Path) -> None:
    status, said = compared(on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", without=("grad_reduced",)))
    assert status == 1
    assert "grad_reduced up.weight has not all its parts at steps 0 to 2" in said


def test_the_name_of_a_wrapper_is_no_difference(tmp_path: Path) -> None:
    sides = on_one_rank(tmp_path / "plain"), on_one_rank(tmp_path / "wrapped", wrapper="module._orig_mod.")
    assert compared(*sides)[0] == 0
    assert compared(*sides[::-1])[0] == 0
    assert compared(sides[1], on_two_ranks(tmp_path / "two"))[0] == 0


def test_ranks_are_compared_one_by_one_where_that_is_asked_for(tmp_path: Path) -> None:
    sides = on_two_ranks(tmp_path / "a"), on_two_ranks(tmp_path / "b", second=(-3.0, 1.0, 6.0))
    assert "first: step 1, rank1: grad_reduced/0:up.weight" in compared(*sides)[1]
    assert "first: step 1, all ranks: grad_reduced/up.weight" in compared("--whole", *sides)[1]
    status, said = compared("--ranks", on_one_rank(tmp_path / "one"), sides[0])
    assert status == 1
    assert "b alone has" not in said
    assert "a alone has grad_reduced" in said


# --- Names.


def test_names_are_mapped_by_the_first_rule_that_fits(tmp_path: Path) -> None:
    sides = on_one_rank(tmp_path / "one", wrapper="decoder.3.ffn_"), on_two_ranks(tmp_path / "two")
    rules = ["--map", "decoder.*.ffn_up.weight=up.weight", "--map", "decoder.3.*=up.output"]
    assert compared(*rules, *sides)[0] == 0
    status, said = compared(*rules[2:], *rules[:2], *sides)
    assert status == 2
    assert "--map decoder.*.ffn_up.weight=up.weight matches no name" in said.replace("\n", " ")
    assert compared("--map", "decoder.3.ffn_*=*", *sides)[0] == 0


@pytest.mark.parametrize("rule", ["decoder", "=up", "up=", "a.*=*.*"])
def test_a_rule_that_cannot_be_read_is_refused(tmp_path: Path, rule: str) -> None:
    status, said = compared("--map", rule, on_one_rank(tmp_path / "one"), on_one_rank(tmp_path / "two"))
    assert status == 2
    assert f"--map is '{rule}'. Write FROM=TO" in said


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    sides = [on_one_rank(tmp_path / side, grad_reduced=[Measured("down.weight")]) for side in ("one", "two")]
    status, said = compared("--map", "*.weight=w", *sides)
    assert status == 2
    assert "down.weight and up.weight would both be w" in said or "up.weight and down.weight would both be w" in said
