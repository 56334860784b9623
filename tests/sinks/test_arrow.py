"""Histograms as columns of Arrow tables."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from monitor.sinks.arrow import counts_of, parsed, texts_of
from monitor.stats.histograms import BINS, histogram_text


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
