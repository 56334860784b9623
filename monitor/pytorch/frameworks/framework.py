"""The interface of a framework: where gradients, weights and moments of a parameter are, and their placement over ranks. The
base class answers for plain PyTorch.

A subclass for another framework overrides only the methods that differ.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION, alike_over
from monitor.failures import Failures
from monitor.pytorch.autograd import nesting
from monitor.pytorch.frameworks.dtensor import Layout, Meshes, layouts_of, mesh_groups, mesh_ranks, placement_of
from monitor.pytorch.frameworks.optimizer_state import MomentFinder, SteppedTensor, is_redundant, placement_from_moments
from monitor.pytorch.hooks import NO_BACKWARD, runs_backward
from monitor.pytorch.optimizer_steps import OptimizerSteps, containers_in, optimizers_in, wrappers_in
from monitor.pytorch.process_group import group_ranks
from monitor.recording.arguments import only
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import Removable, StepListener, StepNotifier
from monitor.series import LOCAL, Placement, Ranks, ranks_of


class LocalGradients(Protocol):
    """Takes local gradients as backward completes them, before any rank adds to them."""

    @property
    def wanted(self) -> bool:
        """Whether gradients are read now. Check it first: a step that is not collected must cost nothing."""

    def arrived(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool) -> None:
        """Read ``gradient``, which may change or be freed as soon as this returns.

        Args:
            complete: Whether it is the sum over the whole step, so that its row can be written without counting micro-batches.
                Otherwise one backward left it.
        """


class Framework:
    """Plain PyTorch, with or without DistributedDataParallel and DTensors.

    Every method uses local information: it issues no collective and waits for no device.

    Attributes:
        name: Its name in messages and the manifest.
        chunks: The model as given to ``set_monitor``.
        optimizers: The torch optimizers that do the work; empty until one is found that steps the model.
        unusable_state: Sentences about optimizer state that is no moment of one parameter.
        reports_twice: Whether ``catch_unreduced`` reports a gradient after each backward, and again when it is complete.
        loses_gradients: Whether gradients are cleared or overwritten before a step has ended.
        clips_in_step: Whether gradients are clipped after they were reported as ready.
        reads_before_clipping: Whether a step begins before clipping: gradients that changed since backward were then only
            reduced.
        accumulating: The call that keeps gradients of several micro-batches together, where backward otherwise reduces each.
    """

    name = "torch"
    accumulating = ""
    reports_twice = False
    loses_gradients = False
    clips_in_step = False
    reads_before_clipping = False

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        """Take a model and its optimizers as the user passed them.

        Args:
            main_grad: Whether the user says that gradients are kept in ``main_grad``.

        Raises:
            TypeError: The framework does not know an optimizer.
            ValueError: The model is set up in a way that cannot be observed. The message says what to change.
        """
        self.chunks = chunks
        self.optimizers: Sequence[Optimizer] = () if optimizer is None else optimizers_in(optimizer)
        self._containers = tuple(containers_in(optimizer))
        self._around = dict(wrappers_in(optimizer))
        self._moments = MomentFinder()
        self._stepped: dict[int, SteppedTensor] = {}
        self._groups: dict[int, tuple[Sequence[Tensor], frozenset[int]]] = {}
        self._main_grad = main_grad
        self._data_parallel = {id(p): alike for p, alike in _data_parallel(chunks)}
        self._reducers = Reducers(chunks)
        self._model_ranks: dict[int, Ranks] = {}
        self._meshes: Meshes | None = None

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that are visible in the model, by role: ``dp``, ``tp``, ``pp``, ``ep``, ``cp``, or a mesh's
        own names. Groups that the user passed take precedence. If wrappers of the model have other ranks than each other, none
        of them is the model's ``dp``.
        """
        replicas = {ranks for wrapper in _wrappers_in(self.chunks) if (ranks := _replicated_over(wrapper))}
        named = {"dp": replicas.pop()} if len(replicas) == 1 else {}
        return {**named, **mesh_groups(p for chunk in self.chunks for p in chunk.parameters())}

    def notes(self) -> Mapping[str, str]:
        """Notes for readers of the numbers, for the manifest, by kind or topic."""
        return {}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        """The placement of this rank's numbers of a parameter, without the user's groups."""
        found = placement_of(parameter.tensor)
        if found is None:
            found = placement_from_moments(kind, self.optimizers, parameter.tensor)
        if found is not None:
            return found
        return self._data_parallel.get(id(parameter.tensor), LOCAL) if kind in SAME_AFTER_REDUCTION else LOCAL

    def completed(self, kind: str, parameter: NamedParameter, placed: Placement, *, around: bool) -> Placement:
        """``placed``, with the replicas of DTensors inside DistributedDataParallel, and those assumed from meshes."""
        if self._meshes is None:
            self._meshes = Meshes(self._layouts())
        apart = self._apart(kind, parameter)
        wrapped = self._data_parallel.get(id(parameter.tensor), LOCAL) if kind in SAME_AFTER_REDUCTION else LOCAL
        found, others = _with_replicas(placed, wrapped.unclaimed, apart), {*apart, *wrapped.differing}
        return self._meshes.assumed(kind, found, others, around=around)

    def _layouts(self) -> Iterable[Layout]:
        """Layouts of the parameters that are DTensors."""
        return layouts_of(p for chunk in self.chunks for p in chunk.parameters())

    def _apart(self, kind: str, parameter: NamedParameter) -> Collection[int]:
        """Ranks that hold other numbers under the name of the parameter."""
        return self.placement(kind, parameter).differing

    def catch_unreduced(
        self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures
    ) -> Removable | None:
        """Report every wanted local gradient to ``gradients``.

        Returns:
            A handle that ends it. None if hooks on the parameters suffice, which the caller adds.
        """
        del parameters, gradients, failures
        return None

    def catches(self, parameter: NamedParameter) -> bool:
        """Whether ``catch_unreduced``, if it returns a handle, reports this parameter. The caller hooks the others."""
        del parameter
        return True

    def begin_step(self) -> None:
        """A step begins that is collected."""
        self._reducers.begin_step()

    def forward_begins(self) -> None:
        """A training forward of a chunk begins, maybe within one of a wrapper that is not among ``wrappers``."""
        self._reducers.forward_begins()

    @property
    def wrappers(self) -> Iterator[nn.Module]:
        """The chunks, and modules inside them, that are DistributedDataParallel. A chunk need not call those inside it, and a
        training loop may call them instead.
        """
        return _wrappers_in(self.chunks)

    def wrapper_begins(self, wrapper: nn.Module) -> None:
        """A forward of one of the ``wrappers`` begins, with gradients enabled. It shows whether gradients will be reduced."""
        self._reducers.wrapper_begins(wrapper)

    def wrapper_prepared(self, module: nn.Module) -> None:
        """A pipeline's schedule has the next backward of ``module`` reduce gradients, if it is one of the ``wrappers``."""
        self._reducers.wrapper_prepared(module)

    @property
    def follows_backward(self) -> bool:
        """Whether ``backward_reaches`` must be called for gradients."""
        return self._reducers.any_known

    def backward_reaches(self, parameter: NamedParameter) -> None:
        """A backward has added to a gradient, which is not reduced yet."""
        self._reducers.backward_reaches(parameter.tensor)

    def reduced_before(self, parameter: NamedParameter) -> bool:
        """Whether a wrapper reduced the gradient in the backward of the step before the one that has reached it last."""
        return self._reducers.reduced_before(parameter.tensor)

    def replaces_gradients(self, parameter: NamedParameter) -> bool:
        """Whether a wrapper may put another tensor with the same numbers in the place of a gradient."""
        return self._reducers.replace(parameter.tensor)

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """Whether the gradient is reduced over all ranks that share the parameter, when the optimizer's step begins.

        Returns:
            None if this framework does not reduce it: the training loop may have, which is observed.
        """
        placed = self._data_parallel.get(id(parameter.tensor))
        if placed is not None and placed.differing:
            return True  # each rank has its own parameter
        return self._reducers.reduced(parameter.tensor)

    def model_ranks(self, parameter: NamedParameter) -> Ranks:
        """Ranks that hold parts of the same model: the mesh of a DTensor, and for a plain parameter the model's largest mesh.

        The placements of a DTensor's gradient show whether it is a term of a sum over these ranks.
        """
        found = self._model_ranks.get(id(parameter.tensor))
        if found is None:
            own = mesh_ranks(parameter.tensor)
            found = self._model_ranks[id(parameter.tensor)] = own or self._largest_mesh()
        return found

    def _largest_mesh(self) -> Ranks:
        found = (mesh_ranks(p) for chunk in self.chunks for p in chunk.parameters())
        return max(found, key=len, default=())

    def local_gradient(self, tensor: Any) -> Tensor | None:
        """The gradient that backward has left, for the hook of a parameter."""
        gradient: Tensor | None = tensor.grad
        # A framework with main_grad may have moved the gradient there.
        return getattr(tensor, "main_grad", None) if gradient is None and self._main_grad else gradient

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        """This rank's part of the reduced gradient when the step begins; None if it holds none."""
        main_grad: Tensor | None = getattr(parameter.tensor, "main_grad", None) if self._main_grad else None
        return parameter.tensor.grad if main_grad is None else main_grad

    def used_gradient(self, parameter: NamedParameter) -> Tensor | None:
        """The gradient from which the optimizer has computed the step that it has just made: unscaled and clipped. None if it
        is not there any more.
        """
        return None if self.loses_gradients else self.reduced(parameter)

    weight: Callable[[NamedParameter], Tensor | None] = attrgetter("tensor")
    """This rank's part of the weight that the optimizer steps: the master weight, if there is one."""

    def moments(self, kinds: Sequence[str], parameter: NamedParameter, optimizer: Optimizer) -> Sequence[Tensor | None]:
        """This rank's part of each moment.

        Args:
            optimizer: The torch optimizer that is about to step.
        """
        stepped = self.stepped(parameter, optimizer)
        return [None] * len(kinds) if stepped is None else self._moments.of(kinds, stepped)

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> SteppedTensor | None:
        """The tensor that is stepped for a parameter, possibly a part of it; None if there is none, or it is unknown.

        Args:
            optimizer: The torch optimizer that steps.
        """
        known = self._stepped.get(id(parameter.tensor))
        if known is not None and known.optimizer is optimizer:
            return known
        if is_redundant(optimizer):
            return self._stepped_here(parameter, optimizer)
        found = self._stepped[id(parameter.tensor)] = SteppedTensor(optimizer, parameter.tensor)
        return found

    def _stepped_here(self, parameter: NamedParameter, optimizer: Any) -> SteppedTensor | None:
        """``stepped`` for a ``ZeroRedundancyOptimizer``: None if another rank steps the parameter."""
        known, own = self._stepped.get(id(parameter.tensor)), getattr(optimizer, "optim", None)
        if known is not None and known.optimizer is own:
            return known
        if not isinstance(own, Optimizer) or optimizer._param_to_rank.get(parameter.tensor) != optimizer.rank:
            return None
        found = self._stepped[id(parameter.tensor)] = SteppedTensor(own, parameter.tensor)
        return found

    @property
    def unusable_state(self) -> Sequence[str]:
        return self._moments.unusable

    def held(self, optimizer: Any) -> Collection[int] | None:
        """The ids of the parameters that an optimizer steps; None for all. Unchanged ids give the same object."""
        now = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        known = self._groups.get(id(optimizer))
        if known is None or len(known[0]) != len(now) or not all(map(is_, known[0], now)):
            known = self._groups[id(optimizer)] = now, frozenset(map(id, now))
        return known[1]

    def learning_rates(self, optimizer: Any) -> Sequence[Any]:
        """The learning rate of each parameter group, a number or a tensor; None for a group that has none."""
        return [group.get("lr") for group in optimizer.param_groups]

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        """Report every step to ``listener`` from now on."""
        return OptimizerSteps(self.optimizers, self.chunks, listener, failures, self._containers, self._around)


