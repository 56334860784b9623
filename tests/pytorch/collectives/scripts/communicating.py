"""What the scripts of this directory share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "frameworks" / "scripts"))

from framework_run import Attach, run

__all__ = ["Attach", "run"]
