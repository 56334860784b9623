"""Runs a program of Megatron where there is no CUDA device; ``without_cuda.py PROGRAM``."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "pytorch" / "frameworks" / "scripts"))
from megatron_on_cpu import on_cpu

with on_cpu():
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
