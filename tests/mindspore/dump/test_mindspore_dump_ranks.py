"""Two ranks of MindSpore write beside each other."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_ranks


def test_two_ranks_have_a_directory_each_and_what_they_have_sent_and_received(tmp_path: Path) -> None:
    job = run_ranks(2, "dumping_ranks.py", tmp_path / "job", tmp_path / "out")
    assert [rank.status for rank in job.ranks] == [0, 0], job.ranks[0].said
    for rank in range(2):
        data = json.loads((tmp_path / "out" / "step0" / f"rank{rank}" / "dump.json").read_text())["data"]
        reduced = data["MintDistributed.all_reduce.0.forward"]
        assert (reduced["input_args"][0]["Max"], reduced["output"][0]["Max"]) == (rank + 1, 3.0)
