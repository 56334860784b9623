"""Features, shares and histograms come through a merge, as far as what was recorded says enough."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_job import EXACT_AND_ROUNDED, FORMATS, RecordedRank, files, merged, table, tensors
from sink_rows import SIX_OPS, Measured, magnitudes_of

from monitor.merge.outputs import PER_RANK
from monitor.merge.report import Report
from monitor.series import Placement, Shard
from monitor.stats.features import HEADS, HEADS_ABOVE, SINK_QUERIES
from monitor.stats.histograms import LOSSES, histogram_text
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ

SHAPES = ((2, 4), (4, 4))
"""Of the parts of a matrix on two ranks."""
OUTPUTS = ("hdf5", "csv", "parquet")
ATTENTION = Measured("h.0.attn", micro_step=0, numbers={COUNT: 4, SUM: 6.0, SUMSQ: 3.0})
HEAD = Measured(
    "h.0.attn.heads",
    micro_step=0,
    numbers={COUNT: 4, SUM: 9.0, SUMSQ: 0.5, MAX: 7.0, SINK_QUERIES: 2, HEADS: 2, HEADS_ABOVE: 1},
)
MATRIX = Measured("m", numbers={COUNT: 16, SMALLS: 1, SUMSQ: 25.0, MAX: 2.0}, shape=(4, 4))
PARTS = ([0.0, 2.0**-30, -0.75], [3.0, 1e30])
HISTOGRAM_OPS = (*SIX_OPS, "magnitude_histogram", "underflow_fp16", "overflow_fp16")


def of_a_part(rank: int) -> dict[str, list[Measured]]:
    """Features of a matrix of which each rank has some rows."""
    shape, elements = SHAPES[rank], (8, 16)[rank]
    numbers = {
        "linear_hook": {COUNT: elements, SMALLS: 1, SUMSQ: (9.0, 16.0)[rank], MAX: 2.0},
        "moe_router_weight_hook": {COUNT: 2, SMALLS: 1, SUM: 0.5},
        "update_ratio": {COUNT: elements, SUM: (9.0, 16.0)[rank], SUMSQ: (36.0, 64.0)[rank]},
        "mg_direction": {COUNT: elements, SUM: (2.0, 16.0)[rank]},
    }
    return {kind: [Measured("w", numbers=own, shape=shape)] for kind, own in numbers.items()}


def cut(base: Path, format: str | Sequence[str], steps: int = 2, **how: object) -> Report:  # noqa: A002
    for rank in (0, 1):
        one = RecordedRank(base, rank, 2, format, **how)  # type: ignore[arg-type]
        rows = of_a_part(rank)
        for kind in rows:
            one.place(kind, "w", Placement(shard=Shard((0, 1), (6, 4), (2 * rank, 0))))
        for step in range(steps):
            one.write(step, rows)
        one.close()
    return merged(base)


def whole(base: Path, kind: str) -> dict[str, object]:
    """The first row of ``w``, without what says what it is of."""
    (row, *_) = tensors(base, kind)
    return {
        name: row[name] for name in table(base, "global", kind).column_names if name not in PER_RANK.names or name == "count"
    }


def reasons(report: Report) -> dict[tuple[str, str], str]:
    return {(one["kind"], one["op"]): one["reason"] for one in report.told()["not_combined"]["listed"]}


class TestParts:
    @pytest.mark.parametrize("format", [*FORMATS, FORMATS])
    def test_norms_combine_and_what_only_the_whole_has_is_missing(self, tmp_path: Path, format: str) -> None:  # noqa: A002
        report = cut(tmp_path, format)
        assert {key: whole(tmp_path, "linear_hook").get(key) for key in ("sr", "kernel_norm", "frobenius_norm", "count")} == {
            "sr": None,
            "kernel_norm": None,
            "frobenius_norm": 5.0,
            "count": 24,
        }
        assert whole(tmp_path, "moe_router_weight_hook")["router_weight_similarity"] is None
        of_a_whole = [
            ("linear_hook", "kernel_norm"),
            ("linear_hook", "sr"),
            ("moe_router_weight_hook", "router_weight_similarity"),
        ]
        assert [reasons(report)[one].split(",")[0] for one in of_a_whole] == ["the matrix is split over ranks"] * 3
        assert report.clean

    @pytest.mark.parametrize("format", [*FORMATS, FORMATS])
    def test_the_size_of_an_update_is_that_of_the_whole(self, tmp_path: Path, format: str) -> None:  # noqa: A002
        cut(tmp_path, format)
        found = whole(tmp_path, "update_ratio")
        assert {key: found[key] for key in ("update_ratio", "update_norm", "weight_norm")} == {
            "update_ratio": 0.5,
            "update_norm": 5.0,
            "weight_norm": 10.0,
        }

    @pytest.mark.parametrize("format", [*FORMATS, FORMATS])
    def test_a_share_is_weighted_with_the_elements_of_the_parts(self, tmp_path: Path, format: str) -> None:  # noqa: A002
        report = cut(tmp_path, format)
        assert [(row["mg_direction"], row["count"]) for row in tensors(tmp_path, "mg_direction")] == [(0.75, 24)] * 2
        assert report.told()["unplaced"]["count"] == 0
        assert report.clean

    def test_every_row_of_every_rank_is_there_with_its_columns(self, tmp_path: Path) -> None:
        cut(tmp_path, "csv", steps=1)
        rows = table(tmp_path, "per_rank", "linear_hook").select(["rank", "sr", "kernel_norm", "frobenius_norm"]).to_pylist()
        assert rows == [
            {"rank": 0, "sr": 1.5, "kernel_norm": 2.0, "frobenius_norm": 3.0},
            {"rank": 1, "sr": 2.0, "kernel_norm": 2.0, "frobenius_norm": 4.0},
        ]
        assert table(tmp_path, "per_rank", "mg_direction")["mg_direction"].to_pylist() == [0.25, 1.0]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_features_of_one_rank_come_through_whatever_the_format(tmp_path: Path, format: str, output: str) -> None:  # noqa: A002
    one = RecordedRank(tmp_path, format=format, micro_step_kinds=["attention_hook", "attention_head_hook"])
    one.write(0, {"attention_hook": [ATTENTION], "attention_head_hook": [HEAD], "linear_hook": [MATRIX]})
    one.close()
    assert merged(tmp_path, format=output).clean
    (attention,) = tensors(tmp_path, "attention_hook")
    assert (attention["micro_step"], attention["entropy"], attention["softmax_max"]) == (0, 1.5, 0.75)
    assert attention["count"] == (None if format == "csv" else 4)
    (head,) = tensors(tmp_path, "attention_head_hook")
    assert [head[name] for name in ("max_logit", "heads_above", "entropy", "sink")] == [7.0, 0.5, 2.25, 0.25]
    (matrix,) = tensors(tmp_path, "linear_hook")
    assert (matrix["sr"], matrix["kernel_norm"], matrix["frobenius_norm"], matrix["count"]) == (2.5, 2.0, 5.0, 16)


@pytest.mark.parametrize(("format", "entropy"), [("hdf5", 1.0), ("parquet", 1.0), ("csv", None)])
def test_means_over_tokens_of_parts_combine_where_it_is_known_how_many(tmp_path: Path, format: str, entropy: object) -> None:  # noqa: A002
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, format, micro_step_kinds=["moe_router_logit_hook"])
        one.place("moe_router_logit_hook", "r", Placement(shard=Shard((0, 1), (8, 2), (6 * rank, 0))))
        numbers = ({COUNT: 6, SUM: 3.0}, {COUNT: 2, SUM: 5.0})[rank]
        one.write(0, {"moe_router_logit_hook": [Measured("r", micro_step=0, numbers=numbers, shape=((6, 2), (2, 2))[rank])]})
        one.close()
    report = merged(tmp_path)
    (row,) = tensors(tmp_path, "moe_router_logit_hook")
    assert row["per_token_expert_entropy"] == entropy
    expected = (
        {}
        if entropy
        else {("moe_router_logit_hook", "per_token_expert_entropy"): "the weights of the parts in the mean are not known"}
    )
    assert {key: reason.split(":")[0] for key, reason in reasons(report).items()} == expected


class TestShares:
    """In CSV they stand among calls of operators, which they are not."""

    @pytest.mark.parametrize("format", [*FORMATS, FORMATS])
    def test_they_are_distinguished_from_calls(self, tmp_path: Path, format: str) -> None:  # noqa: A002
        one = RecordedRank(tmp_path, format=format, counted_kinds=["other"], ops=("mean", "norm"))
        share = Measured("w", numbers={COUNT: 8, SUM: 6.0}, shape=(8,))
        for step in range(3):
            one.write(step, {"other": [Measured("all_reduce.post_0", calls=2)], "mg_direction": [share]})
        one.close()
        assert merged(tmp_path).clean
        assert [(row["name"], row["calls"]) for row in tensors(tmp_path, "other")] == [("all_reduce.post_0", 2)] * 3
        assert [(row["name"], row["mg_direction"], row["count"]) for row in tensors(tmp_path, "mg_direction")] == [
            ("w", 0.75, 8)
        ] * 3

    def test_rows_that_no_manifest_knows_stay_where_they_are_and_are_reported(self, tmp_path: Path) -> None:
        one = RecordedRank(tmp_path, format="csv")
        one.write(0, {"other": [Measured("loss_scale")]})
        one.close()
        path = one.directory / "other_0-4.csv"
        path.write_text(path.read_text() + "0,w,0" + ",1" * len(SIX_OPS) + "\n")
        assert not merged(tmp_path).clean
        assert table(tmp_path, "per_rank", "other")["name"].to_pylist() == ["loss_scale", "w"]


class TestHistograms:
    def _recorded(self, base: Path, format: str | Sequence[str], ops: tuple[str, ...] = HISTOGRAM_OPS, **how: object) -> None:  # noqa: A002
        for rank, held in enumerate(PARTS):
            one = RecordedRank(base, rank, 2, format, ops=ops, **how)  # type: ignore[arg-type]
            one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (5,), (3 * rank,))))
            for step in range(6):
                one.write(step, {"grad_reduced": [Measured("w", held, magnitudes=True)]})
            one.close()

    @pytest.mark.parametrize("output", OUTPUTS)
    @pytest.mark.parametrize("format", [*FORMATS, FORMATS])
    def test_they_add_up_and_say_what_of_the_whole_is_lost(self, tmp_path: Path, format: str, output: str) -> None:  # noqa: A002
        self._recorded(tmp_path, format)
        merged(tmp_path, format=output)
        every = tensors(tmp_path)
        assert {row["magnitude_histogram"] for row in every} == {histogram_text(magnitudes_of([*PARTS[0], *PARTS[1]]))}
        assert [(row["underflow_fp16"], row["overflow_fp16"]) for row in every] == [pytest.approx((0.2, 0.2))] * 6
        first = table(tmp_path, "per_rank").to_pylist()[0]
        assert (first["magnitude_histogram"], first["underflow_fp16"]) == (
            histogram_text(magnitudes_of(PARTS[0])),
            pytest.approx(1 / 3),
        )

    def test_from_hdf5_all_losses_are_there_and_from_csv_those_that_were_recorded(self, tmp_path: Path) -> None:
        for format in EXACT_AND_ROUNDED:  # noqa: A001
            self._recorded(tmp_path / format, format)
            merged(tmp_path / format)
        exact, rounded = (tensors(tmp_path / one)[0] for one in EXACT_AND_ROUNDED)
        assert all(exact[op] is not None for op in LOSSES)
        assert {op for op in LOSSES if rounded[op] is not None} == {"underflow_fp16", "overflow_fp16"}

    def test_a_job_that_counted_none_has_no_such_columns(self, tmp_path: Path) -> None:
        self._recorded(tmp_path, "hdf5", ops=SIX_OPS)
        merged(tmp_path)
        assert {"magnitude_histogram", *LOSSES}.isdisjoint(table(tmp_path, "global").column_names)

    @pytest.mark.parametrize("format", FORMATS)
    def test_rows_that_are_put_in_order_first_are_merged_to_the_same(self, tmp_path: Path, format: str) -> None:  # noqa: A002
        self._recorded(tmp_path, format, steps_per_record=100)
        merged(tmp_path, "whole")
        merged(tmp_path, "cut", rows=16)
        assert len(files(tmp_path / "cut")) > len(files(tmp_path / "whole"))
        assert tensors(tmp_path, output="cut") == tensors(tmp_path, output="whole")

    @pytest.mark.parametrize(
        ("cell", "reason"), [(" 7:1", "an unknown bin"), (" 1:1:1", "a histogram is not a list of upper:count pairs")]
    )
    def test_what_is_no_histogram_is_set_aside(self, tmp_path: Path, cell: str, reason: str) -> None:
        self._recorded(tmp_path, "csv")
        path = next(tmp_path.glob("*-rank0-*")) / "grad_reduced_0-4.csv"
        path.write_text(path.read_text().replace(" 1:1", cell))
        assert reason in merged(tmp_path).told()["set_aside"]["listed"][0]["reason"]
