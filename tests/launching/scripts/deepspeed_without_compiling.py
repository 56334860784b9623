"""Runs a program of DeepSpeed that compiles nothing; ``deepspeed_without_compiling.py PROGRAM``."""

import sys
from pathlib import Path

import program

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "processes" / "scripts"))
import deepspeed_uncompiled  # noqa: F401

program.run()
