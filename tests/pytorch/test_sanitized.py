"""The sanitizers of the compiler find nothing in the code in C while its tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evidence import PROVES

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTED = (
    "pytorch/test_fast_path.py",
    "pytorch/test_gradients_in_c.py",
    "pytorch/test_tensor_reader_freed.py",
    "pytorch/test_calls_on_threads.py",
    "sinks/test_lines.py",
    "sinks/test_native_lines.py",
    "stats/test_native.py",
)
TOO_LONG = "not leave_neither"


def library(name: str) -> str:
    return subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not PROVES, reason="it builds the package anew: make prove runs it")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_sanitizers_find_nothing_in_the_code_in_c(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    for name in ("monitor", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = {"CFLAGS": f"{SANITIZED} -g -O1", "LDFLAGS": SANITIZED}
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path, env=os.environ | build, check=True)
    run = {
        "LD_PRELOAD": f"{library('libasan.so')}:{library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves much
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(tmp_path),
    }
    tests = [tmp_path / "tests" / name for name in TESTED]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", TOO_LONG, *tests]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "runtime error" not in done.stderr
    assert "skipped" not in done.stdout
