"""Children of a monitored process write nothing into its recording, whatever they do, and it does not notice them."""

from __future__ import annotations

import pytest
from evidence import sampled
from launching import EVERY_STEP, Launcher
from recorded import listed, only_recording

STATUS = {"exits": 5, "exits-at-once": 5, "raises": 1, "closes": 5, "trains": 5}


@pytest.mark.parametrize(
    ("way", "child"),
    sampled([(way, child) for way in ("os", "multiprocessing") for child in STATUS], 0, 2, 4, 6, 8),
)
def test_a_child_that_ends_leaves_its_parents_recording_as_it_is(
    launcher: Launcher, plain_losses: list[str], way: str, child: str
) -> None:
    """The record is open while the children end; one of them closing it would show."""
    ended = launcher.run("forking.py", way, child, config=EVERY_STEP | {"step_count_per_record": 5})
    assert (ended.status, ended.losses) == (0, plain_losses[:12]), ended.err
    assert [line for line in ended.out.splitlines() if line.startswith("child")] == [f"child {STATUS[child]}"] * 3
    assert ended.warnings == []
    only_recording(launcher.base).assert_complete(range(12))


def test_workers_of_a_data_loader_use_polars_and_pyarrow_while_their_parent_is_monitored(launcher: Launcher) -> None:
    plain = launcher.start("data_loader.py")
    monitored = launcher.start("data_loader.py", config=EVERY_STEP | {"step_count_per_record": 3})
    assert plain.end().losses == (ended := monitored.end()).losses
    assert (ended.status, len(ended.losses), ended.warnings) == (0, 16, [])
    only_recording(launcher.base).assert_complete(range(16))


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_a_child_with_a_monitor_of_its_own_that_multiprocessing_ends_has_written_everything(
    launcher: Launcher, plain_losses: list[str], how: str, status: int
) -> None:
    """Such a child ends without the usual end of an interpreter."""
    ended = launcher.run("own_child.py", how, config=EVERY_STEP | {"step_count_per_record": 4})
    assert (ended.status, ended.losses) == (status, plain_losses[:10]), ended.err
    manifest = only_recording(launcher.base).manifest()
    assert manifest.closed
    assert listed(manifest.steps.written) == list(range(11))
    assert listed(manifest.steps.incomplete) == [10]
