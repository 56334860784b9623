"""Megatron-core: ``DistributedDataParallel`` of its own, and optimizers around those of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.frameworks.megatron_shards import Layout, MasterWeights, members
from monitor.pytorch.frameworks.optimizer_state import Stepped
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording.backend import StepListener, StepNotifier
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import HookSet, Removable
from monitor.series import Placement

# --- Calls inside Megatron that no hook of its own tells of: the beginning of a gradient reduction, and its optimizers'
# steps.
#
# The optimizers of torch that Megatron wraps have hooks, but see gradients that were clipped, and nothing of a skipped
# step.

START_GRAD_SYNC: Final = TorchCallPatch(_ParamAndGradBucketGroup, "start_grad_sync")
STEPS: Final = tuple(
    TorchCallPatch(owner, name)
    for owner in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
    for name in ("step", "prepare_grads")
)


def check_version() -> None:
    """Raises ``ValueError`` where what has to be patched is not there."""
    for patch in (START_GRAD_SYNC, *STEPS):
        if not patch.fits:
            raise ValueError(unknown_version(f"{patch.owner.__name__} has no {patch.name}"))


def unknown_version(what: str) -> str:
    """Says that the Megatron in use is another than the one that is known."""
    import megatron.core

    version = getattr(megatron.core, "__version__", "of no known version")
    return f"megatron-core {version} cannot be observed ({what}): use a version that is known to work, such as 0.16."


# --- Local gradients under Megatron: ``main_grad``, to which its own hooks add what a backward leaves, until it is reduced.


class MainGradients(CallListener):
    """Tells of ``main_grad`` after each backward, and of the local sum when its reduction begins.

    Megatron adds in a hook behind the accumulation of each parameter's gradient; ours is called after it. With
    ``overlap_grad_reduce`` its hook begins the reduction itself, of the parameter it is called for and of others: what it has
    not been told of by then is told before.
    """

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._known = {id(one.tensor): one for one in parameters if _main_grad(one) is not None}
        self._gradients = gradients
        self._failures = failures
        self._backward: dict[NamedParameter, int] = {}
        self._hooks = HookSet()
        for one in self._known.values():
            # Gradients that are computed after backward come later than this hook, and of a frozen parameter there are none.
            if one.tensor.requires_grad and not getattr(one.tensor, "skip_backward_post_hook", False):
                self._hooks.add(self._hook(one))
        START_GRAD_SYNC.add(self)

    def remove(self) -> None:
        START_GRAD_SYNC.remove(self)
        self._hooks.remove()

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._gradients.wanted:
            self._failures.guarded("reading gradients before they are reduced", self._sync_begins)(*args, **kwargs)

    def _sync_begins(self, group: Any, *_: Any, **__: Any) -> None:
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # it has begun before, and this call is to do nothing
        within_backward = torch._C._current_graph_task_id() != -1
        for parameter in group.params:
            known = self._known.get(id(parameter))
            if known is not None:
                if within_backward:
                    self._added(known)
                self._tell(known, complete=True)

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not see into these hooks: one that held the model would keep it for ever.
        added, known = weakref.WeakMethod(self._added), weakref.ref(parameter)

        def after(*_: Any) -> None:
            living, watched = added(), known()
            if living is not None and watched is not None:
                living(watched)

        with torch.enable_grad():
            node = get_gradient_edge(parameter.tensor).node
        return node.register_hook(self._failures.guarded("reading the gradient", after, of=parameter.name))

    def _added(self, parameter: NamedParameter) -> None:
        """Megatron has added what this backward left, or is about to reduce it."""
        if not self._gradients.wanted:
            return
        backward = torch._C._current_graph_task_id()
        if self._backward.get(parameter) != backward:
            self._backward[parameter] = backward
            self._tell(parameter, complete=False)

    def _tell(self, parameter: NamedParameter, *, complete: bool) -> None:
        gradient = _main_grad(parameter)
        if gradient is not None:
            self._gradients.arrived(parameter, gradient, complete=complete)


def _main_grad(parameter: NamedParameter) -> Tensor | None:
    found: Tensor | None = getattr(parameter.tensor, "main_grad", None)
    return found


# --- When an optimizer of Megatron steps, and when it has skipped one.


class MegatronSteps(CallListener):
    """Tells a listener of the steps of Megatron's optimizer: of a chained one, of its members' together.

    Gradients are ready when ``prepare_grads`` has returned: reduced, divided by the loss scale, and not yet clipped.

    Attributes:
        optimizers: The first torch optimizer inside it, which has the turn of all; None on a rank where nothing is stepped.
    """

    evaluating = False

    def __init__(self, weights: MasterWeights, listener: StepListener, failures: Failures) -> None:
        self.optimizers: tuple[Optimizer | None] = (weights.optimizer,)
        self._weights = weights
        self._listener = listener
        self._guarded = failures.guarded
        self._stepping: Any = None
        for patch in STEPS:
            patch.add(self)

    def remove(self) -> None:
        for patch in STEPS:
            patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and self._stepping is None:
            self._guarded("reading before the step", self._begin)(args[0])

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs
        if args[0] is not self._stepping:
            return
        if patch.name == "prepare_grads":
            self._guarded("reading gradients", self._listener.gradients_ready)(*self.optimizers)
        else:
            self._guarded("ending the step", self._end)(result)

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and args[0] is self._stepping:
            self._stepping = None

    def _begin(self, optimizer: Any) -> None:
        if not self._weights.belong_to(optimizer):
            return
        self._stepping = optimizer
        if any(getattr(member, "grad_scaler", None) is not None for member in members(optimizer)):
            self._listener.loss_scale(*self.optimizers, optimizer.get_loss_scale())
        if self.optimizers != (None,):
            self._listener.before_step(*self.optimizers)

    def _end(self, result: Any) -> None:
        """Take the result of ``step``, whose first element is whether it was done."""
        self._stepping = None
        if result[0]:
            self._listener.after_step(*self.optimizers)
        else:
            self._listener.step_skipped(*self.optimizers)


MEAN: Final = "a rank's own sum over its micro-batches; their mean over the data- and context-parallel ranks is grad_reduced"
PER_TOKEN: Final = (
    "a rank's own sum over its micro-batches; their sum over the data- and context-parallel ranks, divided by the number of "
    "tokens, is grad_reduced"
)
REDUCED: Final = "divided by the loss scale, before clipping"
TIED: Final = "of an embedding that is tied over pipeline stages the sum over these, too"
EXPERTS: Final = (
    "of experts the sum over the ranks that have the same, divided by the number of all data- and context-parallel ranks; each "
    "expert-parallel rank has experts of its own under the same names"
)
DECOUPLED: Final = "missing: a precision-aware optimizer keeps them in a form of its own"


class Megatron(Framework):
    """Model chunks inside Megatron's DistributedDataParallel, stepped by one of its optimizers or by a chained one."""

    name = "megatron"
    tells_twice = True

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, None, main_grad=main_grad)
        check_version()
        self._weights = MasterWeights(optimizer)
        self.optimizers = () if self._weights.optimizer is None else (self._weights.optimizer,)
        self._wrappers = list(dict.fromkeys(_wrappers(chunks, self._weights.given)))
        if not self._wrappers:
            raise ValueError(
                "No chunk of the model is inside DistributedDataParallel of megatron.core: pass the chunks as they are after "
                "it has wrapped them, and with Megatron's optimizers use no other wrapper (Megatron-FSDP is not observed)."
            )
        try:
            self._layout = Layout(dist.get_rank(), self._wrappers)
        except (AttributeError, KeyError) as error:
            raise ValueError(unknown_version(f"DistributedDataParallel keeps things elsewhere: {error}")) from error

    def groups(self) -> Mapping[str, Sequence[int]]:
        return self._layout.groups()

    def notes(self) -> Mapping[str, str]:
        parameters = [p for wrapper in self._wrappers for p in wrapper.module.parameters()]
        per_token = any(wrapper.config.calculate_per_token_loss for wrapper in self._wrappers)
        special = [TIED] if any(getattr(p, "shared_embedding", False) for p in parameters) else []
        special += [EXPERTS] if any(not getattr(p, "allreduce", True) for p in parameters) else []
        notes = {"grad_unreduced": PER_TOKEN if per_token else MEAN, "grad_reduced": "; ".join([REDUCED, *special])}
        return notes | ({"param_origin": DECOUPLED, "exp_avg": DECOUPLED} if self._decoupled() else {})

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        return self._layout.placement(kind, parameter)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return MainGradients(parameters, gradients, failures)

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        return None if stepped is None else stepped.gradient

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """Its schedules do, before the step."""
        del parameter
        return True

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        if stepped is not None:
            return None if stepped.decoupled else stepped.tensor
        # Of one that is reduced, another rank steps this part; one that is not stays as it is.
        return parameter.tensor if self._weights.known and not parameter.tensor.requires_grad else None

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> Stepped | None:
        del optimizer  # of a chained one the first
        found = self._weights.of(parameter.tensor)
        return None if found is None or found.decoupled else Stepped(found.optimizer, found.tensor)

    def held(self, optimizer: Any) -> None:
        """Of a chained one every member steps at once; what each of them steps, ``weight`` knows."""
        del optimizer

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        return MegatronSteps(self._weights, listener, failures)

    def _decoupled(self) -> bool:
        stepped = (self._weights.of(p) for chunk in self.chunks for p in chunk.parameters())
        return any(one is not None and one.decoupled for one in stepped)


def _wrappers(chunks: Sequence[nn.Module], optimizer: Any) -> Iterator[DistributedDataParallel]:
    """What wraps the chunks; of chunks that were passed without it, what the optimizer knows."""
    yield from (module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel))
    for member in members(optimizer):
        yield from (one for one in getattr(member, "model_chunks", ()) if isinstance(one, DistributedDataParallel))
