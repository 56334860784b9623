"""How what people read is spelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SHOWN: Final = 10
"""Of one cause; more are counted."""


def listed(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4 and 10 more``."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def capitalized(said: str) -> str:
    """With a capital first letter, the others as they are."""
    return said[:1].upper() + said[1:]
