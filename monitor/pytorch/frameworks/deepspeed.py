"""DeepSpeed: finding the engine, its steps and loss scale, and the adapter that its optimizers share."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION
from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.frameworks.optimizer_state import SteppedTensor
from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.optimizer_steps import innermost
from monitor.pytorch.process_group import group_ranks
from monitor.recording.arguments import MAX_WRAPPERS
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import HookSet, StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.phases import Clipping
from monitor.series import Placement, Ranks, Shard, ranks_of

# --- The engine of DeepSpeed that trains a model. The monitor does not import DeepSpeed: if it is in use, it is imported
# already.

DEFINES_ENGINE: Final = "deepspeed.runtime.engine"


def engine_class() -> Any:
    """The base class of all engines; None if DeepSpeed is not in use."""
    return getattr(sys.modules.get(DEFINES_ENGINE), "DeepSpeedEngine", None)


def engine_of(chunks: Sequence[nn.Module], optimizer: Any) -> Any:
    """The engine that trains ``chunks``: the engine itself or the module that it wraps.

    Returns:
        None if DeepSpeed does not train them.

    Raises:
        ValueError: DeepSpeed trains them, but the engine cannot be found, or there are several.
    """
    of = engine_class()
    if of is None:
        return None
    modules = (module for chunk in chunks for module in chunk.modules())
    found = {id(one): one for part in (*modules, *_wrappers(optimizer)) for one in _engines_behind(part, of)}
    if len(found) > 1:
        raise ValueError("model and optimizer belong to several engines of DeepSpeed: call set_monitor once for each engine.")
    if not found and (any(map(_is_deepspeed_optimizer, _wrappers(optimizer))) or _is_partitioned(chunks)):
        raise ValueError(
            "DeepSpeed trains the model, but the monitor cannot find its engine: call set_monitor after deepspeed.initialize, "
            "and pass the engine that it returned as the model."
        )
    return next(iter(found.values()), None)


def ranks_in(group: Any) -> Ranks:
    """The ranks of one of DeepSpeed's process groups."""
    return ranks_of(group_ranks("a process group of DeepSpeed", group) or ())


def _engines_behind(part: Any, of: type) -> Iterator[Any]:
    if isinstance(part, of):
        yield part
    # The module references its engine only through a forward pre-hook of the engine.
    for hook in part._forward_pre_hooks.values() if isinstance(part, nn.Module) else ():
        if getattr(hook, "__module__", None) == DEFINES_ENGINE:
            yield from (cell.cell_contents for cell in hook.__closure__ or () if isinstance(cell.cell_contents, of))


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """The optimizer that the user passed and those that it wraps, without the torch optimizer."""
    for _ in range(MAX_WRAPPERS):
        if optimizer is None or isinstance(optimizer, Optimizer):
            return
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _is_deepspeed_optimizer(wrapper: Any) -> bool:
    return type(wrapper).__module__.partition(".")[0] == "deepspeed"


def _is_partitioned(chunks: Sequence[nn.Module]) -> bool:
    """Whether ZeRO manages parameters now."""
    parameters = (p for chunk in chunks for p in chunk.parameters())
    return any(hasattr(p, "ds_id") or getattr(p, "_hp_mapping", None) is not None for p in parameters)


# --- The loss scale of an engine: gradients are multiplied by it until the optimizer divides.


def loss_scale_of(engine: Any) -> Tensor | None:
    """The scale of the loss, one element; None if the loss is not scaled."""
    scaler = grad_scaler_of(engine)
    if scaler is not None:
        scale: Tensor | None = scaler._scale
        return scale
    return torch.tensor(float(engine.optimizer.loss_scale), device="cpu") if _scales(engine) else None


def is_scaled(engine: Any) -> bool:
    """Whether gradients are multiplied by a loss scale until the optimizer's step."""
    return grad_scaler_of(engine) is not None or _scales(engine)


def grad_scaler_of(engine: Any) -> Any:
    """The engine's GradScaler, which it has if torch's autocast computes in float16."""
    without_zero = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None) if without_zero is None else without_zero


