"""Runs the program that the command line names as its own main program, for scripts that change a framework first."""

import runpy
import sys
from pathlib import Path


def run() -> None:
    """Take the script itself off the command line, and run the next word of it with the rest."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
