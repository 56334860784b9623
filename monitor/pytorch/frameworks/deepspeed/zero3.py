"""ZeRO 3: every parameter is cut up by itself, and each rank keeps and steps an equal part of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION
from monitor.failures import Failures
from monitor.pytorch.frameworks.deepspeed.engine import ranks_in
from monitor.pytorch.frameworks.deepspeed.framework import Repacked
from monitor.pytorch.frameworks.deepspeed.pieces import Piece, flat_shard
from monitor.pytorch.frameworks.deepspeed.zero12 import ON_THEIR_WAY
from monitor.pytorch.frameworks.framework import LocalGradients
from monitor.pytorch.frameworks.moments import Stepped
from monitor.pytorch.hooks import first_after_accumulation
from monitor.recording.gradients import EACH_MICRO_BATCH
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.protocols import HookSet, Removable
from monitor.series import Placement, Shard


class Zero3(Repacked):
    """``grad_unreduced`` is what backward leaves in ``grad``, in the dtype of the parameter."""

    def notes(self) -> Mapping[str, str]:
        late = {"grad_reduced": ON_THEIR_WAY} if self._copies_late else {}
        return {**super().notes(), "grad_unreduced": EACH_MICRO_BATCH, **late}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        found = super().placement(kind, parameter)
        if kind not in SAME_AFTER_REDUCTION or found.shard is not None or not hasattr(parameter.tensor, "ds_id"):
            return found
        shard, _ = _part_of(parameter.tensor)  # of one that is not trained
        return found if shard is None else Placement(shard=shard)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return _BeforeZero([one for one in parameters if self.catches(one)], gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._pieces and parameter.tensor.requires_grad

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        tensor: Any = parameter.tensor
        return super().weight(parameter) if id(tensor) in self._pieces or not hasattr(tensor, "ds_id") else _kept_of(tensor)

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> Stepped | None:
        """Groups of the torch optimizer are empty between steps: ZeRO lends them one flat tensor after the other."""
        piece = self._pieces.get(id(parameter.tensor))
        if piece is None:
            return None
        place = getattr(self._wrapper, "sub_group_to_group_id", {}).get(piece.group)
        return Stepped(optimizer, piece.stepped, None if place is None else optimizer.param_groups[place])

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        for group, parameters in enumerate(self._wrapper.fp16_groups):
            flat, start = self._wrapper.fp32_partitioned_groups_flat[group], 0
            for index, parameter in enumerate(parameters):
                shard, numel = _part_of(parameter)
                yield parameter, Piece(flat, start, numel, tuple(parameter.ds_shape), shard, group, index)
                start += parameter.partition_numel()

    def _gradient(self, parameter: Tensor, piece: Piece) -> Tensor | None:
        del parameter
        if self._wrapper.offload_optimizer:
            return None if self._copies_late else piece.of(piece.stepped.grad)
        of_group = self._wrapper.averaged_gradients.get(piece.group)
        return piece.shaped(of_group[piece.index][: piece.numel]) if of_group else None

    @property
    def _copies_late(self) -> bool:
        """Whether nobody has waited until gradients have come from the device. After each backward, ZeRO does."""
        managed = getattr(self._engine, "managed_gradient_accumulation", None)
        return bool(self._wrapper.offload_optimizer) and managed is not None and not managed() and not self._is_on_host


def _part_of(parameter: Any) -> tuple[Shard | None, int]:
    """Which part of a parameter this rank keeps, and how many of its elements are not there to pad it."""
    group, each = parameter.ds_process_group, parameter.partition_numel()
    start = min(get_rank(group) * each, parameter.ds_numel)
    numel = min(each, parameter.ds_numel - start)
    return flat_shard(ranks_in(group), tuple(parameter.ds_shape), start, numel), numel


def _kept_of(parameter: Any) -> Tensor | None:
    """The part that this rank keeps of a parameter that is not trained; None while it is elsewhere, or if it is quantized."""
    kept, (shard, numel) = parameter.ds_tensor, _part_of(parameter)
    if numel == 0 or kept.numel() < numel or hasattr(kept, "ds_quant_scale"):
        return None
    part: Tensor = kept.detach()[:numel]
    return part.view(tuple(parameter.ds_shape)) if shard is None else part


class _BeforeZero:
    """Hooks that read a gradient ahead of ZeRO's own, which moves it to where it is aggregated, on another stream."""

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._gradients = gradients
        self._hooks = HookSet()
        for parameter in parameters:
            self._hooks.add(self._hook(parameter, failures))

    def remove(self) -> None:
        self._hooks.remove()

    def _hook(self, parameter: NamedParameter, failures: Failures) -> Removable:
        # Python's garbage collector does not see into these hooks: one that held the model would keep it for ever.
        tell, known = weakref.WeakMethod(self._tell), weakref.ref(parameter)

        def read(tensor: Tensor) -> None:
            living, watched = tell(), known()
            if living is not None and watched is not None:
                living(watched, tensor)

        uncompiled = torch.compiler.disable(failures.guarded("reading the gradient", read, of=parameter.name))
        return first_after_accumulation(parameter.tensor, uncompiled)

    def _tell(self, parameter: NamedParameter, tensor: Tensor) -> None:
        if self._gradients.wanted and tensor.grad is not None:
            self._gradients.arrived(parameter, tensor.grad, complete=False)
