"""Where gradients, weights and moments of a parameter are, and what other ranks hold of them: plain PyTorch's answers.

A framework that keeps them elsewhere is a subclass that overrides what differs, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from monitor.capture.backend import StepListener, Steps
from monitor.capture.hooks import Removable
from monitor.capture.parameter_series import NamedParameter
from monitor.failures import Failures
from monitor.placement import LOCAL, Placement, Ranks, ranks_of
from monitor.pytorch.frameworks.dtensor import mesh_groups, placement_of
from monitor.pytorch.frameworks.meshes import Layout, Meshes, layouts_of
from monitor.pytorch.frameworks.optimizers import innermost
from monitor.pytorch.optimizer_steps import OptimizerSteps
from monitor.pytorch.place import group_ranks
from monitor.ranks.ownership import SAME_AFTER_REDUCTION, alike_over

STATE_NAMES: Final = {
    "exp_avg": ("exp_avg", "momentum_buffer"),
    "exp_avg_sq": ("exp_avg_sq",),
    "max_exp_avg_sq": ("max_exp_avg_sq",),
}
"""What torch optimizers call the state behind each kind."""


class LocalGradients(Protocol):
    """Takes local gradients as backward completes them, before any rank adds to them."""

    @property
    def wanted(self) -> bool:
        """Whether any is read now. To be asked before anything is done: a step that is not collected must cost nothing."""

    def arrived(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool) -> None:
        """Read ``gradient``, which may change or go as soon as this returns.

        Args:
            complete: Whether it is the sum over the whole step, so that its row can be written without counting
                micro-batches. Otherwise it is what one backward left.
        """


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a torch optimizer steps in the place of a parameter, if not the parameter itself.

    Attributes:
        key: The tensor that it knows.
        group: Its hyperparameters, where the optimizer does not list it in a group of its own between steps.
    """

    optimizer: Optimizer
    key: Tensor
    group: Mapping[str, Any] | None = None


