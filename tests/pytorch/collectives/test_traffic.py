"""The traffic of frameworks is recorded, each call once: as often as torch's profiler counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from evidence import sampled
from jobs import Job

HOWS = ("ddp", "ddp-views", "fsdp1", "fsdp2", "tp", "pp", "zero-1", "zero-2", "zero-3")
NO_TRAFFIC = ("c10d::barrier",)


@pytest.mark.parametrize("how", sampled(HOWS, *range(6), 8))
def test_as_many_calls_are_recorded_as_the_profiler_counts(how: str, run_ranks: Callable[..., Job]) -> None:
    job = run_ranks("traffic.py", 2, how, preload="deepspeed" if "zero" in how else "", cc_pre_hook=True)
    assert job.warnings == []
    assert job.plain == job.monitored
    for rank in range(2):
        counts: list[dict[str, Any]] = job.monitored[rank]["counts"]
        for step, counted in enumerate(counts):
            calls: dict[str, int] = {}
            rows = [row for row in job.rows("other", rank) if row.step == step]
            for row in rows:
                op = row.name.rpartition(".")[0]
                calls[op] = max(calls.get(op, 0), row.values["calls"])
            expected = sum(count for op, count in counted.items() if op not in NO_TRAFFIC)
            assert expected > 0
            assert sum(calls.values()) == expected, (calls, counted)
            outputs = {row.name.removesuffix(".post_0") for row in rows if row.name.endswith(".post_0")}
            assert outputs == {op for op in calls if op != "send"}
        assert "communication" not in job.manifest(rank).notes  # where calls are counted that were not read
