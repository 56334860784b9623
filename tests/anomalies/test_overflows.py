"""Which skipped steps show a loss scale that was too high for once, and which show one that never fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from monitor.anomalies.overflows import AMONG, AT_START, FEW, overflows_among
from monitor.merge.report import steps_in


@pytest.mark.parametrize(
    ("skipped", "excused"),
    [
        ([], []),
        ([7], [7]),
        ([*range(AT_START), 300], [*range(AT_START), 300]),
        (range(AT_START + 1), []),
        (range(100, 100 + FEW), range(100, 100 + FEW)),
        (range(100, 101 + FEW), []),
        (range(0, 1000, AMONG // FEW), range(0, 1000, AMONG // FEW)),
        ([0, 1, *range(3, 1000, 3)], [0, 1]),
        ([0, 1, 2, *range(900, 1000)], [0, 1, 2]),
    ],
)
def test_few_skipped_steps_and_the_first_ones_are_no_fault(skipped: Sequence[int], excused: Sequence[int]) -> None:
    found = overflows_among(np.array(skipped, np.int64), np.arange(1000))
    assert found.tolist() == [*excused]


def test_a_run_that_skips_all_its_steps_has_a_fault() -> None:
    every = np.arange(12)
    assert overflows_among(every, every).tolist() == []


def test_steps_count_as_they_were_recorded() -> None:
    recorded = steps_in([range(0, 100_000, 100)])
    skipped = np.array([500, 600, 700])
    assert overflows_among(skipped, recorded).tolist() == [500, 600, 700]
    assert overflows_among(steps_in([range(5_000, 9_000, 100)]), recorded).tolist() == []
