"""The fused kernels on the host, under Triton's interpreter.

What is interpreted is decided when a kernel is decorated, those of Triton's own language among them. So the interpreted source
has a Triton of its own, imported while the switch was set, and the Triton of everybody else stays as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import ModuleType

from monitor.stats.triton.launch import Driver, FusedEngine, FusedKernel
from monitor.stats.triton.reading import Blocks

SOURCE = "monitor.stats.triton.source"
KERNELS = (SOURCE, "monitor.stats.triton.elements", "monitor.stats.triton.rows")
SMALL = Blocks(lanes=32, rows=16, parts=4, tiles=4)
"""Many parts and several rounds of every loop with few elements."""

HOST = Driver(device=lambda: -1, stream=lambda _: 0, capturing=lambda: False, on=lambda _: nullcontext())


@contextmanager
def _without(names: list[str]) -> Iterator[None]:
    kept = {name: sys.modules.pop(name) for name in names}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_copied(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for name in KERNELS:
            _put_back(name, kept.get(name))


def _put_back(name: str, module: ModuleType | None) -> None:
    """A package has its modules as attributes, too."""
    package, _, attribute = name.rpartition(".")
    if module is not None:
        setattr(sys.modules[package], attribute, module)
    elif hasattr(sys.modules[package], attribute):
        delattr(sys.modules[package], attribute)


def _is_copied(name: str) -> bool:
    """Native code is there once."""
    return name in KERNELS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))


@cache
def source() -> ModuleType:
    """The kernels, to be interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with _without([name for name in sys.modules if _is_copied(name)]):
            return importlib.import_module(SOURCE)
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def engine(blocks: Blocks = SMALL) -> FusedEngine:
    return FusedEngine(source(), HOST, blocks)


def fused(eps: float, blocks: Blocks = SMALL, **wanted: bool) -> FusedKernel:
    return FusedKernel(eps, engine(blocks), **wanted)
