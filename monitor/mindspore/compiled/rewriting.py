"""Cells that MindSpore rewrites, for mixed precision (``O1``) for example: they are rewritten without the monitor's taps.

A rewritten cell is a new one of another class, with the attributes of the old one. The monitor's ``construct`` is an attribute
that calls the old cell. So taps are out while MindSpore rewrites.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import mindspore as ms

from monitor.recording.patches import CallListener, CallPatch

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program


class Rewriting(CallListener):
    """Takes the taps of one program out while MindSpore rewrites cells, and puts them back into the old ones."""

    def __init__(self, program: Program) -> None:
        self._known = weakref.ref(program)
        self._put_back: list[Callable[[], None]] = []
        self._depth = 0

    def begin(self) -> None:
        """Follow calls from now on."""
        for patch in PATCHES:
            patch.remove(self)
            patch.add(self)

    def end(self) -> None:
        for patch in PATCHES:
            patch.remove(self)
        self._depth = 0
        self._put_back.clear()

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        program = self._known()
        self._depth += 1
        if self._depth == 1 and program is not None and program.failures is not None:
            program.failures.guarded("taking taps out", lambda: self._put_back.extend(program.take_out()))()

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del result
        self.call_raised(patch, args, kwargs)

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        program = self._known()
        self._depth = max(0, self._depth - 1)
        while not self._depth and self._put_back and program is not None and program.failures is not None:
            program.failures.guarded("putting taps back", self._put_back.pop())()


def _patches() -> Iterator[CallPatch]:
    """MindSpore's functions that read a cell or make a new one; private, so they may be missing in other versions."""
    builder = getattr(sys.modules[ms.rewrite.SymbolTree.__module__], "SymbolTreeBuilder", None)
    for owner, name in (
        (ms.train.amp, "_auto_mixed_precision_rewrite"),
        (builder, "build"),
        (ms.rewrite.SymbolTree, "get_network"),
    ):
        if owner is not None and (patch := CallPatch(owner, name)).fits:
            yield patch


PATCHES: Final = tuple(_patches())
