"""How demos are run: in a process of their own, as ranks of a job or without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tools" / "demo"


def run_python(base: Path, *arguments: str, together: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python in ``base``, which is also where recordings go.

    Args:
        together: What goes to standard error stands in ``stdout``, in its place.
    """
    environment = os.environ | {
        "COLUMNS": "240",
        "MONITOR_OUTPUT_DIR": str(base),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, *arguments]
    errors = subprocess.STDOUT if together else subprocess.PIPE
    return subprocess.run(
        command, cwd=base, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=600, check=False
    )
