from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("sinks", "merge", "precision")] + [str(TESTS.parent / "tools" / "demo")]

from trained_gpt import Trained  # noqa: E402


@pytest.fixture(scope="session")
def trained() -> Trained:
    return Trained.on_text(steps=150)
