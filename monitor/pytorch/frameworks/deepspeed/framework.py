"""What all optimizers of DeepSpeed have in common. Without ZeRO and in full precision there is nothing else to know."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION
from monitor.failures import Failures
from monitor.pytorch.frameworks.deepspeed.engine import ranks_in
from monitor.pytorch.frameworks.deepspeed.loss_scale import is_scaled
from monitor.pytorch.frameworks.deepspeed.patches import STEP_PATCH
from monitor.pytorch.frameworks.deepspeed.pieces import Piece
from monitor.pytorch.frameworks.deepspeed.steps import EngineSteps
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.frameworks.moments import Stepped
from monitor.pytorch.frameworks.optimizers import innermost
from monitor.recording.backend import StepListener
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallPatch
from monitor.series import Placement, Ranks

SCALED: Final = "multiplied by loss_scale, whose rows are in `other`: DeepSpeed divides by it inside its step"
GROUPS: Final = {
    "tp": ("get_tensor_model_parallel_group", "get_slice_parallel_group"),
    "pp": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
}
"""What the objects that know the groups of a job (``mpu``) call them."""


class DeepSpeed(Framework):
    """Without ZeRO, in float32: gradients, weights and moments are where plain PyTorch has them, alike on all ranks.

    The engine divides the loss by the number of micro-batches: gradients are those of the mean over them.
    """

    name = "deepspeed"
    reads_before_clipping = True

    def __init__(self, engine: Any, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        self.optimizer = _torch_optimizer(engine, optimizer)
        super().__init__(chunks, self.optimizer, main_grad=main_grad)
        self._engine = engine
        self._wrapper: Any = engine.optimizer
        check_version(STEP_PATCH)

    def groups(self) -> Mapping[str, Sequence[int]]:
        mpu = self._engine.mpu
        found = {role: getattr(mpu, name)() for role, names in GROUPS.items() for name in names if hasattr(mpu, name)}
        found["dp"] = self._engine.seq_data_parallel_group
        return {**super().groups(), **{role: ranks for role, group in found.items() if (ranks := ranks_in(group))}}

    def notes(self) -> Mapping[str, str]:
        return {"grad_reduced": SCALED} if is_scaled(self._engine) else {}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        if kind not in SAME_AFTER_REDUCTION:
            return super().placement(kind, parameter)
        alike = _ranks_of_expert(parameter.tensor) or ranks_in(self._engine.seq_data_parallel_group)
        return Placement(unclaimed=alike if len(alike) > 1 else (), data_parallel=alike)

    def held(self, optimizer: Any) -> None:
        """Whatever the engine trains, as it has repacked it."""
        del optimizer

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """The engine does, before its step."""
        del parameter
        return True

    def steps(self, listener: StepListener, failures: Failures) -> EngineSteps:
        return EngineSteps(self._engine, self.optimizer, listener, failures)


class Repacked(DeepSpeed):
    """Those optimizers of DeepSpeed that have the torch optimizer step other tensors than the parameters.

    What is not trained stays where it was.
    """

    def __init__(self, engine: Any, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(engine, chunks, optimizer, main_grad=main_grad)
        self._pieces = {id(parameter): piece for parameter, piece in self._layout()}
        self._is_on_host = all(parameter.device.type == "cpu" for parameter in engine.module.parameters())

    def _layout(self) -> Iterator[tuple[Tensor, Piece]]:
        """What became of every parameter that is trained."""
        raise NotImplementedError

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        piece = self._pieces.get(id(parameter.tensor))
        if piece is None or piece.shard is None or kind not in SAME_AFTER_REDUCTION:
            return super().placement(kind, parameter)
        return Placement(shard=piece.shard)

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return None if piece is None else self._gradient(parameter.tensor, piece)

    def _gradient(self, parameter: Tensor, piece: Piece) -> Tensor | None:
        """What this rank holds of the aggregated gradient, before it is unscaled and clipped."""
        raise NotImplementedError

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return super().weight(parameter) if piece is None else piece.weight()

    def moment(self, kind: str, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return None if piece is None else piece.of(super().moment(kind, parameter, optimizer))

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> Stepped | None:
        piece = self._pieces.get(id(parameter.tensor))
        return None if piece is None else Stepped(optimizer, piece.stepped)


def check_version(patch: CallPatch) -> None:
    """See whether an engine can be listened to.

    Raises:
        ValueError: Its methods are not those that are known here.
    """
    if not patch.fits:
        version = getattr(sys.modules.get("deepspeed"), "__version__", "unknown")
        raise ValueError(
            f"DeepSpeed {version} steps in a way that is not known here: use a version that this one was tested with (0.19)."
        )


def _torch_optimizer(engine: Any, given: Any) -> Optimizer:
    """The torch optimizer that an engine steps.

    Raises:
        TypeError: It has none.
        ValueError: Another one was passed.
    """
    found = innermost(engine.optimizer)
    if given is not None and innermost(given) not in (found, engine.basic_optimizer):
        raise ValueError(
            "The optimizer is not the one that the engine of DeepSpeed steps: pass the engine, its `.optimizer`, or the "
            "optimizer that was given to deepspeed.initialize."
        )
    return found


def _ranks_of_expert(parameter: Any) -> Ranks:
    """The ranks that have the same expert; empty for what is no expert's."""
    if getattr(parameter, "allreduce", True) or not hasattr(parameter, "group_name"):
        return ()
    return ranks_in(sys.modules["deepspeed.utils.groups"]._get_expert_data_parallel_group(parameter.group_name))
