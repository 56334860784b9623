"""Monitors that come and go while a program communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from jobs import Job


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("several_monitors.py", 2, brief=False, cc_pre_hook=True)


def told(job: Job, part: str) -> list[Any]:
    return [one[part] for one in job.monitored]


def rows_of(job: Job, name: str, rank: int) -> list[tuple[int, str, float, int]]:
    own = replace(job, base=job.base / name)
    return [(row.step, row.name, row.values["max"], row.values["calls"]) for row in own.rows("other", rank)]


def test_two_at_once_each_record_what_they_see_until_they_are_closed(job: Job) -> None:
    pre, post = "all_reduce.pre_0", "all_reduce.post_0"
    for rank in range(2):
        assert rows_of(job, "second", rank) == [(0, pre, 1.0, 1), (0, post, 2.0, 1)]
        assert rows_of(job, "first", rank) == [(0, pre, 1.0, 1), (0, post, 2.0, 1), (1, pre, 2.0, 1), (1, post, 4.0, 1)]


def test_after_the_last_one_of_several_everything_is_as_it_was(job: Job) -> None:
    assert told(job, "two_at_once") == [[], []]


def test_calls_that_are_under_way_at_the_end_complete_and_are_released(job: Job) -> None:
    assert told(job, "closed_under_way") == [{"right": True, "held": False}] * 2


def test_an_exception_of_the_users_ends_the_monitor_and_leaves_nothing(job: Job) -> None:
    assert told(job, "raised_in_the_middle") == [['"of the user\'s"', []]] * 2


def test_what_somebody_else_has_patched_stays_patched_and_is_called(job: Job) -> None:
    assert told(job, "patched_by_the_user") == [[True, ["all_reduce", "wait"] * 2]] * 2


def test_who_patches_above_and_takes_that_away_later_continues_undisturbed(job: Job) -> None:
    assert told(job, "patched_meanwhile") == [[["wait", "wait"], [2.0, 2.0]]] * 2


def test_monitors_are_opened_and_closed_while_another_thread_communicates(job: Job) -> None:
    assert told(job, "opened_and_closed_while_others_communicate") == [[150, True, True]] * 2


def test_nothing_is_warned_of(job: Job) -> None:
    assert job.warnings == []


def test_one_that_is_made_before_the_process_group_and_never_closed_is_quiet(run_ranks: Callable[..., Job]) -> None:
    job = run_ranks("left_open.py", 2, brief=False)
    assert job.monitored == [[2.0, 3.0]] * 2
    for rank in range(2):
        rows = [row for row in job.rows("other", rank) if row.name == "all_to_all_single.post_0"]
        assert [(row.step, row.values["min"], row.values["max"]) for row in rows] == [(0, 1.0, 2.0), (1, 2.0, 3.0)]
    assert not any("Traceback" in said or "WARNING" in said for said in job.said)
