"""One rank's recording without a framework: where it goes, and how it ends."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from monitor.config import MonitorConfig
from monitor.coordinator.manifest_format import RecordedModel
from monitor.coordinator.output import OutputError
from monitor.failures import Failures
from monitor.recording.run import ProcessTopology, RecordingSpec, Run
from monitor.series import SeriesTable

_ORDINALS = itertools.count()


def begun(base: Path, rank: int = 0, beside: Run | None = None, **config: Any) -> Run:
    """A run of a job of its own."""
    settings = MonitorConfig(**config)
    place = ProcessTopology(rank, 8, {"dp": (0, rank)})
    recorded = RecordedModel("Network", "", ordinal=next(_ORDINALS))
    spec = RecordingSpec(settings, "config.json", base, recorded, Failures())
    return Run(spec, place, beside, SeriesTable(), {"torch": "2.0"})


def manifest(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.directory / "manifest.json").read_text())
    return found


def test_each_has_a_directory_of_its_own_that_is_named_by_its_rank(tmp_path: Path) -> None:
    runs = [begun(tmp_path, rank) for rank in (0, 7, 7)]
    assert [run.directory.name.split("-rank")[1].split("-")[0] for run in runs] == ["0", "7", "7"]
    assert len({run.directory for run in runs}) == 3
    assert all(run.close() for run in runs)


def test_its_manifest_says_where_it_stood_and_how_it_was_configured(tmp_path: Path) -> None:
    run = begun(tmp_path, rank=3, format="api", eps=0.5)
    assert run.close()
    found = manifest(run)
    assert (found["rank"], found["world_size"], found["groups"]) == (3, 8, {"dp": [0, 3]})
    assert (found["formats"], found["config"]["eps"], found["config_path"]) == (["api"], 0.5, "config.json")
    assert (found["versions"], found["closed"]) == ({"torch": "2.0"}, True)


def test_it_closes_any_number_of_times(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert [run.close() for _ in range(3)] == [True] * 3


def test_a_manifest_that_cannot_be_written_at_the_end_is_reported_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begun(tmp_path)
    shutil.rmtree(run.directory)
    run.directory.write_text("in the way")
    assert not run.close()
    assert any(str(run.directory) in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["module_struct", "anomaly_detected"])
def test_what_an_earlier_run_left_is_set_aside_unless_it_is_a_run_beside_this_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "left.json").write_text("{}")
    first = begun(tmp_path)
    assert not (tmp_path / name).exists()
    assert len(list(tmp_path.glob(f"{name}-before-*/left.json"))) == 1
    (tmp_path / name).mkdir()
    second = begun(tmp_path, beside=first)
    assert (tmp_path / name).exists()
    assert first.close()
    assert second.close()


def test_a_base_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        begun(tmp_path / "file")
