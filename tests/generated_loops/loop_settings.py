"""How many training loops are drawn, and how much of a failing one is shown, for the tests of both frameworks."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

MOST_SHOWN = 12
"""Faults of a failing loop that the test prints."""

_ASKED = os.environ.get("GENERATED_LOOPS")


def drawn(few: int) -> settings:
    """Draw the same ``few`` loops each time, or as many others as ``GENERATED_LOOPS`` says (``make prove``)."""
    return settings(
        max_examples=int(_ASKED or few),
        derandomize=_ASKED is None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
