"""ZeRO 1 and 2: each rank steps an equal part of the flattened weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from torch import Tensor
from torch.distributed import get_rank

from monitor.pytorch.frameworks.deepspeed.engine import ranks_in
from monitor.pytorch.frameworks.deepspeed.framework import Repacked
from monitor.pytorch.frameworks.deepspeed.pieces import Piece, flat_shard
from monitor.recording.gradients import EACH_MICRO_BATCH

ON_THEIR_WAY: Final = "missing: when a step begins, gradients are still being copied to the optimizer on the host"
ORTHOGONALISED: Final = "missing for the matrices that Muon steps: its updates have taken the place of their gradients by then"


class Zero12(Repacked):
    """``grad_unreduced`` is what backward has left in ``grad``, in the dtype of the parameter; where ZeRO 1 accumulates in
    another dtype, it is what has accumulated.
    """

    def notes(self) -> Mapping[str, str]:
        found = dict(super().notes())
        if self._wrapper.partition_gradients:
            found["grad_unreduced"] = EACH_MICRO_BATCH
        if self._copies_late:
            found["grad_reduced"] = ON_THEIR_WAY
        elif any(self._is_orthogonalised(p) for parameters in self._wrapper.bit16_groups for p in parameters):
            found["grad_reduced"] = "; ".join(filter(None, [found.get("grad_reduced"), ORTHOGONALISED]))
        return found

    def local_gradient(self, tensor: Any) -> Tensor | None:
        found = super().local_gradient(tensor)
        return getattr(tensor, "grad_accum", None) if found is None else found

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        groups, parts = self._wrapper.round_robin_bit16_groups, self._wrapper.single_partition_of_fp32_groups
        begins = getattr(self._wrapper, "round_robin_bit16_offsets", None)  # later versions may align parameters
        return laid_out(self._wrapper, groups, parts, end_to_end(groups) if begins is None else begins)

    def _gradient(self, parameter: Tensor, piece: Piece) -> Tensor | None:
        if piece.numel == 0 or self._copies_late or self._is_orthogonalised(parameter):
            return None
        if self._wrapper.cpu_offload:
            return piece.of(piece.stepped.grad)
        of_group = self._wrapper.averaged_gradients.get(piece.group)
        return piece.shaped(of_group[piece.index]) if of_group else None

    @property
    def _copies_late(self) -> bool:
        """Whether only the step itself waits until gradients have come from the device."""
        return bool(self._wrapper.cpu_offload) and not self._is_on_host

    def _is_orthogonalised(self, parameter: Tensor) -> bool:
        by_muon = getattr(parameter, "use_muon", False) and "muon" in type(self.optimizer).__name__.lower()
        return bool(by_muon) and not self._wrapper.cpu_offload


def laid_out(
    wrapper: Any, groups: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], begins: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, Piece]]:
    """The parameters of each group lie one after the other, cut into parts of equal length, one for each rank.

    What DeepSpeed leaves on a parameter of this (``_hp_mapping``) forgets that ``round_robin_gradients`` orders them anew.

    Args:
        groups: Of parameters, in the order in which they lie.
        parts: Of the groups, this rank's.
        begins: Where in its group each parameter begins.
    """
    for group, (parameters, part) in enumerate(zip(groups, parts, strict=True)):
        process_group = wrapper.real_dp_process_group[group]
        ranks, first = ranks_in(process_group), get_rank(process_group) * part.numel()
        end, index = 0, 0
        for parameter, begin in zip(parameters, begins[group], strict=True):
            left, right = max(begin, first), min(begin + parameter.numel(), first + part.numel())
            start, numel, shape = left - first, max(0, right - left), tuple(parameter.shape)
            if numel > 0 and start > end:
                index += 1  # gradients that lie in a gap are numbered, too
            yield parameter, Piece(part, start, numel, shape, flat_shard(ranks, shape, left - begin, numel), group, index)
            if numel > 0:
                end, index = start + numel, index + 1


def end_to_end(groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Where each parameter begins in its group when nothing lies between them."""
    return [[0, *accumulate(p.numel() for p in parameters[:-1])] for parameters in groups]
