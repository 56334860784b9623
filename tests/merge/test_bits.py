"""Copies that do not hold the same bits: which ranks, from which step on, and when that is no fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_job import FORMATS, RecordedRank, merged, table, tensors
from sink_rows import SIX_OPS, Measured

from monitor.coordinator.manifest import Earlier
from monitor.coordinator.manifest_format import WrongBits
from monitor.merge.report import Report, summary
from monitor.series import Placement, Shard

NAMES = tuple("abcdef")
RANKS = 4
VALUES = (0.5, -1.25, 3.0)
CHECKED = (*SIX_OPS, "checksum")

Fault = Callable[[int, int, str, str], bool]
"""Whether a rank's copy has another bit in a step: from rank, step, kind and name."""


def one_bit_else(values: tuple[float, ...], bit: int = 0) -> list[float]:
    raw = np.array(values, dtype=np.float32).view(np.uint32)
    raw[1] ^= np.uint32(1 << bit)
    return raw.view(np.float32).tolist()


def job(base: Path, fault: Fault, *, ranks: int = RANKS, kinds: tuple[str, ...] = ("grad_reduced",), **options: Any) -> Report:
    """A job whose ranks all write their copies, of which some have another bit, merged."""
    for rank in range(ranks):
        one = RecordedRank(base, rank, ranks, **{"ops": CHECKED, "replica_check": True, **options})
        for kind in kinds:
            for name in NAMES:
                one.place(kind, name, Placement(unclaimed=tuple(range(ranks))))
        for step in range(6):
            rows = {
                kind: [
                    Measured(name, one_bit_else(VALUES) if fault(rank, step, kind, name) else VALUES, checked=True)
                    for name in NAMES
                ]
                for kind in kinds
            }
            one.write(step, rows)
        one.close()
    return merged(base)


def bits(report: Report) -> Mapping[str, Any]:
    return report.told()["bits"]


def said(report: Report) -> list[str]:
    return [text for what, text in summary(report.told()) if what in ("bits", "")]


@pytest.mark.parametrize("format", FORMATS)
def test_the_odd_rank_is_named_with_the_first_step_and_the_tensor(tmp_path: Path, format: str) -> None:  # noqa: A002
    report = job(tmp_path, lambda rank, step, _, name: rank == 2 and step >= 3 and name == "c", format=format)
    (first,) = bits(report)["first"]
    assert (first["kind"], first["name"], first["step"]) == ("grad_reduced", "c", 3)
    assert (first["odd_ranks"], first["copies"], first["agreeing"]) == ([2], 4, 3)
    assert (bits(report)["agreed_until"], bits(report)["later"]) == (2, {"differences": 2, "tensors": 0})
    assert bits(report)["compared"] == {"grad_reduced": 6 * len(NAMES)}
    assert not report.clean
    assert report.disagreements == []  # the norm is the same to a millionth
    text, then, later = said(report)
    assert text.startswith("grad_reduced c at step 3: rank 2 (")
    assert text.endswith("): other bits than the 3 ranks that agree")
    assert then.startswith("take ")
    assert then.endswith(
        " out of the job; the last step in which all compared copies agree is 2; no checkpoint is known to be good"
    )  # weights were not compared
    assert later == "2 later differences may follow from it"


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_everywhere_are_clean_and_nothing_is_said(tmp_path: Path, format: str) -> None:  # noqa: A002
    report = job(tmp_path, lambda *_: False, format=format)
    assert report.clean
    assert (bits(report)["first"], bits(report)["by_design"], said(report)) == ([], [], [])


def test_of_two_copies_nothing_says_which_is_wrong(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: rank == 1 and step >= 2 and name == "c", ranks=2)
    (first,) = bits(report)["first"]
    assert (first["step"], first["odd_ranks"], first["agreeing"]) == (2, [0, 1], 0)
    assert "differ from each other, and the copies do not say which is wrong" in said(report)[0]