def _with_replicas(placed: Placement, ranks: Ranks, apart: Collection[int]) -> Placement:
    """``placed``, with ``ranks`` as further replicas."""
    cut = set(placed.shard.ranks if placed.shard else ())
    if placed.partial or {*placed.replicas, *placed.unclaimed}.issuperset(ranks):
        return placed
    rank = dist.get_rank()
    if not (cut.union(apart) - {rank}).isdisjoint(ranks):
        return placed
    alike = alike_over(rank, [group for group in (placed.replicas, placed.unclaimed, ranks) if group])
    return replace(placed, unclaimed=alike)


def _replicated_over(wrapper: DistributedDataParallel) -> Ranks:
    return ranks_of(group_ranks("the group of DistributedDataParallel", wrapper.process_group) or ())


def _wrappers_in(chunks: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    yield from (one for chunk in chunks for one in chunk.modules() if isinstance(one, DistributedDataParallel))


def _data_parallel(chunks: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, Placement]]:
    """The parameters inside DistributedDataParallel, each with its placement after reduction.

    Ignored parameters are each rank's own, unless the wrapper reduces them later than the others.
    """
    for wrapper in _wrappers_in(chunks):
        ranks = _replicated_over(wrapper)
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        delayed = set(map(id, getattr(wrapper, "_delay_all_reduce_params", ())))
        for name, parameter in wrapper.module.named_parameters() if len(ranks) > 1 else ():
            is_own = name in ignored and id(parameter) not in delayed
            yield parameter, Placement(differing=ranks) if is_own else Placement(unclaimed=ranks)


