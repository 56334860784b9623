"""Runs a program of Megatron where there is no CUDA device; ``without_cuda.py PROGRAM``."""

import sys
from pathlib import Path

import program

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "pytorch" / "frameworks" / "scripts"))
from megatron_on_cpu import on_cpu

with on_cpu():
    program.run()