def test_the_kind_that_is_measured_first_in_a_step_comes_first(tmp_path: Path) -> None:
    kinds = ("param_updated", "exp_avg", "grad_reduced", "param_origin")

    def fault(rank: int, step: int, kind: str, name: str) -> bool:
        return rank == 1 and step >= (4 if kind == "grad_reduced" else 5) - (kind == "param_origin") and name == "a"

    report = job(tmp_path, fault, kinds=kinds)
    (first,) = bits(report)["first"]
    assert (first["kind"], first["step"], bits(report)["agreed_until"]) == ("param_origin", 4, 3)
    assert bits(report)["checkpoint"] == 2  # memory may have been corrupted right after step 3, before it was saved


def test_copies_that_all_differ_from_the_first_step_on_are_so_by_design(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, _step, _, name: (rank + NAMES.index(name)) % 2 == 0)
    assert (bits(report)["by_design"], bits(report)["first"]) == (["grad_reduced"], [])
    assert report.clean
    assert len(said(report)) == 1
    assert "by design" in said(report)[0]


def test_weights_that_begin_equal_and_part_with_the_first_update_are_so_by_design(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: step >= 1 and (rank + NAMES.index(name)) % 2 == 0)
    assert bits(report)["by_design"] == ["grad_reduced"]


def test_one_rank_that_is_odd_in_everything_from_the_first_step_on_is_no_design(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, *_: rank == 3)
    assert bits(report)["by_design"] == []
    assert {tuple(one["odd_ranks"]) for one in bits(report)["first"]} == {(3,)}
    assert (len(bits(report)["first"]), bits(report)["agreed_until"]) == (len(NAMES), None)
    assert any(
        "no earlier step was compared; no checkpoint is known to be good; begin with the same weights" in text
        for text in said(report)
    )


def test_replicas_that_another_rank_writes_are_compared_by_their_checksums(tmp_path: Path) -> None:
    for rank in range(3):
        one = RecordedRank(tmp_path, rank, 3, format="csv", ops=CHECKED, replica_check=True)
        kind, name = ("grad_reduced", "w") if rank == 0 else ("replica", "grad_reduced/w")
        one.place(kind, name, Placement(replicas=(0, 1, 2)))
        for step in range(3):
            values = one_bit_else(VALUES) if (rank, step) == (2, 1) else VALUES
            one.write(step, {kind: [Measured(name, values, checked=True)]})
        one.close()
    (first,) = bits(merged(tmp_path))["first"]
    assert (first["name"], first["step"], first["odd_ranks"]) == ("w", 1, [2])


def test_copies_without_checksums_are_compared_by_value_alone(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, *_: rank == 1, ops=SIX_OPS, format="csv")
    assert (bits(report)["compared"], report.clean) == ({}, True)


@pytest.mark.parametrize("format", FORMATS)
def test_checksums_stand_in_the_merged_rows(tmp_path: Path, format: str) -> None:  # noqa: A002
    job(tmp_path, lambda rank, step, _, name: (rank, step, name) == (1, 2, "b"), format=format)
    for folder in ("per_rank", "global"):
        found = {
            (row.get("rank", 0), row["step"], row.get("name") or row["global_name"]): row["checksum"]
            for row in table(tmp_path, folder).to_pylist()
        }
        assert all(len(text) == 16 and int(text, 16) for text in found.values())
        assert len(set(found.values())) == (2 if folder == "per_rank" else 1)


def test_a_merge_while_the_job_runs_tells_the_same(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: rank == 2 and step >= 3 and name == "c")
    told = json.loads((tmp_path / "merged" / "report.json").read_text())
    assert told["bits"] == bits(report)
    small = merged(tmp_path, "small", rows=10)
    assert bits(small) == bits(report)


