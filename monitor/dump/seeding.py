"""Randomness fixed, as far as no framework has a part in it."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np

LARGEST = (1 << 32) - 1
"""Of the seeds that numpy takes."""


def seed_python(seed: int) -> None:
    """Seed Python's generator and numpy's, and the hashes of processes that this one starts.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST:
        raise ValueError(f"seed is {seed!r}: expected a whole number from 0 to {LARGEST}.")
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)


def replace_everywhere(package: str, name: str, original: Any, replacement: Any) -> None:
    """Let ``name`` stand for ``replacement`` in each module of a package where it stands for ``original``.

    A framework's modules import functions from each other, and each holds a reference of its own.
    """
    for path, module in list(sys.modules.items()):
        if (path == package or path.startswith(f"{package}.")) and vars(module).get(name) is original:
            setattr(module, name, replacement)
