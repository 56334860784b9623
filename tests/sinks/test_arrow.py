"""Histograms as columns of Arrow tables, and Arrow without pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from monitor.sinks.arrow import counts_of, parsed, texts_of
from monitor.stats.histograms import BINS, histogram_text

ROOT = Path(__file__).resolve().parents[2]


def drawn(rows: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return np.where(draw.random((rows, BINS)) < 0.1, draw.integers(0, 10**12, (rows, BINS)), 0)


def test_texts_of_many_histograms_are_those_of_each_of_them() -> None:
    counts = drawn(50)
    counts[7] = 0
    assert texts_of(counts).to_pylist() == [histogram_text(one) for one in counts]
    assert texts_of(counts[:0]).to_pylist() == []


def test_texts_parse_back_to_the_histograms() -> None:
    counts = drawn(50)
    assert (counts_of(parsed(pa.chunked_array([texts_of(counts)]))) == counts).all()


WITHOUT_PANDAS = """
import sys, pyarrow
from monitor.sinks.arrow import do_without_pandas
do_without_pandas()
print(pyarrow.array([1, None]).null_count, "pandas" in sys.modules)
import pandas
"""


def test_a_process_may_have_arrow_do_without_pandas_and_import_it_later() -> None:
    pytest.importorskip("pandas")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # without what hides pandas from tests' processes
    command = [sys.executable, "-c", WITHOUT_PANDAS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1", "False"]
