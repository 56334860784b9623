"""Without ZeRO, in reduced precision: every rank steps a copy of all weights in float32."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from monitor.pytorch.frameworks.deepspeed.framework import Repacked
from monitor.pytorch.frameworks.deepspeed.pieces import Piece


class MasterCopies(Repacked):
    """A copy of each parameter."""

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        for parameters, copies in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True):
            for parameter, copied in zip(parameters, copies, strict=True):
                yield parameter, Piece(copied, 0, copied.numel(), tuple(parameter.shape))

    def _gradient(self, parameter: Tensor, piece: Piece) -> Tensor | None:
        del piece
        return parameter.grad


class FlatMasterCopies(MasterCopies):
    """The copies of a parameter group, one after the other."""

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        for parameters, flat in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups_flat, strict=True):
            start = 0
            for parameter in parameters:
                yield parameter, Piece(flat, start, parameter.numel(), tuple(parameter.shape))
                start += parameter.numel()