def _scales(engine: Any) -> bool:
    # An engine with a method ``scale`` scales the loss through ZeRO's optimizers only. Without ZeRO, float16 gradients are
    # divided by a scale although the loss was not multiplied. In older versions every optimizer of DeepSpeed multiplies the
    # loss itself.
    if hasattr(type(engine), "scale") and not hasattr(engine.optimizer, "scale_if_loss"):
        return False
    dynamic = bool(getattr(engine.optimizer, "dynamic_loss_scale", False))
    return dynamic or float(getattr(engine.optimizer, "loss_scale", 1.0)) != 1.0


# --- Patches of two methods of the engine's class. Neither the engine nor its optimizers have hooks. They are no torch
# optimizers: they may step the torch optimizer inside several times or not at all, after unscaling and clipping.

STEP_PATCH: Final = TorchCallPatch(engine_class(), "_take_model_step")
"""Called once at the end of a step, after reduction and before unscaling and clipping, in every stage."""

REDUCE_PATCH: Final = TorchCallPatch(engine_class(), "allreduce_gradients")
"""Called after every backward, before any reduction."""

# --- Steps of an engine: one at the end of each accumulation, however often it calls the torch optimizer.


class EngineSteps(CallListener):
    """Reports the steps of one engine to a listener.

    Attributes:
        optimizers: The torch optimizer inside.
    """

    evaluating = False

    def __init__(self, engine: Any, optimizer: Optimizer, listener: StepListener, failures: Failures) -> None:
        self.optimizers = (optimizer,)
        self._stepped = optimizer
        self._engine = engine
        self._listener = listener
        self._guarded = failures.guarded
        self._hooks = HookSet()
        self._called = False
        self._hooks.add(optimizer.register_step_post_hook(failures.guarded("counting steps", self._is_called)))
        STEP_PATCH.add(self)

    def remove(self) -> None:
        STEP_PATCH.remove(self)
        self._hooks.remove()

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if args[0] is self._engine:
            self._called = False
            self._guarded("reading the loss scale", self._report_scale)()
            self._guarded("reading before the step", self._listener.before_step)(self._stepped)
            self._guarded("reading gradients", self._listener.gradients_ready)(self._stepped)

    def call_ended(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs, result
        if args[0] is self._engine:
            self._guarded("ending the step", self._ended)()

    def _ended(self) -> None:
        if self._engine.was_step_applied() and (self._called or grad_scaler_of(self._engine) is None):
            self._guarded("reading the norm of gradients", self._report_norm)()
            self._listener.after_step(self._stepped)
        else:
            self._listener.after_step(self._stepped, skipped=True)

    def _report_norm(self) -> None:
        """Report the total norm as DeepSpeed has computed it in this step. Without one there is 0 or None."""
        optimizer = self._engine.optimizer
        norm = getattr(optimizer, "_global_grad_norm", None)
        still_scaled = is_scaled(self._engine) and type(optimizer).__name__ == "FP16_UnfusedOptimizer"
        if (isinstance(norm, Tensor) or norm) and not still_scaled:
            limit = float(self._engine.gradient_clipping())
            self._listener.clipped(Clipping(norm, limit if limit > 0 else None, is_total=True))

    def _is_called(self, *_: Any) -> None:
        self._called = True

    def _report_scale(self) -> None:
        scale = loss_scale_of(self._engine)
        if scale is not None:
            self._listener.loss_scale(self._stepped, scale)


# --- The run of elements of a parameter that this rank's torch optimizer steps. Under ZeRO it steps long flat tensors.


@dataclass(frozen=True, slots=True)
class SteppedPiece:
    """The part of a parameter that this rank's torch optimizer steps.

    Attributes:
        stepped: The tensor in the optimizer.
        start: First element of the piece in the flattened ``stepped``.
        numel: Its elements, without padding of ``stepped``; 0 if other ranks step all of the parameter.
        shape: Shape of the parameter.
        shard: The piece's position in the parameter; None if it is the whole.
        group: Index of ``stepped`` among the rank's flat tensors.
        index: Index of the piece in ``stepped``.
    """

    stepped: Tensor
    start: int
    numel: int
    shape: tuple[int, ...]
    shard: Shard | None = None
    group: int = 0
    index: int = 0

    def weight(self) -> Tensor | None:
        """The piece of the weight; None while its memory is swapped out or offloaded."""
        return self.of(self.stepped)

    def of(self, whole: Tensor | None) -> Tensor | None:
        """The piece of a tensor with the layout of ``stepped``; None for any other tensor."""
        if whole is None or whole.numel() != self.stepped.numel() or self.start + self.numel > whole.numel():
            return None
        whole = whole.detach()
        return whole if whole.shape == self.shape else self.shaped(whole.view(-1).narrow(0, self.start, self.numel))

    def shaped(self, elements: Tensor) -> Tensor | None:
        """Elements of the piece in the recorded shape; None if there are none or their number differs."""
        if self.numel == 0 or elements.numel() != self.numel:
            return None
        return elements.reshape(self.shape if self.shard is None else -1)


def flat_shard(ranks: Ranks, shape: tuple[int, ...], start: int, numel: int) -> Shard | None:
    """The part of a parameter that begins at element ``start``; None if this rank alone holds the whole parameter."""
    if len(ranks) <= 1 and numel == math.prod(shape):
        return None
    return Shard(ranks, shape, (start,) if numel else (), flat=True)


SCALED: Final = "multiplied by loss_scale, whose rows are in `other`: DeepSpeed divides by it inside its step"
GROUPS: Final = {
    "tp": ("get_tensor_model_parallel_group", "get_slice_parallel_group"),
    "pp": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
}
"""Names of the methods of ``mpu`` that return the groups of a job."""


class DeepSpeed(Framework):
    """DeepSpeed without ZeRO, in float32: gradients, weights and moments are where plain PyTorch keeps them, replicated on all
    ranks.

    The engine divides the loss by the number of micro-batches, so gradients are those of their mean.
    """

    name = "deepspeed"
    loses_gradients = True
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
        """None for all: the engine steps all of its parameters."""
        del optimizer

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """The engine reduces gradients before its step."""
        del parameter
        return True

    def steps(self, listener: StepListener, failures: Failures) -> EngineSteps:
        return EngineSteps(self._engine, self.optimizer, listener, failures)


class RepackedDeepSpeed(DeepSpeed):
    """Optimizers of DeepSpeed whose torch optimizer steps other tensors than the parameters.

    Parameters that are not trained stay in place.
    """

    def __init__(self, engine: Any, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(engine, chunks, optimizer, main_grad=main_grad)
        self._pieces = {id(parameter): piece for parameter, piece in self._layout()}
        self._is_on_host = all(parameter.device.type == "cpu" for parameter in engine.module.parameters())

    def _layout(self) -> Iterator[tuple[Tensor, SteppedPiece]]:
        """The piece of every trained parameter."""
        raise NotImplementedError

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        piece = self._pieces.get(id(parameter.tensor))
        if piece is None or piece.shard is None or kind not in SAME_AFTER_REDUCTION:
            return super().placement(kind, parameter)
        return Placement(shard=piece.shard)

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return None if piece is None else self._gradient(parameter.tensor, piece)

    def _gradient(self, parameter: Tensor, piece: SteppedPiece) -> Tensor | None:
        """The part of the reduced gradient that this rank holds, before unscaling and clipping."""
        raise NotImplementedError

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return super().weight(parameter) if piece is None else piece.weight()

    def moments(self, kinds: Sequence[str], parameter: NamedParameter, optimizer: Optimizer) -> Sequence[Tensor | None]:
        found, piece = super().moments(kinds, parameter, optimizer), self._pieces.get(id(parameter.tensor))
        return [None if piece is None else piece.of(one) for one in found]

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> SteppedTensor | None:
        piece = self._pieces.get(id(parameter.tensor))
        return None if piece is None else SteppedTensor(optimizer, piece.stepped)


def check_version(patch: CallPatch) -> None:
    """Check that an engine can be observed.

    Raises:
        ValueError: Its class lacks the methods to patch.
    """
    if not patch.fits:
        version = getattr(sys.modules.get("deepspeed"), "__version__", "unknown")
        raise ValueError(
            f"The monitor cannot observe the steps of DeepSpeed {version}: use a version that it was tested with (0.19)."
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
            "The engine of DeepSpeed does not step this optimizer: pass the engine, its `.optimizer`, or the "
            "optimizer that was given to deepspeed.initialize."
        )
    return found


def _ranks_of_expert(parameter: Any) -> Ranks:
    """The ranks that hold the same expert; empty if the parameter belongs to no expert."""
    if getattr(parameter, "allreduce", True) or not hasattr(parameter, "group_name"):
        return ()
    return ranks_in(sys.modules["deepspeed.utils.groups"]._get_expert_data_parallel_group(parameter.group_name))
