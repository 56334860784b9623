"""Runs a script as a rank of ``msrun`` would, and writes down how it ended; ``with_status.py DIRECTORY SCRIPT ARGUMENTS``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

name = "scheduler" if os.environ["MS_ROLE"] == "MS_SCHED" else os.environ["RANK_ID"]
status = subprocess.call([sys.executable, *sys.argv[2:]])
Path(sys.argv[1], f"status-{name}").write_text(str(status))
sys.exit(status)
