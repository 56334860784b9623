"""What listening to communication leaves behind, holds and sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import Job


@pytest.fixture(scope="module")
def told(run_ranks: Callable[..., Job]) -> list[dict[str, Any]]:
    """What ``lifecycle.py`` told on each rank."""
    return run_ranks("lifecycle.py", 2, brief=False).plain


def test_after_a_hundred_times_torch_distributed_and_the_dispatcher_are_as_they_were(told: list[dict[str, Any]]) -> None:
    clean = {"changed": [], "kernels": [], "living": 0, "installed": False}
    assert [one["left_behind"] for one in told] == [clean, clean]


def test_work_that_is_never_waited_for_is_released_and_counted(told: list[dict[str, Any]]) -> None:
    expected = {"held": False, "unread": 1, "rows": 16}
    assert [one["never_waited"] for one in told] == [expected, expected]


def test_a_work_object_keeps_its_type_and_methods(told: list[dict[str, Any]]) -> None:
    assert all(one["same_work"] for one in told)


def test_a_compiled_model_with_collectives_stays_one_graph_and_every_call_is_recorded(told: list[dict[str, Any]]) -> None:
    results = [[4.0 * (number + call) + 1 for number in range(4)] for call in range(3)]
    expected = {"results": results, "rows": 6, "unread": 0}
    assert [one["compiled"] for one in told] == [expected, expected]


def test_with_one_code_line_configured_only_its_calls_are_recorded(told: list[dict[str, Any]]) -> None:
    assert [one["one_line"] for one in told] == [[2.0, 2.0], [2.0, 2.0]]


def test_code_lines_that_find_no_call_of_the_first_step_are_said(told: list[dict[str, Any]]) -> None:
    said = r"cc_codeline ['elsewhere\\.py\\[1\\]'] finds none of the call sites of the first step: none is recorded"
    assert [one["lines_without_calls"] for one in told] == [[[], [f"[rank 0] {said}"]]] * 2
