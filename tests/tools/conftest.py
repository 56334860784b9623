from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("sinks", "merge")]
sys.path += [str(TESTS.parent / "tools" / folder) for folder in (".", "pictures", "contract", "drills")]
