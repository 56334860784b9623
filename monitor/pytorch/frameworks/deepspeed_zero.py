"""DeepSpeed's ZeRO stages and reduced-precision optimizers, and the choice of the adapter for an engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION
from monitor.failures import Failures
from monitor.pytorch.frameworks import deepspeed
from monitor.pytorch.frameworks.deepspeed import DeepSpeed, RepackedDeepSpeed, SteppedPiece
from monitor.pytorch.frameworks.framework import LocalGradients
from monitor.pytorch.frameworks.optimizer_state import SteppedTensor
from monitor.pytorch.hooks import first_after_accumulation
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import HookSet, Removable
from monitor.recording.parameters import EACH_MICRO_BATCH
from monitor.recording.patches import CallListener, CallPatch
from monitor.series import Placement, Shard

# --- Without ZeRO, in reduced precision: every rank steps a float32 copy of all weights.


class MasterCopies(RepackedDeepSpeed):
    """One float32 copy for each parameter."""

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        for parameters, copies in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True):
            for parameter, copied in zip(parameters, copies, strict=True):
                yield parameter, SteppedPiece(copied, 0, copied.numel(), tuple(parameter.shape))

    def _gradient(self, parameter: Tensor, piece: SteppedPiece) -> Tensor | None:
        del piece
        return parameter.grad


class FlatMasterCopies(MasterCopies):
    """One flat float32 tensor for each parameter group."""

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        for parameters, flat in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups_flat, strict=True):
            start = 0
            for parameter in parameters:
                yield parameter, SteppedPiece(flat, start, parameter.numel(), tuple(parameter.shape))
                start += parameter.numel()


# --- ZeRO 1 and 2: each rank steps an equal part of the flattened weights, in float32.

STILL_COPYING: Final = "missing: when a step begins, gradients are still being copied to the optimizer on the host"
ORTHOGONALISED: Final = "missing for the matrices that Muon steps: its updates have replaced their gradients by then"


class Zero12(RepackedDeepSpeed):
    """ZeRO 1 and 2. ``grad_unreduced`` is ``grad`` after backward, in the dtype of the parameter. If ZeRO 1 accumulates in
    another dtype, it is the accumulated sum.
    """

    def notes(self) -> Mapping[str, str]:
        found = dict(super().notes())
        if self._wrapper.partition_gradients:
            found["grad_unreduced"] = EACH_MICRO_BATCH
        if self._copies_late:
            found["grad_reduced"] = STILL_COPYING
        elif any(self._is_orthogonalised(p) for parameters in self._wrapper.bit16_groups for p in parameters):
            found["grad_reduced"] = "; ".join(filter(None, [found.get("grad_reduced"), ORTHOGONALISED]))
        return found

    def local_gradient(self, tensor: Any) -> Tensor | None:
        found = super().local_gradient(tensor)
        return getattr(tensor, "grad_accum", None) if found is None else found

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        groups, parts = self._wrapper.round_robin_bit16_groups, self._wrapper.single_partition_of_fp32_groups
        begins = getattr(self._wrapper, "round_robin_bit16_offsets", None)  # later versions may align parameters
        return pieces_of_groups(self._wrapper, groups, parts, end_to_end(groups) if begins is None else begins)

    def _gradient(self, parameter: Tensor, piece: SteppedPiece) -> Tensor | None:
        if piece.numel == 0 or self._copies_late or self._is_orthogonalised(parameter):
            return None
        if self._wrapper.cpu_offload:
            return piece.of(piece.stepped.grad)
        of_group = self._wrapper.averaged_gradients.get(piece.group)
        return piece.shaped(of_group[piece.index]) if of_group else None

    @property
    def _copies_late(self) -> bool:
        """Whether gradients are still being copied from the device when the step begins."""
        return bool(self._wrapper.cpu_offload) and not self._is_on_host

    def _is_orthogonalised(self, parameter: Tensor) -> bool:
        by_muon = getattr(parameter, "use_muon", False) and "muon" in type(self.optimizer).__name__.lower()
        return bool(by_muon) and not self._wrapper.cpu_offload


def pieces_of_groups(
    wrapper: Any, groups: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], begins: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, SteppedPiece]]:
    """The piece of each parameter. The parameters of a group are concatenated and split into equal parts, one for each rank.

    DeepSpeed's own record on a parameter (``_hp_mapping``) ignores the reordering by ``round_robin_gradients``.

    Args:
        groups: Parameters of each group, in memory order.
        parts: This rank's part of each group.
        begins: First element of each parameter in its group.
    """
    for group, (parameters, part) in enumerate(zip(groups, parts, strict=True)):
        process_group = wrapper.real_dp_process_group[group]
        ranks, first = deepspeed.ranks_in(process_group), get_rank(process_group) * part.numel()
        end, index = 0, 0
        for parameter, begin in zip(parameters, begins[group], strict=True):
            left, right = max(begin, first), min(begin + parameter.numel(), first + part.numel())
            start, numel, shape = left - first, max(0, right - left), tuple(parameter.shape)
            if numel > 0 and start > end:
                index += 1  # gradients in a gap are numbered, too
            yield (
                parameter,
                SteppedPiece(part, start, numel, shape, deepspeed.flat_shard(ranks, shape, left - begin, numel), group, index),
            )
            if numel > 0:
                end, index = start + numel, index + 1


def end_to_end(groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The first element of each parameter in its group, without gaps."""
    return [[0, *accumulate(p.numel() for p in parameters[:-1])] for parameters in groups]