def test_a_checkpoint_is_good_if_the_next_step_has_begun_with_equal_weights(tmp_path: Path) -> None:
    def fault(rank: int, step: int, kind: str, name: str) -> bool:
        return rank == 1 and step >= 4 + (kind == "param_origin") and name == "a"

    report = job(tmp_path, fault, kinds=("param_origin", "grad_reduced"))
    assert [(one["kind"], one["step"]) for one in bits(report)["first"]] == [("grad_reduced", 4)]
    assert bits(report)["checkpoint"] == 3


@pytest.mark.parametrize("odd", [(1, 5), (5,)])
def test_a_rank_that_is_odd_among_those_that_hold_the_same_is_no_design(tmp_path: Path, odd: tuple[int, ...]) -> None:
    """Two stages of a pipeline, or two parts of tensors: other ranks hold other tensors."""
    for rank in range(8):
        stage, one = rank // 4, RecordedRank(tmp_path, rank, 8, ops=CHECKED, replica_check=True)
        names = [f"{stage}.{name}" for name in NAMES]
        for name in names:
            one.place("grad_reduced", name, Placement(unclaimed=tuple(range(4 * stage, 4 * stage + 4))))
        for step in range(6):
            values = one_bit_else(VALUES) if rank in odd else VALUES
            one.write(step, {"grad_reduced": [Measured(name, values, checked=True) for name in names]})
        one.close()
    report = merged(tmp_path)
    assert bits(report)["by_design"] == []
    assert {tuple(one["odd_ranks"]) for one in bits(report)["first"]} == {(rank,) for rank in odd}


def test_a_rank_that_is_odd_in_everything_does_not_become_design_because_another_is_odd_once(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: rank == 3 or (rank, step, name) == (1, 1, "a"))
    assert bits(report)["by_design"] == []
    assert {tuple(one["odd_ranks"]) for one in bits(report)["first"]} == {(3,)}


def apart(rank: int, name: str) -> bool:
    return (rank + NAMES.index(name)) % 2 == 0


def test_weights_that_part_after_a_first_step_with_a_learning_rate_of_0_are_so_by_design(tmp_path: Path) -> None:
    def fault(rank: int, step: int, kind: str, name: str) -> bool:
        return step >= 1 + (kind == "param_origin") and apart(rank, name)

    report = job(tmp_path, fault, kinds=("param_origin", "param_updated"))
    assert (bits(report)["by_design"], bits(report)["first"]) == (["param_origin", "param_updated"], [])


def test_weights_that_are_averaged_every_second_step_differ_by_design(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: step % 2 == 1 and apart(rank, name))
    assert (bits(report)["by_design"], report.clean) == (["grad_reduced"], True)


def test_most_weights_that_part_in_the_middle_of_a_run_are_no_design(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, step, _, name: step >= 3 and apart(rank, name))
    assert (bits(report)["by_design"], len(bits(report)["first"])) == ([], len(NAMES))