class Framework:
    """Plain PyTorch, with DistributedDataParallel or without, and tensors that are DTensors.

    Every answer concerns this rank alone: no collective is issued, and nothing waits for a device.

    Attributes:
        name: As messages and the manifest have it.
        chunks: The model as given to ``set_monitor``.
        optimizer: The torch optimizer that does the work; None where the first that steps the model is to be found.
        tells_twice: Whether ``catch_unreduced`` tells of a gradient after each backward, and once again when it is complete.
        reads_before_clipping: Whether a step begins before anybody clips, so that gradients which changed since backward were
            aggregated, and no more.
    """

    name = "torch"
    tells_twice = False
    reads_before_clipping = False

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        """Take a model and its optimizer, as the user passed them.

        Args:
            main_grad: Whether the user says that gradients are kept in ``main_grad``.

        Raises:
            TypeError: The optimizer is none that this framework knows.
            ValueError: The model is set up in a way that cannot be observed. The message says what to change.
        """
        self.chunks = chunks
        self.optimizer: Optimizer | None = None if optimizer is None else innermost(optimizer)
        self._main_grad = main_grad
        self._data_parallel = {id(p): alike for chunk in chunks for p, alike in _data_parallel(chunk)}
        self._meshes: Meshes | None = None

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that show in the model, by role: ``dp``, ``tp``, ``pp``, ``ep``, ``cp``, or a mesh's own
        names. Those that the user passed come on top.
        """
        return mesh_groups(p for chunk in self.chunks for p in chunk.parameters())

    def notes(self) -> Mapping[str, str]:
        """What a reader of the numbers must know, for the manifest; by kind where it concerns one."""
        return {}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        """How what this rank records of a parameter relates to what others record; groups of the user's aside."""
        found = placement_of(parameter.tensor)
        if found is not None:
            return found
        return self._data_parallel.get(id(parameter.tensor), LOCAL) if kind in SAME_AFTER_REDUCTION else LOCAL

    def completed(self, kind: str, parameter: NamedParameter, placed: Placement) -> Placement:
        """``placed``, with the replicas that DistributedDataParallel makes of DTensors, and those that meshes suggest."""
        if self._meshes is None:
            self._meshes = Meshes(self._layouts())
        apart = self._apart(kind, parameter)
        wrapped = self._data_parallel.get(id(parameter.tensor), LOCAL) if kind in SAME_AFTER_REDUCTION else LOCAL
        return self._meshes.assumed(kind, _with_replicas(placed, wrapped.unclaimed, apart), {*apart, *wrapped.differing})

    def _layouts(self) -> Iterable[Layout]:
        """Of the parameters that are DTensors."""
        return layouts_of(p for chunk in self.chunks for p in chunk.parameters())

    def _apart(self, kind: str, parameter: NamedParameter) -> Collection[int]:
        """Ranks that hold other numbers under the name of the parameter."""
        return self.placement(kind, parameter).differing

    def catch_unreduced(
        self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures
    ) -> Removable | None:
        """Have ``gradients`` told of every local gradient that it wants.

        Returns:
            What ends it. None where hooks on the parameters themselves serve, which is the caller's work.
        """
        del parameters, gradients, failures
        return None

    def catches(self, parameter: NamedParameter) -> bool:
        """Whether ``catch_unreduced``, where it returns anything, tells of this parameter; the others are hooked."""
        del parameter
        return True

    def aggregates(self, root: nn.Module) -> bool:
        """Whether local gradients are replaced by the aggregated ones after the backward of the forward that begins now.

        DistributedDataParallel does so unless ``no_sync`` holds it back.
        """
        # The one in whose forward this is: who trains with Lightning or accelerate may have passed what it wraps.
        around = getattr(DistributedDataParallel, "_active_ddp_module", None)
        return any(getattr(one, "require_backward_grad_sync", False) for one in (root, around))

    def local_gradient(self, tensor: Any) -> Tensor | None:
        """Where the hook of a parameter finds what backward has left."""
        gradient: Tensor | None = tensor.grad
        # A framework that keeps main_grad may have moved it there by now.
        return self._main_grad_of(tensor) if gradient is None else gradient

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        """What this rank holds of the aggregated gradient, when the step begins; None where it holds nothing."""
        main_grad = self._main_grad_of(parameter.tensor)
        return parameter.tensor.grad if main_grad is None else main_grad

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        """What this rank holds of the weight that the optimizer steps: the master weight where there is one."""
        weight: Tensor = parameter.tensor
        return weight

    def moment(self, kind: str, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        """What this rank holds of a moment.

        Args:
            optimizer: The torch optimizer that is about to step.
        """
        stepped = self.stepped(parameter, optimizer)
        return None if stepped is None else in_state(kind, stepped)

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> Stepped | None:
        """What is stepped for a parameter, of which this rank may hold a part; None where nothing is, or it cannot be told.

        Args:
            optimizer: The torch optimizer that steps.
        """
        return Stepped(optimizer, parameter.tensor)

    def steps(self, listener: StepListener, failures: Failures) -> Steps:
        """Tell ``listener`` of every step from now on."""
        return OptimizerSteps(self.optimizer, self.chunks, listener, failures)

    def _main_grad_of(self, tensor: Any) -> Tensor | None:
        return getattr(tensor, "main_grad", None) if self._main_grad else None


def _with_replicas(placed: Placement, ranks: Ranks, apart: Collection[int]) -> Placement:
    """``placed``, whose numbers are those of ``ranks``, too."""
    cut = set(placed.shard.ranks if placed.shard else ())
    if placed.partial or {*placed.replicas, *placed.unclaimed}.issuperset(ranks):
        return placed
    rank = dist.get_rank()
    if not (cut.union(apart) - {rank}).isdisjoint(ranks):
        return placed
    alike = alike_over(rank, [group for group in (placed.replicas, placed.unclaimed, ranks) if group])
    return replace(placed, unclaimed=alike)


def in_state(kind: str, stepped: Stepped) -> Tensor | None:
    """The moment that an optimizer keeps of what it steps."""
    # `state` is a defaultdict: asking for a parameter that has none yet would make one, and change training.
    state = stepped.optimizer.state.get(stepped.key)
    if state is None:
        return None
    found = (state.get(name) for name in STATE_NAMES[kind])
    return next((x for x in found if isinstance(x, Tensor)), None)


def _data_parallel(chunk: nn.Module) -> Iterator[tuple[nn.Parameter, Placement]]:
    """The parameters inside DistributedDataParallel, each with where its numbers are after the reduction.

    Those that it was told to ignore are each rank's own.
    """
    for module in chunk.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = ranks_of(group_ranks("the group of DistributedDataParallel", module.process_group) or ())
            ignored = set(getattr(module, "parameters_to_ignore", ()))
            for name, parameter in module.module.named_parameters() if len(ranks) > 1 else ():
                yield parameter, Placement(differing=ranks) if name in ignored else Placement(unclaimed=ranks)