# --- Recognises the framework of a model and its optimizer.


def framework_of(chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> Framework:
    """The adapter of the framework that keeps the gradients, weights and moments of a model.

    Does not import frameworks: one in use is imported already.

    Raises:
        TypeError: The optimizer cannot be observed.
        ValueError: The model is set up in a way that cannot be observed.
    """
    optimizer = only(optimizer)
    if "deepspeed.runtime.engine" in sys.modules:
        from monitor.pytorch.frameworks.deepspeed_zero import deepspeed_of

        if (found := deepspeed_of(chunks, optimizer, main_grad=main_grad)) is not None:
            return found
    if _any_is(chunks, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"):
        from monitor.pytorch.frameworks.fsdp1 import Fsdp1

        return Fsdp1(chunks, optimizer, main_grad=main_grad)
    if _any_is(chunks, "torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"):
        from monitor.pytorch.frameworks.fsdp2 import Fsdp2

        return Fsdp2(chunks, optimizer, main_grad=main_grad)
    if _any_is(chunks, "torch.distributed._composable.fsdp.fully_shard", "FSDPModule"):
        raise ValueError("The monitor does not know fully_shard of this version of torch: use torch 2.6 or later.")
    if _any_is(chunks, "megatron.core.distributed", "DistributedDataParallel") or _is_megatron_optimizer(optimizer):
        from monitor.pytorch.frameworks.megatron import Megatron

        return Megatron(chunks, optimizer, main_grad=main_grad)
    return Framework(chunks, optimizer, main_grad=main_grad)


def _is_megatron_optimizer(optimizer: Any) -> bool:
    of = getattr(sys.modules.get("megatron.core.optimizer"), "MegatronOptimizer", None)
    return of is not None and isinstance(optimizer, of)


def _any_is(chunks: Sequence[nn.Module], imported: str, name: str) -> bool:
    """Whether a module is of the class ``name`` in the Python module ``imported``, if that is imported."""
    of = getattr(sys.modules.get(imported), name, None)
    return of is not None and any(isinstance(module, of) for chunk in chunks for module in chunk.modules())


# --- Tracks which gradients DistributedDataParallel has reduced when the optimizer's step begins.
#
# A forward of the wrapper outside ``no_sync`` prepares its reducer, which reduces at the end of the next backward. The
# schedule of a pipeline may prepare it, too. A gradient is reduced if the last backward that added to it did so. If a loop
# calls the module inside the wrapper, or a forward is not observed, that is unknown.

REDUCE_NOTHING: Final = frozenset({"noop_hook", "post_localSGD_hook"})
"""Communication hooks of torch that leave gradients local, or average them over some ranks only."""


class _Reducer:
    """The reducer of one wrapper.

    Attributes:
        ready: Whether the next backward will reduce.
        reduced: Whether the last backward has reduced; None if none was seen.
        reduced_before: Whether the one before it in the step has, or may have.
        backward: The backward that was seen last: the last one, or one that is nested in it.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)
        self.ready = self._by_schedule = self._warms_up = False
        self.reduced: bool | None = None
        self.reduced_before = self._ready_in_step = False
        self.backward = NO_BACKWARD
        self._latest = NO_BACKWARD

    def forward_begins(self) -> None:
        self.ready = self.ready or bool(getattr(self._module(), "require_backward_grad_sync", False))
        self._latest = NO_BACKWARD

    def prepared(self) -> None:
        self.ready = self._by_schedule = True
        self._latest = NO_BACKWARD

    def begin_step(self) -> None:
        self.reduced_before = self._ready_in_step = False

    def backward_reaches(self, backward: int) -> None:
        """Another backward than ``backward`` has reached a parameter."""
        self.backward = backward
        if not self._continues(backward):
            self.reduced_before, self._ready_in_step = self._ready_in_step, self.ready
            self.reduced = self.is_ready
            self.ready = self._by_schedule = False
            self._warms_up = any(_warms_up(state, self._module()) for _, state in self._hooks)
        self._latest = max(self._latest, backward)

    def _continues(self, backward: int) -> bool:
        """Whether a backward contains the last one, or is nested in it, as reentrant checkpointing has it.

        Autograd numbers backwards as they begin. So one with a lower number has not ended since. Between the last one and one
        nested in it, only those begin that are nested around it: otherwise another backward may have begun.
        """
        return backward <= self._latest or backward - self._latest <= nesting()

    @property
    def is_ready(self) -> bool:
        """Whether a schedule prepared it, or an observed forward, and the wrapper's flag agrees. The flag alone proves nothing:
        it is set from the beginning.
        """
        return self._by_schedule or (self.ready and bool(getattr(self._module(), "require_forward_param_sync", False)))

    @property
    def makes_views(self) -> bool:
        return bool(getattr(self._module(), "gradient_as_bucket_view", False))

    @property
    def leaves_local(self) -> bool:
        """Whether a communication hook has left the gradients of the last backward local."""
        return not self._warms_up and any(getattr(hook, "__name__", "") in REDUCE_NOTHING for hook, _ in self._hooks)

    @property
    def _hooks(self) -> Sequence[tuple[Any, Any]]:
        """The communication hooks of the wrapper, and their states."""
        return getattr(self._module(), "_comm_hooks", ())


def _warms_up(state: Any, module: Any) -> bool:
    """Whether a hook of local SGD, which has not run in the backward in progress, will average over all ranks."""
    of_all = getattr(state, "process_group", None) in (None, getattr(module, "process_group", None))
    return of_all and bool(getattr(state, "iter", 0) < getattr(state, "start_localSGD_iter", 0))


class Reducers:
    """The reducers of a model: of wrappers inside it, and of wrappers whose forward calls it."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._known: dict[int, _Reducer] = {}
        self._of: dict[int, _Reducer] = {}
        for wrapper in _wrappers_in(chunks):
            self._learn(wrapper)

    @property
    def any_known(self) -> bool:
        """Whether any wrapper is known."""
        return bool(self._of)

    def begin_step(self) -> None:
        for one in self._known.values():
            one.begin_step()

    def forward_begins(self) -> None:
        """A forward of a chunk begins, with gradients enabled, maybe within one of a wrapper."""
        around = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if around is not None:
            if id(around) not in self._known:
                self._learn(around)
            self.wrapper_begins(around)

    def wrapper_begins(self, wrapper: nn.Module) -> None:
        self._known[id(wrapper)].forward_begins()

    def wrapper_prepared(self, module: nn.Module) -> None:
        if (one := self._known.get(id(module))) is not None:
            one.prepared()

    def backward_reaches(self, parameter: Tensor) -> None:
        one = self._of.get(id(parameter))
        if one is not None and one.backward != (backward := torch._C._current_graph_task_id()):
            one.backward_reaches(backward)

    def reduced(self, parameter: Tensor) -> bool | None:
        """Whether a gradient is reduced; None if no wrapper reduces the parameter."""
        one = self._of.get(id(parameter))
        if one is None:
            return None
        if one.leaves_local:
            return None  # the training loop may reduce it
        if runs_backward():
            return False  # it is written back when backward ends: an optimizer that steps in a hook sees the local gradient
        # If no backward reached the parameter on this rank, the wrapper has still reduced the terms of other ranks.
        return one.is_ready if one.reduced is None else one.reduced

    def reduced_before(self, parameter: Tensor) -> bool:
        """Whether the gradient was reduced in the step before the last backward."""
        one = self._of.get(id(parameter))
        return one is not None and one.reduced_before and not one.leaves_local

    def replace(self, parameter: Tensor) -> bool:
        """Whether a view of a wrapper's buffer takes the place of a gradient."""
        one = self._of.get(id(parameter))
        return one is not None and one.makes_views

    def _learn(self, module: DistributedDataParallel) -> None:
        one = self._known[id(module)] = _Reducer(module)
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        self._of.update({id(p): one for name, p in module.module.named_parameters() if name not in ignored})
