"""Cells that MindSpore rewrites, for mixed precision (``O1``) for example: they are rewritten without the monitor's taps.

A rewritten cell is a new one of another class, with the attributes of the old one. The monitor's ``construct`` is an attribute
that calls the old cell. So taps are out while MindSpore rewrites.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import mindspore as ms

from monitor.mindspore.compiled.constructs import TapsOut
from monitor.recording.patches import CallPatch

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program


class Rewriting(TapsOut):
    """The calls in which MindSpore rewrites cells. Afterwards the old cells have taps again."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, PATCHES)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        self._enter()

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> None:
        del patch, args, kwargs, result
        self._leave()

    call_raised = call_ended

    def _take_out(self, program: Program, taps_out: ExitStack) -> None:
        assert program.failures is not None
        for put_back in program.take_out():
            taps_out.callback(program.failures.guarded("putting taps back", put_back))


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
