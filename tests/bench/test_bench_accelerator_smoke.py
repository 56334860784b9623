"""The benchmarks of accelerators, run for real on the host: no figure means anything there, but all are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from evidence import PROVES
from test_bench_smoke import cells_of, run


def test_kernels_prints_a_row_for_each_size_and_writes_all_figures_to_a_file(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("accelerator/kernels.py", "--device", "cpu", "--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    rows, found = cells_of(done.stdout), json.loads(figures.read_text())
    assert [row[:2] for row in rows] == [[speed["what"], speed["dtype"]] for speed in found["speeds"]]
    assert {row[0] for row in rows} == {"one tensor", "a list"}
    assert not found["fused"]
    for speed in found["speeds"]:
        assert {"monitor", "_foreach_norm", "five operators"} <= speed["seconds"].keys()


def test_turns_of_one_process_are_compared_with_those_that_record_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("accelerator/turns.py", "--device", "cpu", "--quick", "--recorded", "gradients", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    rows, found = cells_of(done.stdout), json.loads(figures.read_text())["turns"]
    assert rows[0][2] == "1.00"
    assert [row[0] for row in rows] == [*found] == ["nothing", "gradients"]
    assert all(step > 0 and training > 0 for turns in found.values() for step, training, _ in turns)


@pytest.mark.skipif(not PROVES, reason="it takes 20 s: make prove runs it")
def test_training_prints_what_each_monitor_costs_and_which_were_left_out(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    few = ["--models", "gpt2", "--modes", "eager", "--recorded", "training state"]
    done = run("accelerator/training.py", "--device", "cpu", "--quick", *few, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert [row[:4] for row in cells_of(done.stdout)][:2] == [
        ["gpt2", "eager", "unmonitored", ""],
        ["gpt2", "eager", "monitor", "training state"],
    ]
    assert [len(cost["steps"]) for cost in json.loads(figures.read_text())["costs"]][:2] == [1, 1]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("script", ["kernels.py", "training.py", "turns.py"])
def test_without_an_accelerator_one_sentence_says_so(script: str) -> None:
    done = run(f"accelerator/{script}", "--quick")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("There is no accelerator that torch can use here.")
    assert done.stderr.count("\n") == 1
