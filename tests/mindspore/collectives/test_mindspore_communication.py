"""What two ranks of MindSpore communicate on CPUs is recorded, and nothing about it is changed."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, running

RANKS = (0, 1)
SCRIPT = Path(__file__).resolve().parent / "scripts" / "communicating.py"
Numbers = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ``communicating.py`` told on each rank."""
    directory, logs = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("logs")
    job = run_ranks(2, SCRIPT, directory, logs)
    assert running(directory) == []
    assert [(rank.status, len(rank.told)) for rank in job.ranks] == [(0, 1), (0, 1)], job.ranks
    return [rank.told[0] for rank in job.ranks]


def sent(rank: int, count: int) -> Numbers:
    """What a rank gives to an operator."""
    return np.arange(1, 1 + count, dtype=np.float64) + 100 * rank


def reduced(count: int) -> Numbers:
    return sent(0, count) + sent(1, count)


def gathered(count: int) -> Numbers:
    return np.concatenate([sent(0, count), sent(1, count)])


def row(*tensors: Numbers, calls: int = 1) -> dict[str, Any]:
    """The statistics of tensors together; the shape is that of the first."""
    together = np.concatenate(tensors)
    numbers = {"min": together.min(), "max": together.max(), "norm": pytest.approx(np.linalg.norm(together), rel=1e-12)}
    return {"shape": [len(tensors[0])], **numbers, "nans": 0, "calls": calls}


def both(op: str, given: Numbers, result: Numbers) -> dict[str, Any]:
    return {f"{op}.pre_0": row(given), f"{op}.post_0": row(result)}


