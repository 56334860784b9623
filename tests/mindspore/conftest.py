"""MindSpore as its tests use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # before it is imported: it says much on standard error
sys.path.insert(0, str(Path(__file__).parent))
