"""What all optimizers of DeepSpeed have in common. Without ZeRO and in full precision there is nothing else to know."""

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
from monitor.pytorch.frameworks.optimizer_state import Stepped
from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.optimizer_steps import innermost
from monitor.pytorch.process_group import group_ranks
from monitor.recording.backend import StepListener
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import MAX_WRAPPERS, HookSet
from monitor.series import Placement, Ranks, Shard, ranks_of

# --- Which engine of DeepSpeed trains a model. Nothing of DeepSpeed is imported: what is in use has been.

DEFINES_ENGINE: Final = "deepspeed.runtime.engine"


def engine_class() -> Any:
    """The class of all engines; None where DeepSpeed is not in use."""
    return getattr(sys.modules.get(DEFINES_ENGINE), "DeepSpeedEngine", None)


def engine_of(chunks: Sequence[nn.Module], optimizer: Any) -> Any:
    """The engine that trains ``chunks``, which may be the engine or the module that was given to it.

    Returns:
        None where it is not DeepSpeed that trains them.

    Raises:
        ValueError: It is, and the engine cannot be found, or there are several.
    """
    of = engine_class()
    if of is None:
        return None
    modules = (module for chunk in chunks for module in chunk.modules())
    found = {id(one): one for part in (*modules, *_wrappers(optimizer)) for one in _engines_behind(part, of)}
    if len(found) > 1:
        raise ValueError("model and optimizer belong to several engines of DeepSpeed: call set_monitor once for each engine.")
    if not found and (any(map(_is_deepspeeds, _wrappers(optimizer))) or _is_partitioned(chunks)):
        raise ValueError(
            "The model is trained by DeepSpeed, and its engine cannot be found: call set_monitor after deepspeed.initialize, "
            "and pass the engine that it returned as the model."
        )
    return next(iter(found.values()), None)


def ranks_in(group: Any) -> Ranks:
    """The ranks of a process group as DeepSpeed keeps it."""
    return ranks_of(group_ranks("a process group of DeepSpeed", group) or ())


def _engines_behind(part: Any, of: type) -> Iterator[Any]:
    if isinstance(part, of):
        yield part
    # An engine prepares each forward of its module by a hook, and the module does not know it otherwise.
    for hook in part._forward_pre_hooks.values() if isinstance(part, nn.Module) else ():
        if getattr(hook, "__module__", None) == DEFINES_ENGINE:
            yield from (cell.cell_contents for cell in hook.__closure__ or () if isinstance(cell.cell_contents, of))


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """What a user passed, and what it wraps, down to the torch optimizer."""
    for _ in range(MAX_WRAPPERS):
        if optimizer is None or isinstance(optimizer, Optimizer):
            return
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _is_deepspeeds(wrapper: Any) -> bool:
    return type(wrapper).__module__.partition(".")[0] == "deepspeed"


def _is_partitioned(chunks: Sequence[nn.Module]) -> bool:
    """Whether ZeRO has taken over parameters, and not been destroyed since."""
    parameters = (p for chunk in chunks for p in chunk.parameters())
    return any(hasattr(p, "ds_id") or getattr(p, "_hp_mapping", None) is not None for p in parameters)


# --- By what the gradients of an engine of DeepSpeed are multiplied until its optimizer divides by it.


def loss_scale_of(engine: Any) -> Tensor | None:
    """The scale of the loss that gradients were computed from, one element; None where it was not scaled."""
    scaler = grad_scaler_of(engine)
    if scaler is not None:
        scale: Tensor | None = scaler._scale
        return scale
    return torch.tensor(float(engine.optimizer.loss_scale)) if _scales(engine) else None


def is_scaled(engine: Any) -> bool:
    """Whether gradients are multiplied by a loss scale until the optimizer's step."""
    return grad_scaler_of(engine) is not None or _scales(engine)


def grad_scaler_of(engine: Any) -> Any:
    """The GradScaler that scales and skips for an engine: it has one where torch's autocast computes in float16."""
    without_zero = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None) if without_zero is None else without_zero