def rows_of(told: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [one["cases"][case]["rows"] for one in told]


@pytest.mark.parametrize("case", ["all_reduce", "all_reduce_imported_before", "all_reduce_of_ops", "all_reduce_async"])
def test_an_all_reduce_is_recorded_once_whichever_way_it_is_called(told: list[dict[str, Any]], case: str) -> None:
    assert rows_of(told, case) == [both("all_reduce", sent(rank, 4), reduced(4)) for rank in RANKS]


def test_the_calls_of_a_step_are_combined(told: list[dict[str, Any]]) -> None:
    expected = [
        {
            "all_reduce.pre_0": row(*(sent(rank, count) for count in (2, 3, 5)), calls=3),
            "all_reduce.post_0": row(*(reduced(count) for count in (2, 3, 5)), calls=3),
        }
        for rank in RANKS
    ]
    assert rows_of(told, "all_reduce_three_times") == expected


def test_a_group_that_is_not_all_of_the_job_is_part_of_the_name(told: list[dict[str, Any]]) -> None:
    expected = [both("all_reduce@tp", sent(rank, 4), sent(rank, 4)) for rank in RANKS]
    assert rows_of(told, "all_reduce_of_a_group") == expected


def test_what_is_broadcast_goes_in_at_the_root_alone(told: list[dict[str, Any]]) -> None:
    out = {"broadcast.post_0": row(sent(1, 4))}
    assert rows_of(told, "broadcast") == [out, {"broadcast.pre_0": row(sent(1, 4))} | out]


def test_the_tensors_of_a_list_are_one_output(told: list[dict[str, Any]]) -> None:
    expected = [{"all_gather.pre_0": row(sent(rank, 3)), "all_gather.post_0": row(sent(0, 3), sent(1, 3))} for rank in RANKS]
    assert rows_of(told, "all_gather") == expected


def test_what_is_gathered_comes_out_at_the_root_alone(told: list[dict[str, Any]]) -> None:
    expected = [{"gather.pre_0": row(sent(rank, 3))} for rank in RANKS]
    expected[1]["gather.post_0"] = row(sent(0, 3), sent(1, 3))
    assert rows_of(told, "gather") == expected


def test_what_is_scattered_goes_in_at_the_root_alone(told: list[dict[str, Any]]) -> None:
    out = {"scatter.post_0": row(sent(0, 2))}
    assert rows_of(told, "scatter") == [{"scatter.pre_0": row(sent(0, 2), sent(0, 2))} | out, out]


def test_the_root_of_a_reduction_is_known_by_its_rank_in_the_group(told: list[dict[str, Any]]) -> None:
    assert [one["root"] for one in told] == [0, 0]


def test_a_barrier_moves_nothing(told: list[dict[str, Any]]) -> None:
    assert rows_of(told, "barrier") == [{}, {}]


def test_primitives_are_recorded_under_the_names_of_functions(told: list[dict[str, Any]]) -> None:
    expected = [
        both("all_reduce", sent(rank, 4), reduced(4))
        | both("all_gather", sent(rank, 2), gathered(2))
        | {"broadcast.post_0": row(sent(0, 3))}
        for rank in RANKS
    ]
    expected[0]["broadcast.pre_0"] = row(sent(0, 3))
    assert rows_of(told, "primitives") == expected


def test_a_function_made_of_a_primitive_counts_once(told: list[dict[str, Any]]) -> None:
    assert [rows["broadcast.post_0"] for rows in rows_of(told, "function_over_primitive")] == [row(sent(1, 3))] * 2


def test_of_a_derivative_the_forward_is_recorded_which_python_issues(told: list[dict[str, Any]]) -> None:
    expected = [both("all_reduce", sent(rank, 4), reduced(4)) for rank in RANKS]
    assert rows_of(told, "derivative_of_a_primitive") == expected


@pytest.mark.parametrize(
    "case", ["compiled_with_a_primitive", "compiled_with_a_function", "reducer_of_gradients", "one_step_cell"]
)
def test_what_a_compiled_graph_communicates_has_no_rows(told: list[dict[str, Any]], case: str) -> None:
    assert rows_of(told, case) == [{}, {}]


def test_no_case_comes_to_anything_else_than_unmonitored_in_any_bit(told: list[dict[str, Any]]) -> None:
    assert {
        name: case["monitored"] for one in told for name, case in one["cases"].items() if case["monitored"] != case["plain"]
    } == {}


def test_only_what_has_no_kernel_on_cpus_fails_in_these_cases(told: list[dict[str, Any]]) -> None:
    failed = {name for one in told for name, case in one["cases"].items() if "error" in case["plain"]}
    assert failed == {"compiled_with_a_function"}


def test_every_output_that_was_waited_for_was_read(told: list[dict[str, Any]]) -> None:
    assert {case["unread"] for one in told for case in one["cases"].values()} == {0}


def test_a_handle_that_is_waited_for_in_a_later_step_counts_in_that_step(told: list[dict[str, Any]]) -> None:
    assert [(one["handles"]["early"], one["handles"]["late"]) for one in told] == [([], {"all_reduce.post_0": 1})] * 2


def test_the_handle_that_users_get_is_of_mindspore(told: list[dict[str, Any]]) -> None:
    assert all(one["handles"]["same_type"] and one["handles"]["spelled_alike"] for one in told)


def test_a_call_that_no_one_waits_for_is_counted_as_unread(told: list[dict[str, Any]]) -> None:
    assert {one["handles"]["note"] for one in told} == {"the outputs of 1 calls have no rows: the"}


def test_with_one_code_line_configured_only_its_calls_are_recorded(told: list[dict[str, Any]]) -> None:
    assert [one["one_line"] for one in told] == [{"all_reduce.post_0": 1}] * 2


def test_the_log_has_each_call_site_once_and_with_it_alone_nothing_is_measured(told: list[dict[str, Any]]) -> None:
    expected = [
        {"op": "all_reduce", "group": "world", "dtype": "mindspore.float32", "shape": "[2]", "calls": "2"},
        {"op": "all_gather", "group": "tp", "dtype": "mindspore.float32", "shape": "[3]", "calls": "1"},
    ]
    for one in told:
        entries = list(csv.DictReader(io.StringIO(one["log"]["log"])))
        stacks = [entry.pop("stack") for entry in entries]
        assert entries == expected
        assert all(Path(stack.partition("[")[0]).name == "communicating.py" for stack in stacks)
        assert (one["log"]["rows"], one["log"]["again"], one["log"]["log_only"]) == ([], None, True)


def test_each_listener_is_called_until_it_is_gone(told: list[dict[str, Any]]) -> None:
    expected = {"calls": [{"all_reduce.post_0": 2}, {"all_reduce.post_0": 1}], "unchanged": True}
    assert [one["several"] for one in told] == [expected, expected]


def test_after_all_is_closed_the_modules_of_mindspore_are_as_they_were(told: list[dict[str, Any]]) -> None:
    assert [one["changed"] for one in told] == [[], []]


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_of_training_that_a_read_meets_reaches_training(told: list[dict[str, Any]], place: str) -> None:
    assert [one["errors"][place] for one in told] == ["ZerosLikeExt"] * 2


def test_a_fault_of_the_monitor_is_counted_and_leaves_no_row_and_training_continues(told: list[dict[str, Any]]) -> None:
    expected = {"result": reduced(4).tolist(), "counts": [1], "rows": []}
    assert [one["errors"]["own"] for one in told] == [expected, expected]