# --- ZeRO 1 in bfloat16 with gradients in float32: weights are sharded, gradients are whole on every rank.

IN_A_PIPELINE: Final = "missing: the engine of a pipeline sums and reduces gradients in one operation"


class Bf16Zero1(RepackedDeepSpeed):
    """``grad_unreduced`` is the local sum in float32; ``grad`` after backward is bfloat16 and holds one micro-batch only."""

    def __init__(self, engine: Any, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(engine, chunks, optimizer, main_grad=main_grad)
        deepspeed.check_version(deepspeed.REDUCE_PATCH)
        self._sums = {
            id(p): _SumBuffer(self._wrapper, i, j, p)
            for i, of in enumerate(self._wrapper.bf16_groups)
            for j, p in enumerate(of)
        }

    def notes(self) -> Mapping[str, str]:
        missing = {"grad_unreduced": IN_A_PIPELINE} if self._engine.pipeline_parallelism else {}
        return {**super().notes(), **missing}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        return DeepSpeed.placement(self, kind, parameter) if kind == "grad_reduced" else super().placement(kind, parameter)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        wanted = [(parameter, self._sums[id(parameter.tensor)]) for parameter in parameters if self.catches(parameter)]
        return _LocalSums(self._engine, wanted, gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._sums

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        groups = self._wrapper.bf16_groups
        return pieces_of_groups(self._wrapper, groups, self._wrapper.fp32_groups_flat_partition, end_to_end(groups))

    def _gradient(self, parameter: Tensor, piece: SteppedPiece) -> Tensor | None:
        del piece
        return self._sums[id(parameter)].gradient


class _SumBuffer:
    """The accumulation buffer of one parameter's gradient, which is reduced in place.

    Attributes:
        gradient: The buffer, in the parameter's shape.
    """

    def __init__(self, wrapper: Any, group: int, index: int, parameter: Tensor) -> None:
        self.gradient: Tensor = wrapper.fp32_groups_gradients[group][index].view(parameter.shape)
        self._wrapper = wrapper
        self._place = group, index

    @property
    def has_begun(self) -> bool:
        """Whether a backward of this step has reached the parameter."""
        group, index = self._place
        return bool(self._wrapper.fp32_groups_has_gradients[group][index])


class _LocalSums(CallListener):
    """Reports the sums after every backward, before reduction."""

    def __init__(
        self,
        engine: Any,
        wanted: Sequence[tuple[NamedParameter, _SumBuffer]],
        gradients: LocalGradients,
        failures: Failures,
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._gradients = gradients
        self._guarded_report = failures.guarded("reading local gradients", self._report)
        deepspeed.REDUCE_PATCH.add(self)

    def remove(self) -> None:
        deepspeed.REDUCE_PATCH.remove(self)

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if self._gradients.wanted and args[0] is self._engine:
            self._guarded_report()

    def _report(self) -> None:
        for parameter, local in self._wanted:
            if local.has_begun:
                self._gradients.arrived(parameter, local.gradient, complete=False)


# --- ZeRO 3: each parameter is sharded separately, and each rank keeps and steps an equal part of it.


class Zero3(RepackedDeepSpeed):
    """ZeRO 3. ``grad_unreduced`` is ``grad`` after backward, in the dtype of the parameter."""

    def notes(self) -> Mapping[str, str]:
        late = {"grad_reduced": STILL_COPYING} if self._copies_late else {}
        return {**super().notes(), "grad_unreduced": EACH_MICRO_BATCH, **late}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        found = super().placement(kind, parameter)
        if kind not in SAME_AFTER_REDUCTION or found.shard is not None or not hasattr(parameter.tensor, "ds_id"):
            return found
        shard, _ = _part_of(parameter.tensor)  # a parameter that is not trained
        return found if shard is None else Placement(shard=shard)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return _HooksBeforeZero([one for one in parameters if self.catches(one)], gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._pieces and parameter.tensor.requires_grad

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        tensor: Any = parameter.tensor
        return super().weight(parameter) if id(tensor) in self._pieces or not hasattr(tensor, "ds_id") else _frozen_part(tensor)

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> SteppedTensor | None:
        """With its hyperparameters: groups of the torch optimizer are empty between steps. ZeRO fills them with one flat tensor
        at a time.
        """
        piece = self._pieces.get(id(parameter.tensor))
        if piece is None:
            return None
        place = getattr(self._wrapper, "sub_group_to_group_id", {}).get(piece.group)
        return SteppedTensor(optimizer, piece.stepped, None if place is None else optimizer.param_groups[place])

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        for group, parameters in enumerate(self._wrapper.fp16_groups):
            flat, start = self._wrapper.fp32_partitioned_groups_flat[group], 0
            for index, parameter in enumerate(parameters):
                shard, numel = _part_of(parameter)
                yield parameter, SteppedPiece(flat, start, numel, tuple(parameter.ds_shape), shard, group, index)
                start += parameter.partition_numel()

    def _gradient(self, parameter: Tensor, piece: SteppedPiece) -> Tensor | None:
        del parameter
        if self._wrapper.offload_optimizer:
            return None if self._copies_late else piece.of(piece.stepped.grad)
        of_group = self._wrapper.averaged_gradients.get(piece.group)
        return piece.shaped(of_group[piece.index][: piece.numel]) if of_group else None

    @property
    def _copies_late(self) -> bool:
        """Whether gradients may still be on their way from the device. ZeRO waits only after a backward that it manages."""
        managed = getattr(self._engine, "managed_gradient_accumulation", None)
        return bool(self._wrapper.offload_optimizer) and managed is not None and not managed() and not self._is_on_host


def _part_of(parameter: Any) -> tuple[Shard | None, int]:
    """The part of a parameter that this rank keeps, and its number of elements without padding."""
    group, each = parameter.ds_process_group, parameter.partition_numel()
    start = min(get_rank(group) * each, parameter.ds_numel)
    numel = min(each, parameter.ds_numel - start)
    return deepspeed.flat_shard(deepspeed.ranks_in(group), tuple(parameter.ds_shape), start, numel), numel


def _frozen_part(parameter: Any) -> Tensor | None:
    """This rank's part of a parameter that is not trained; None while it is offloaded, or if it is quantized."""
    kept, (shard, numel) = parameter.ds_tensor, _part_of(parameter)
    if numel == 0 or kept.numel() < numel or hasattr(kept, "ds_quant_scale"):
        return None
    part: Tensor = kept.detach()[:numel]
    return part.view(tuple(parameter.ds_shape)) if shard is None else part


class _HooksBeforeZero:
    """Hooks that read a gradient before ZeRO's hook, which moves it to a reduction buffer on another stream."""

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._gradients = gradients
        self._hooks = HookSet()
        for parameter in parameters:
            self._hooks.add(self._hook(parameter, failures))

    def remove(self) -> None:
        self._hooks.remove()

    def _hook(self, parameter: NamedParameter, failures: Failures) -> Removable:
        # Python's garbage collector does not traverse these hooks: a strong reference would leak the model.
        report, known = weakref.WeakMethod(self._report), weakref.ref(parameter)

        def read(tensor: Tensor) -> None:
            living, watched = report(), known()
            if living is not None and watched is not None:
                living(watched, tensor)

        uncompiled = torch.compiler.disable(failures.guarded("reading the gradient", read, of=parameter.name))
        return first_after_accumulation(parameter.tensor, uncompiled)

    def _report(self, parameter: NamedParameter, tensor: Tensor) -> None:
        if self._gradients.wanted and tensor.grad is not None:
            self._gradients.arrived(parameter, tensor.grad, complete=False)


KNOWN: Final[dict[str, type[DeepSpeed]]] = {
    "FP16_UnfusedOptimizer": MasterCopies,
    "FP16_Optimizer": FlatMasterCopies,
    "BF16_Optimizer": Bf16Zero1,
    "DeepSpeedZeroOptimizer": Zero12,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
}
"""By class name, so that no import is needed."""


def deepspeed_of(chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> DeepSpeed | None:
    """The adapter for the engine that trains ``chunks``; None if no engine does.

    Raises:
        TypeError: ``optimizer`` is no optimizer.
        ValueError: The engine cannot be found or observed, or the optimizer is not its own.
    """
    engine = deepspeed.engine_of(chunks, optimizer)
    if engine is None:
        return None
    given = None if optimizer is engine else optimizer
    return _framework_for(engine.optimizer)(engine, chunks, given, main_grad=main_grad)


def _framework_for(optimizer: Any) -> type[DeepSpeed]:
    if isinstance(optimizer, Optimizer):
        return DeepSpeed
    if optimizer is None:
        raise ValueError("The engine of DeepSpeed has no optimizer: give deepspeed.initialize one, or name it in the config.")
    name = type(optimizer).__name__
    if name not in KNOWN:
        raise ValueError(
            f"The engine of DeepSpeed has a {name}, and the monitor does not know where it keeps gradients, weights and "
            "moments: use ZeRO 0 to 3 with an optimizer, and without ZenFlow."
        )
    return KNOWN[name]