def _scales(engine: Any) -> bool:
    # An engine that knows how to scale a loss leaves it to ZeRO's optimizers: without ZeRO, float16 is divided by a scale that
    # nothing was multiplied by. Older engines had every optimizer of DeepSpeed's multiply the loss itself.
    if hasattr(type(engine), "scale") and not hasattr(engine.optimizer, "scale_if_loss"):
        return False
    dynamic = bool(getattr(engine.optimizer, "dynamic_loss_scale", False))
    return dynamic or float(getattr(engine.optimizer, "loss_scale", 1.0)) != 1.0


# --- Seeing what an engine of DeepSpeed is about to do, and that it has done it.
#
# Neither the engine nor its optimizers have hooks. They are no torch optimizers: they may step the one inside several
# times or not at all, and have unscaled and clipped by then. So two methods of the engine's class are patched.

STEP_PATCH: Final = TorchCallPatch(engine_class(), "_take_model_step")
"""Called once where a step ends, after aggregation and before unscaling and clipping, whatever the stage."""

REDUCE_PATCH: Final = TorchCallPatch(engine_class(), "allreduce_gradients")
"""Called after every backward, before anything is aggregated."""

# --- When an engine of DeepSpeed steps: once where it ends an accumulation, however often the torch optimizer inside is
# called.


class EngineSteps(CallListener):
    """Tells a listener of the steps of one engine.

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
            self._guarded("reading the loss scale", self._tell_scale)()
            self._guarded("reading before the step", self._listener.before_step)(self._stepped)
            self._guarded("reading gradients", self._listener.gradients_ready)(self._stepped)

    def call_ended(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs, result
        if args[0] is self._engine:
            self._guarded("ending the step", self._ended)()

    def _ended(self) -> None:
        if self._engine.was_step_applied() and (self._called or grad_scaler_of(self._engine) is None):
            self._listener.after_step(self._stepped)
        else:
            self._listener.step_skipped(self._stepped)

    def _is_called(self, *_: Any) -> None:
        self._called = True

    def _tell_scale(self) -> None:
        scale = loss_scale_of(self._engine)
        if scale is not None:
            self._listener.loss_scale(self._stepped, scale)


# --- Which run of elements of a parameter this rank's torch optimizer steps, and where: ZeRO has it step long flat tensors.


@dataclass(frozen=True, slots=True)
class Piece:
    """What the torch optimizer of this rank steps of one parameter.

    Attributes:
        stepped: The tensor that the optimizer knows.
        start: Where in ``stepped``, flattened, the piece begins.
        numel: Its elements, without what pads ``stepped``; 0 where other ranks step all of the parameter.
        shape: Of the parameter.
        shard: Where in the parameter the piece lies; None where it is all of it.
        group: Which of the rank's flat tensors ``stepped`` is.
        index: Which of the pieces of ``stepped`` this one is.
    """

    stepped: Tensor
    start: int
    numel: int
    shape: tuple[int, ...]
    shard: Shard | None = None
    group: int = 0
    index: int = 0

    def weight(self) -> Tensor | None:
        """None while its memory is elsewhere (swapped out, offloaded)."""
        return self.of(self.stepped)

    def of(self, whole: Tensor | None) -> Tensor | None:
        """The piece of a tensor that is laid out as ``stepped`` is; None of any other."""
        if whole is None or whole.numel() != self.stepped.numel() or self.start + self.numel > whole.numel():
            return None
        whole = whole.detach()
        return whole if whole.shape == self.shape else self.shaped(whole.view(-1).narrow(0, self.start, self.numel))

    def shaped(self, elements: Tensor) -> Tensor | None:
        """Elements of the parameter as they are recorded; None where there are none, or others than the piece's."""
        if self.numel == 0 or elements.numel() != self.numel:
            return None
        return elements.reshape(self.shape if self.shard is None else -1)


def flat_shard(ranks: Ranks, shape: tuple[int, ...], start: int, numel: int) -> Shard | None:
    """The part of a parameter that begins at element ``start``; None where one rank has it whole, for nobody else does."""
    if len(ranks) <= 1 and numel == math.prod(shape):
        return None
    return Shard(ranks, shape, (start,) if numel else (), flat=True)


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
