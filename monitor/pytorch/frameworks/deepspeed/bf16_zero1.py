"""ZeRO 1 in bfloat16 with gradients in float32: weights are cut up as ever, gradients are whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.frameworks.deepspeed.framework import DeepSpeed, Repacked, check_version
from monitor.pytorch.frameworks.deepspeed.patches import REDUCE_PATCH
from monitor.pytorch.frameworks.deepspeed.pieces import Piece
from monitor.pytorch.frameworks.deepspeed.zero12 import end_to_end, laid_out
from monitor.pytorch.frameworks.framework import LocalGradients
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import Removable
from monitor.series import Placement

IN_A_PIPELINE: Final = "missing: the engine of a pipeline adds up and aggregates gradients in one go"


class Bf16Zero1(Repacked):
    """``grad_unreduced`` is the local sum in float32: what backward leaves in ``grad`` is bfloat16 and one micro-batch's."""

    def __init__(self, engine: Any, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(engine, chunks, optimizer, main_grad=main_grad)
        check_version(REDUCE_PATCH)
        self._sums = {
            id(p): _Sum(self._wrapper, i, j, p) for i, of in enumerate(self._wrapper.bf16_groups) for j, p in enumerate(of)
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

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        groups = self._wrapper.bf16_groups
        return laid_out(self._wrapper, groups, self._wrapper.fp32_groups_flat_partition, end_to_end(groups))

    def _gradient(self, parameter: Tensor, piece: Piece) -> Tensor | None:
        del piece
        return self._sums[id(parameter)].gradient


class _Sum:
    """Where the gradients of one parameter add up, and are aggregated in place.

    Attributes:
        gradient: Of the parameter's shape.
    """

    def __init__(self, wrapper: Any, group: int, index: int, parameter: Tensor) -> None:
        self.gradient: Tensor = wrapper.fp32_groups_gradients[group][index].view(parameter.shape)
        self._wrapper = wrapper
        self._place = group, index

    @property
    def has_begun(self) -> bool:
        """Whether a backward of this step has come to the parameter."""
        group, index = self._place
        return bool(self._wrapper.fp32_groups_has_gradients[group][index])


class _LocalSums(CallListener):
    """Tells of the sums after every backward, before they are aggregated."""

    def __init__(
        self, engine: Any, wanted: Sequence[tuple[NamedParameter, _Sum]], gradients: LocalGradients, failures: Failures
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._gradients = gradients
        self._guarded_tell = failures.guarded("reading local gradients", self._tell)
        REDUCE_PATCH.add(self)

    def remove(self) -> None:
        REDUCE_PATCH.remove(self)

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if self._gradients.wanted and args[0] is self._engine:
            self._guarded_tell()

    def _tell(self) -> None:
        for parameter, local in self._wanted:
            if local.has_begun:
                self._gradients.arrived(parameter, local.gradient, complete=False)
