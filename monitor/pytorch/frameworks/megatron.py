"""Megatron-core: models in its own ``DistributedDataParallel``, stepped by its optimizers around those of torch."""

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
from monitor.pytorch.frameworks.megatron_shards import MasterWeights, MegatronLayout, members
from monitor.pytorch.frameworks.optimizer_state import SteppedTensor
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording.backend import HookSet, Removable, StepListener, StepNotifier
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener, CallPatch
from monitor.series import Placement

# --- Patches of calls inside Megatron for which it has no hooks: the beginning of a gradient reduction, and its optimizers'
# steps. The wrapped torch optimizers have hooks, but these run after clipping and not in a skipped step.

START_GRAD_SYNC: Final = TorchCallPatch(_ParamAndGradBucketGroup, "start_grad_sync")
STEPS: Final = tuple(
    TorchCallPatch(owner, name)
    for owner in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
    for name in ("step", "prepare_grads")
)


def check_version() -> None:
    """Raises ``ValueError`` if a method to be patched is missing."""
    for patch in (START_GRAD_SYNC, *STEPS):
        if not patch.fits:
            raise ValueError(unknown_version(f"{patch.owner.__name__} has no {patch.name}"))


def unknown_version(what: str) -> str:
    """The message that this version of Megatron is unknown."""
    import megatron.core

    version = getattr(megatron.core, "__version__", "of no known version")
    return f"The monitor cannot observe megatron-core {version} ({what}): use a version that is known to work, such as 0.16."


# --- Local gradients under Megatron: its hooks add each backward's gradient to ``main_grad``, until it is reduced.


class MainGradients(CallListener):
    """Reports ``main_grad`` after each backward, and the local sum when its reduction begins.

    Megatron adds in a hook after the accumulation of each parameter's gradient; the monitor's hook runs after it. With
    ``overlap_grad_reduce`` Megatron's hook itself begins the reduction, for its parameter and others. Gradients not reported by
    then are reported before the reduction.
    """

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._known = {id(one.tensor): one for one in parameters if _main_grad(one) is not None}
        self._gradients = gradients
        self._failures = failures
        self._backward: dict[NamedParameter, int] = {}
        self._hooks = HookSet()
        for one in self._known.values():
            # Gradients computed after backward come later than this hook; a frozen parameter has none.
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
            return  # the reduction has begun already: this call does nothing
        within_backward = torch._C._current_graph_task_id() != -1
        for parameter in group.params:
            known = self._known.get(id(parameter))
            if known is not None:
                if within_backward:
                    self._added(known)
                self._report(known, complete=True)

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not traverse these hooks: a strong reference would leak the model.
        added, known = weakref.WeakMethod(self._added), weakref.ref(parameter)

        def after(*_: Any) -> None:
            living, watched = added(), known()
            if living is not None and watched is not None:
                living(watched)

        with torch.enable_grad():
            node = get_gradient_edge(parameter.tensor).node
        return node.register_hook(self._failures.guarded("reading the gradient", after, of=parameter.name))

    def _added(self, parameter: NamedParameter) -> None:
        """Megatron has added this backward's gradient, or is about to reduce it."""
        if not self._gradients.wanted:
            return
        backward = torch._C._current_graph_task_id()
        if self._backward.get(parameter) != backward:
            self._backward[parameter] = backward
            self._report(parameter, complete=False)

    def _report(self, parameter: NamedParameter, *, complete: bool) -> None:
        gradient = _main_grad(parameter)
        if gradient is not None:
            self._gradients.arrived(parameter, gradient, complete=complete)


def _main_grad(parameter: NamedParameter) -> Tensor | None:
    found: Tensor | None = getattr(parameter.tensor, "main_grad", None)
    return found


# --- Steps and skipped steps of Megatron's optimizers.


class MegatronSteps(CallListener):
    """Reports the steps of Megatron's optimizer to a listener. A chained optimizer's members step together.

    Gradients are ready when ``prepare_grads`` has returned: reduced, divided by the loss scale, and not yet clipped.

    Attributes:
        optimizers: The first torch optimizer inside it, which represents all; None on a rank where nothing is stepped.
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


MEAN: Final = (
    "a rank's own sum over its micro-batches; grad_reduced is the mean of these over the data- and context-parallel ranks"
)
PER_TOKEN: Final = (
    "a rank's own sum over its micro-batches; grad_reduced is the sum of these over the data- and context-parallel ranks, "
    "divided by the number of tokens"
)
REDUCED: Final = "divided by the loss scale, before clipping"
TIED: Final = "for an embedding that is tied over pipeline stages also summed over these stages"
EXPERTS: Final = (
    "for experts the sum over the ranks with the same expert, divided by the number of all data- and context-parallel ranks; "
    "each expert-parallel rank has experts of its own under the same names"
)
DECOUPLED: Final = "missing: a precision-aware optimizer keeps them in its own format"


class Megatron(Framework):
    """Model chunks inside Megatron's DistributedDataParallel, stepped by one of its optimizers, possibly a chained one."""

    name = "megatron"
    reports_twice = True

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, None, main_grad=main_grad)
        check_version()
        self._weights = MasterWeights(optimizer)
        self.optimizers = () if self._weights.optimizer is None else (self._weights.optimizer,)
        self._wrappers = list(dict.fromkeys(_wrappers(chunks, self._weights.given)))
        if not self._wrappers:
            raise ValueError(
                "No chunk of the model is inside DistributedDataParallel of megatron.core: pass the chunks after it has "
                "wrapped them. Megatron's optimizers are not observed with another wrapper, such as Megatron-FSDP."
            )
        try:
            self._layout = MegatronLayout(dist.get_rank(), self._wrappers)
        except (AttributeError, KeyError) as error:
            raise ValueError(unknown_version(f"DistributedDataParallel lacks an attribute: {error}")) from error

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
        """Megatron's schedules reduce gradients before the step."""
        del parameter
        return True

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        if stepped is not None:
            return None if stepped.decoupled else stepped.tensor
        # If the parameter is trained, another rank steps it. If not, the weight stays in place.
        return parameter.tensor if self._weights.known and not parameter.tensor.requires_grad else None

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> SteppedTensor | None:
        del optimizer  # the first one of a chain
        found = self._weights.of(parameter.tensor)
        return None if found is None or found.decoupled else SteppedTensor(found.optimizer, found.tensor)

    def held(self, optimizer: Any) -> None:
        """None for all: members of a chained optimizer step together."""
        del optimizer

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        return MegatronSteps(self._weights, listener, failures)

    def _decoupled(self) -> bool:
        stepped = (self._weights.of(p) for chunk in self.chunks for p in chunk.parameters())
        return any(one is not None and one.decoupled for one in stepped)


def _wrappers(chunks: Sequence[nn.Module], optimizer: Any) -> Iterator[DistributedDataParallel]:
    """The wrappers of the chunks; if chunks were passed unwrapped, those that the optimizer references."""
    yield from (module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel))
    for member in members(optimizer):
        yield from (one for one in getattr(member, "model_chunks", ()) if isinstance(one, DistributedDataParallel))
