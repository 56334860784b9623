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
from monitor.stats.partials import COUNT, SUM

BATCH = [[0.5, -1.0, 2.0, 0.0], [3.0, -4.0, 0.25, 1.5]]
"""What a module gives for each micro-batch."""
OPS = (*SIX_OPS, "std")
Rows = dict[str, list[Measured]]


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
    assert (status, said.partition("\n")[0]) == (1, "1 difference among 9 rows")
    assert "first: step 1, all ranks: grad_reduced/up.weight: " in said


def test_a_whole_tensor_of_another_size_differs(tmp_path: Path) -> None:
    sides = on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", second=(-3.0, 1.0, 5.0, 0.0))
    status, said = compared(*sides)
    assert status == 1
    assert "elements 5, min" in said
    assert "elements 6, min" in said


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (2.0, True), (0.5, False), (1.1, False), (3.0, False)])
def test_gradients_are_scaled_as_parts_of_the_batch_can_be_and_in_no_other_way(
    tmp_path: Path, scale: float, same: bool
) -> None:
    status, said = compared(on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", scale))
    assert (status, "first: step 0, all ranks: actv_grad/up.output" in said) == (int(not same), not same)


@pytest.mark.parametrize(("copies", "same"), [(2, True), (3, False)])
def test_copies_of_activations_count_once_if_there_are_as_many_ranks(tmp_path: Path, copies: int, same: bool) -> None:
    status, said = compared(on_one_rank(tmp_path / "one"), on_two_ranks(tmp_path / "two", scale=1.0, copies=copies))
    assert (status == 0) == same, said
    assert ("1 tensor of actv is there in several copies on one side, which count once" in said) == same


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
    assert "would both be up.output" in said
    assert compared("--map", "decoder.3.ffn_*=*", *sides)[0] == 0
    status, said = compared("--map", "decoder.3.ffn_*=up_*", *sides)
    assert status == 2
    assert "makes no name that" in said


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


# --- Nothing is called the same without having been compared.


def recorded(base: Path, *ranks: Sequence[Rows], ops: Sequence[str] = OPS, format: str = "parquet") -> Path:  # noqa: A002
    """Args: ranks: Of each, the rows of each step."""
    for rank, steps in enumerate(ranks):
        one = RecordedRank(base, rank, len(ranks), format, {"dp": range(len(ranks))}, ops=tuple(ops))
        for step, rows in enumerate(steps):
            one.write(step, rows)
        one.close()
    return base


GRADIENT = {"grad_reduced": [Measured("w")]}


def test_a_kind_and_a_module_that_begin_later_are_compared_from_there_on(tmp_path: Path) -> None:
    late = {"actv": [Measured("m.output", [1.0, 2.0], 0)]}
    other = {"actv": [Measured("m.output", [5.0, 2.0], 0)]}
    one = recorded(tmp_path / "one", [GRADIENT, GRADIENT, GRADIENT | late])
    two = recorded(tmp_path / "two", *[[GRADIENT | other] * 3] * 2)
    status, said = compared(one, two)
    assert (status, "first: step 2, all ranks: actv/m.output" in said) == (1, True), said
    assert "two alone has actv of all ranks at steps 0 to 1" in said


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        (["actv"], [], "one alone has actv of all ranks"),
        (["run"], [], "one alone has run of all ranks"),
        (["actv"], ["named"], "one alone has actv of m.output. Are they called otherwise? --map names them alike"),
    ],
)
def test_kinds_and_names_without_a_counterpart_are_missing(
    tmp_path: Path, own: list[str], others: list[str], said: str
) -> None:
    rows = {
        "actv": {"actv": [Measured("m.output", [1.0, 2.0], 0)]},
        "named": {"actv": [Measured("net.m.output", [1.0, 2.0], 0)]},
        "run": {"run": [Measured("loss", numbers={COUNT: 1, SUM: 2.0})]},
    }
    left = recorded(tmp_path / "one", [GRADIENT | rows[own[0]]])
    right = recorded(tmp_path / "two", *[[GRADIENT | {k: v for name in others for k, v in rows[name].items()}]] * 2)
    status, found = compared(left, right)
    assert (status, said in found) == (1, True), found


def test_a_loss_that_one_side_alone_has_is_a_difference_and_a_norm_is_not(tmp_path: Path) -> None:
    numbers = {name: [Measured(name, numbers={COUNT: 1, SUM: 2.0})] for name in ("loss", "grad_norm")}
    for name, status in (("loss", 1), ("grad_norm", 0)):
        left = recorded(
            tmp_path / f"{name}1", [GRADIENT | {"run": [*numbers[name], Measured("x", numbers={COUNT: 1, SUM: 1})]}]
        )
        right = recorded(tmp_path / f"{name}2", *[[GRADIENT | {"run": [Measured("x", numbers={COUNT: 1, SUM: 1})]}]] * 2)
        assert compared(left, right)[0] == status


