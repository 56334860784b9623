"""The health of an optimizer in jobs of several ranks, merged to whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job

from monitor.merge.merge import Wanted, merge
from monitor.query.opened import open_run

HEALTH = {"optimizer_health": True, "wg_distribution": True, "format": ["csv", "hdf5"]}


@pytest.mark.parametrize("how", ["fsdp2", "ddp", "fsdp2-bf16", "ddp-bf16"])
def test_merged_numbers_are_those_of_whole_tensors(run_job: Callable[..., Job], tmp_path: Path, how: str) -> None:
    job = run_job("optimizer_health.py", 2, how, **HEALTH)
    assert job.plain == job.monitored
    assert job.plain[0] == job.plain[1]
    merge(Wanted(job.base, tmp_path / "merged", format="hdf5"))
    rows = open_run(tmp_path / "merged").rows("optimizer_health", per_rank=False).to_pylist()
    columns = "swallowed", "staleness", "below_eps"
    found = {f"{row['name'].removeprefix('module.')} {row['step']}": [row[one] for one in columns] for row in rows}
    assert sorted(found) == sorted(job.plain[0])
    assert len(found) == 12
    for place, values in job.plain[0].items():
        assert found[place] == pytest.approx(values, rel=1e-5), place
    if "bf16" in how:
        assert any(swallowed > 0.5 for swallowed, _, _ in found.values())
    assert any(0 < below < 1 for _, _, below in found.values())
