"""What ``make versions`` runs: which combinations, what it says of each, and the contract itself in this environment."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import versions
from rows import OPS, Series, compare, same_bits, statistics
from versions import Combination, Outcome, selected, table, verdict

ROOT = Path(__file__).resolve().parents[2]
X = np.array([3.0, -4.0, np.float64(np.float32(0.1))])
SERIES = Series("actv", "0.output", 1)


def test_without_a_choice_every_framework_runs_under_every_python() -> None:
    found = selected("")
    assert len(found) == len(set(found)) == len(versions.PYTHONS) * len(versions.FRAMEWORKS)


def test_a_choice_may_name_pythons_and_requirements_that_are_not_in_the_list() -> None:
    assert selected("torch==2.7.1,python3.12,python3.14") == [
        Combination("3.12", "torch==2.7.1"),
        Combination("3.14", "torch==2.7.1"),
    ]
    assert [one.requirement for one in selected("python3.13")] == list(versions.FRAMEWORKS)


def test_an_unknown_word_is_refused_with_what_to_write() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'jax==1': write pythonX.Y, torch==VERSION or mindspore==VERSION"):
        selected("jax==1")


def test_a_contract_is_kept_only_if_its_process_says_so() -> None:
    kept = "ok rows\nnote in Python\nskipped compiled code: not with this Python\n"
    assert verdict(0, kept, "", "2.0") == Outcome("ok", ("in Python", "skipped compiled code: not with this Python"), "2.0")
    assert verdict(1, "ok bits\nFAILED rows: no rows\n", "", "2.0") == Outcome("FAILED", ("rows: no rows",), "2.0")
    assert verdict(1, "", "Traceback\n  File\nImportError: no torch\n", "2.0") == Outcome(
        "FAILED", ("ImportError: no torch",), "2.0"
    )
    assert verdict(-11, "ok bits\n", "", "2.0") == Outcome("FAILED", ("no output, exit status -11",), "2.0")
    assert verdict(0, "", "", "2.0").word == "FAILED"


def test_the_table_names_what_was_run_and_how_it_ended() -> None:
    outcome = Outcome("FAILED", ("rows: a | b",), "1.26.4")
    assert table([(Combination("3.11", "mindspore==2.7.0"), outcome, 61)]).splitlines()[2] == (
        "| 3.11 | mindspore==2.7.0 | 1.26.4 | FAILED; rows: a \\| b | 61 |"
    )


def test_a_row_that_differs_from_its_tensor_breaks_the_contract() -> None:
    right = statistics(X)
    compare({SERIES: right}, {SERIES: X}, "csv")
    for op in OPS:
        for wrong in (right[op] + 1e-4, None):
            with pytest.raises(AssertionError, match=f"csv: {op} of .* is {wrong}, and should be"):
                compare({SERIES: right | {op: wrong}}, {SERIES: X}, "csv")


def test_a_missing_row_and_one_too_many_break_the_contract() -> None:
    other = SERIES._replace(step=2)
    for rows, tensors in (({SERIES: statistics(X)}, {SERIES: X, other: X}), ({SERIES: {}, other: {}}, {SERIES: X}), ({}, {})):
        with pytest.raises(AssertionError, match="rows"):
            compare(rows, tensors, "csv")


def test_one_bit_breaks_the_contract() -> None:
    same_bits({"losses": X}, {"losses": X.copy()})
    with pytest.raises(AssertionError, match=r"the bits differ: \['losses'\]"):
        same_bits({"losses": np.array([0.0])}, {"losses": np.array([-0.0])})


def test_this_environment_keeps_the_contract(tmp_path: Path) -> None:
    """Without compilers and ranks, which other tests have."""
    contract = ROOT / "tools" / "contract" / "with_torch.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(contract), "bits", "references"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [line for line in done.stdout.splitlines() if not line.startswith("note ")]
    assert kept == ["ok training is the same bits", "ok rows equal float64 references"]