@pytest.mark.parametrize("format", FORMATS)
def test_more_differences_than_are_listed_are_counted_and_the_list_does_not_depend_on_the_format(
    tmp_path: Path,
    format: str,  # noqa: A002
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("monitor.merge.bits.MOST", 2)
    report = job(tmp_path, lambda rank, step, _, name: rank == 2 and step == 5 and name != "a", format=format)
    assert [one["name"] for one in bits(report)["first"]] == ["b", "c"]
    assert bits(report)["later"] == {"differences": 0, "tensors": 0}


def test_replicas_whose_owner_has_no_row_are_held_against_each_other(tmp_path: Path) -> None:
    for rank in range(4):
        one = RecordedRank(tmp_path, rank, 4, ops=CHECKED, replica_check=True)
        kind, name = ("grad_reduced", "w") if rank == 0 else ("replica", "grad_reduced/w")
        one.place(kind, name, Placement(replicas=(0, 1, 2, 3)))
        for step in range(2 if rank == 0 else 4):
            values = one_bit_else(VALUES) if (rank, step) == (2, 3) else VALUES
            one.write(step, {kind: [Measured(name, values, checked=True)]})
        one.close()
    (first,) = bits(merged(tmp_path))["first"]
    assert (first["step"], first["odd_ranks"], first["agreeing"]) == (3, [2], 2)


def test_what_every_rank_has_of_its_own_is_not_compared(tmp_path: Path) -> None:
    report = job(tmp_path, lambda rank, *_: rank == 1, kinds=("actv", "grad_unreduced"))
    assert (bits(report)["compared"], bits(report)["first"]) == ({}, [])


def test_after_a_restart_on_other_hosts_the_host_of_that_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, steps in enumerate((range(4), range(4, 6))):
        for rank in range(3):
            monkeypatch.setattr("socket.gethostname", lambda run=run, rank=rank: f"node-{10 * run + rank}")
            one = RecordedRank(tmp_path, rank, 3, ops=CHECKED, replica_check=True, suffix=f"{run:04x}{rank:04x}")
            one.place("grad_reduced", "w", Placement(unclaimed=(0, 1, 2)))
            for step in steps:
                values = one_bit_else(VALUES) if (rank, step) == (2, 3) else VALUES
                one.write(step, {"grad_reduced": [Measured("w", values, checked=True)]})
            one.close()
    (first,) = bits(merged(tmp_path))["first"]
    assert (first["step"], first["odd_ranks"], first["hosts"]) == (3, [2], ["node-2"])


WHOLE = (0.5, -1.25, 3.0, 0.0, 7.5, -0.0, 1e-9)


def merged_checksums(base: Path, *cuts: int, flat: bool = True, columns: int = 1) -> list[object]:
    """The checksums of a whole tensor in two steps, of which the ranks hold what lies between the cuts."""
    ends = [*cuts, len(WHOLE)]
    for rank, (begin, end) in enumerate(pairwise([0, *ends])):
        one = RecordedRank(base, rank, len(ends), ops=CHECKED, replica_check=True)
        offset = (begin,) if flat else (0, begin)
        shard = Shard(
            tuple(range(len(ends))), (len(WHOLE) // columns, columns) if not flat else (len(WHOLE),), offset, flat=flat
        )
        one.place("param_origin", "w", Placement(shard=shard))
        for step in range(2):
            one.write(step, {"param_origin": [Measured("w", [x + step for x in WHOLE[begin:end]], checked=True)]})
        one.close()
    merged(base)
    return [row["checksum"] for row in tensors(base, "param_origin")]


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 5), (0, 4), (4, 4, 4), (0, 0, 7)])
def test_a_whole_tensor_has_the_same_checksum_however_it_is_cut_also_with_empty_parts(
    tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    whole = merged_checksums(tmp_path / "whole")
    assert merged_checksums(tmp_path / "cut", *cuts) == whole
    assert len(set(whole)) == 2


def test_a_tensor_in_parts_that_are_no_ranges_of_it_has_no_checksum(tmp_path: Path) -> None:
    assert merged_checksums(tmp_path, 3, flat=False, columns=7) == [None, None]


def test_what_an_earlier_run_found_in_steps_that_were_done_again_is_forgotten_and_the_rest_keeps_its_host(
    tmp_path: Path,
) -> None:
    found = [
        WrongBits(
            check="between steps",
            step=step,
            kind="param_origin",
            names=("w",),
            ranks=(0,),
            said=f"wrong in {step}",
            host="node-1",
        )
        for step in (3, 9)
    ]
    one = RecordedRank(tmp_path, earlier=Earlier(wrong_bits=tuple(found)))
    for step in range(5, 12):
        one.write(step, {"param_origin": [Measured("w", VALUES)]})
    one.close()
    told = bits(merged(tmp_path))["while_running"]
    assert [(entry["step"], entry["host"], entry["said"]) for entry in told] == [(3, "node-1", "wrong in 3")]