@pytest.mark.parametrize("ops", [("std",), ("kurtosis",), ("checksum",)], ids=str)
def test_ops_that_do_not_combine_are_not_looked_at(tmp_path: Path, ops: tuple[str, ...]) -> None:
    left = recorded(tmp_path / "one", [{"grad_reduced": [Measured("w", [1.0, 2.0, 3.0, 4.0])]}], ops=ops, format="csv")
    for rank in range(2):
        one = RecordedRank(tmp_path / "two", rank, 2, "csv", {"dp": (0, 1)}, ops=ops)
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (4,), (rank * 2,))))
        one.write(0, {"grad_reduced": [Measured("w", [100.0, 300.0])]})
        one.close()
    for options in ([], ["--tolerance", "0"]):
        status, said = compared(left, tmp_path / "two", *options)
        assert (status, "grad_reduced: no tensor has a number of the same op" in said) == (1, True), said


def test_a_rank_that_has_lost_its_gradients_is_missing(tmp_path: Path) -> None:
    rows = {"param_origin": [Measured("w"), Measured("v")], **GRADIENT}
    left = recorded(tmp_path / "one", [rows], [rows])
    right = recorded(tmp_path / "two", [rows], [{"param_origin": rows["param_origin"]}])
    status, said = compared(left, right)
    assert (status, "one alone has grad_reduced of rank 1" in said) == (1, True), said


def test_ranks_whose_own_gradients_differ_are_not_one_even_if_their_average_is(tmp_path: Path) -> None:
    left = recorded(tmp_path / "one", [{"grad_reduced": [Measured("w", [3.0, 4.0])]}], ops=("norm",))
    right = recorded(
        tmp_path / "two",
        [{"grad_reduced": [Measured("w", [0.0, 0.0])]}],
        [{"grad_reduced": [Measured("w", [3 * 2**0.5, 4 * 2**0.5])]}],
        ops=("norm",),
    )
    assert compared(left, right)[0] == 1


def test_ranks_must_agree_on_the_learning_rate(tmp_path: Path) -> None:
    def rate(value: float) -> Rows:
        return GRADIENT | {"run": [Measured("learning_rate.0", numbers={COUNT: 1, SUM: value})]}

    left = recorded(tmp_path / "one", [rate(0.1)])
    assert compared(left, recorded(tmp_path / "same", [rate(0.1)], [rate(0.1)]))[0] == 0
    assert compared(left, recorded(tmp_path / "three", *[[rate(0.1)]] * 3))[0] == 0  # 0.1 + 0.1 + 0.1 is not 3 · 0.1
    status, said = compared(left, recorded(tmp_path / "other", [rate(0.0)], [rate(0.2)]))
    assert (status, "other: ranks disagree on learning_rate.0" in said) == (1, True), said


def test_a_batch_that_is_repeated_in_one_step_is_no_copy(tmp_path: Path) -> None:
    def rows(step: int, twice: bool) -> Rows:
        micro_steps = range(2 if twice and step == 1 else 1)
        return GRADIENT | {"actv": [Measured("m.output", [1.0, 2.0], micro) for micro in micro_steps]}

    left = recorded(tmp_path / "one", *[[rows(step, False) for step in range(3)]] * 2)
    right = recorded(tmp_path / "two", *[[rows(step, True) for step in range(3)]] * 2)
    status, said = compared("--whole", left, right)
    assert (status, "first: step 1, all ranks: actv/m.output" in said) == (1, True), said


def test_a_side_without_whole_tensors_is_said_and_nothing_fails(tmp_path: Path) -> None:
    left = recorded(tmp_path / "one", [GRADIENT])
    right = recorded(tmp_path / "two", *[[{"actv": [Measured("m.output", [1.0], 0)]}]] * 2)
    status, said = compared(left, right)
    assert (status, "one alone has grad_reduced" in said, "two alone has actv" in said) == (1, True, True), said
    assert said.startswith("Not looked at: ")


def test_names_with_braces_are_names(tmp_path: Path) -> None:
    rows = {**GRADIENT, "actv": [Measured("m.output", [1.0], 0), Measured("{0}{x.output", [1.0], 0)]}
    left = recorded(tmp_path / "one", [rows])
    right = recorded(tmp_path / "two", *[[{**GRADIENT, "actv": rows["actv"][:1]}]] * 2)
    status, said = compared(left, right)
    assert (status, "one alone has actv of {0}{x.output" in said) == (0, True), said
