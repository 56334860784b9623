"""Where MindSpore's ranks stand, and that they agree: on two that ``msrun`` has started."""

from __future__ import annotations

import pytest
from ranks import Ranks, run_ranks, running


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    directory = tmp_path_factory.mktemp("job")
    job = run_ranks(2, "standing.py", directory)
    assert running(directory) == []
    return job


def test_ranks_that_serve_and_ask_a_store_end_without_a_word_of_it(job: Ranks) -> None:
    assert job.status == 0, job.ranks
    assert [rank.status for rank in job.ranks] == [0, 0]
    assert [rank.warnings for rank in job.ranks] == [[], []]


def test_before_communication_is_initialised_the_launchers_word_holds(job: Ranks) -> None:
    announced = {"world": 2, "groups": {}, "store": False, "settled": False, "initialized": False, "others": False}
    assert [rank.told[0] for rank in job.ranks] == [{"rank": 0, **announced}, {"rank": 1, **announced}]


def test_the_scheduler_which_runs_the_script_too_is_never_settled(job: Ranks) -> None:
    (before,) = job.scheduler.told
    assert not before["settled"]
    assert not before["initialized"]


def test_a_rank_knows_its_number_and_those_of_its_groups(job: Ranks) -> None:
    for number, rank in enumerate(job.ranks):
        here = {"rank": number, "world": 2, "groups": {"dp": [0, 1], "tp": [number]}, "store": True}
        assert rank.told[1] == {**here, "settled": True, "initialized": True, "others": True}


def test_the_ranks_of_a_group_are_those_of_the_job_and_the_world_goes_by_each_of_its_names(job: Ranks) -> None:
    assert [rank.told[2] for rank in job.ranks] == [[[0, 1], [0, 1], [0, 1], [number], None] for number in range(2)]


def test_what_names_no_group_is_named(job: Ranks) -> None:
    expected = "expected the name of a communication group, as create_group takes it or new_group returns it"
    missing = (
        "ValueError: dp_group is '{}', but this rank belongs to no group of that name: {}, of a group that was not destroyed."
    )
    for rank in job.ranks:
        assert rank.told[3] == [missing.format("elsewhere", expected), f"TypeError: dp_group is a int: {expected}."]
        assert rank.told[6] == missing.format("both", expected)


def test_ranks_agree_on_one_name_for_each_monitor(job: Ranks) -> None:
    one, other = (rank.told[4] for rank in job.ranks)
    assert one == other
    assert [agreed for agreed, _ in one] == [True, True]
    assert one[0] != one[1]
    assert [rank.told[5] for rank in job.ranks] == [{}, {}]
