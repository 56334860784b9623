"""FullyShardedDataParallel: each unit flattens its parameters into one, and every rank keeps a run of its elements.

Between the steps an original parameter is a view of what the rank holds of it, and so are its gradient and its moments. The
whole gradient exists for a moment only, at the end of the unit's backward, and torch has no public hook there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.optim import Optimizer

from monitor.coordinator.ownership import alike_over
from monitor.failures import Failures
from monitor.pytorch.frameworks.dtensor import Layout, placed
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.process_group import group_ranks
from monitor.recording import patches
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener
from monitor.recording.protocols import Removable
from monitor.series import LOCAL, Placement, Ranks, Shard, ranks_of

GROUP: Final = "the process group of FullyShardedDataParallel"
POST_BACKWARD: Final = TorchCallPatch(_runtime_utils, "_post_backward_hook", ("state", "handle", "flat_param"))
"""Aggregates the gradient of a unit. A backward takes the function that stood there in its forward: one in progress while the
patch comes or goes ends as it began."""

OF_A_HANDLE: Final = ("_use_orig_params", "_get_unflat_views", "uses_sharded_strategy", "_skipped_use_sharded_views")
OF_A_FLAT_PARAMETER: Final = ("_params", "_shapes", "_contiguities", "_shard_param_infos", "_param_extensions")


class _Unit:
    """A wrapped module with parameters of its own.

    Attributes:
        handle: torch's, of the flat parameter.
        ranks: Those that hold the parts of the flat parameter, or under NO_SHARD the whole of it.
        replicas: Under HYBRID_SHARD, those that hold the same part; otherwise empty.
        parameters: The original ones, in the order in which they are flattened.
        reduces: Whether the last backward has reduced the gradient: ``no_sync`` leaves it local.
    """

    def __init__(self, module: Any) -> None:
        self.handle: Any = module._handle
        _check(self.handle)
        self.ranks, self.replicas = _groups_of(module)
        self.parameters: Sequence[nn.Parameter] = tuple(self.handle.flat_param._params)
        self.reduces = True

    @property
    def is_sharded(self) -> bool:
        return bool(self.handle.uses_sharded_strategy)

    def whole(self, index: int) -> Placement:
        """Where an original parameter is as long as it is not flattened: it may have been a DTensor."""
        spec = self.handle.flat_param._param_extensions[index]
        return LOCAL if spec is None else placed(spec.mesh, spec.placements, tuple(spec.shape))

    def part(self, index: int) -> Placement:
        """Where what this rank holds of an original parameter is: a run of its elements, or none, or under NO_SHARD all."""
        whole = self.whole(index)
        if not self.is_sharded:
            return replace(whole, unclaimed=self.ranks if len(self.ranks) > 1 else ())
        replicas = alike_over(dist.get_rank(), [self.replicas, whole.replicas])
        return replace(whole, replicas=replicas, shard=self._shard(index, whole.shard))

    def _shard(self, index: int, within: Shard | None) -> Shard:
        """The run of elements that this rank holds.

        Args:
            within: What was flattened, where that is itself a part.
        """
        flat = self.handle.flat_param
        if within is not None:
            return Shard(alike_over(dist.get_rank(), [self.ranks, within.ranks]), within.global_shape, flat=True)
        start = flat._shard_param_infos[index].intra_param_start_idx
        # Of strided parameters, memory was cut: what lies together there does not in the flattened parameter.
        in_order = flat._contiguities[index] and start is not None
        return Shard(self.ranks, tuple(flat._shapes[index]), (start,) if in_order else (), flat=True)


@dataclass(frozen=True, slots=True)
class _Flattened:
    """Where an original parameter went."""

    unit: _Unit
    index: int


class Fsdp1(Framework):
    """Any sharding strategy; parameters that no unit manages (``ignored_modules``) are plain ones.

    ``grad_unreduced`` is read whole, in the dtype in which backward leaves it, before it is cast and aggregated.
    """

    name = "fsdp1"

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, optimizer, main_grad=main_grad)
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._wrappers = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
        self._units = [_Unit(wrapper) for wrapper in self._wrappers if wrapper._handle is not None]
        self._ranks = ranks_of(rank for groups in map(_groups_of, self._wrappers) for ranks in groups for rank in ranks)
        self._flattened = {id(p): _Flattened(unit, i) for unit in self._units for i, p in enumerate(unit.parameters)}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """``dp``, or under HYBRID_SHARD ``dp_shard`` and ``dp_replicate``; of units that differ, the outermost one's."""
        found: dict[str, Sequence[int]] = {}
        for ranks, replicas in map(_groups_of, self._wrappers):
            for role, members in {"dp_shard": ranks, "dp_replicate": replicas}.items() if replicas else [("dp", ranks)]:
                found.setdefault(role, members)
        return {**super().groups(), **found}

    def notes(self) -> Mapping[str, str]:
        casts = {(unit.handle._fwd_bwd_param_dtype, unit.handle._reduce_dtype) for unit in self._units}
        told = sorted(f"{left}, aggregated in {reduced}" for left, reduced in casts if left != reduced)
        return {"mixed_precision": f"grad_unreduced is as backward leaves it: {'; '.join(told)}"} if told else {}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        found = self._flattened.get(id(parameter.tensor))
        if found is None:
            known = super().placement(kind, parameter)
            return Placement(differing=self._ranks) if known == LOCAL else known
        if kind == "grad_unreduced":
            return found.unit.whole(found.index)
        # Nothing brings the ranks together that a unit's groups leave out, whatever group the others of the model have.
        members = {*found.unit.ranks, *found.unit.replicas}
        return replace(found.unit.part(found.index), differing=tuple(rank for rank in self._ranks if rank not in members))

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """What no unit manages differs between ranks, and lacks nothing of theirs."""
        found = self._flattened.get(id(parameter.tensor))
        return True if found is None else found.unit.reduces

    def _layouts(self) -> Iterable[Layout]:
        """Of plain parameters, and of those that were DTensors before they were flattened."""
        specs = [spec for unit in self._units for spec in unit.handle.flat_param._param_extensions if spec is not None]
        return [*super()._layouts(), *((spec.mesh, tuple(spec.placements)) for spec in specs)]

    def _apart(self, kind: str, parameter: NamedParameter) -> Collection[int]:
        flattened = id(parameter.tensor) in self._flattened
        return super()._apart(kind, parameter) if flattened and kind != "grad_unreduced" else self._ranks

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        units = {id(unit.handle): unit for unit in self._units}
        return _Catch(units, self._wanted(parameters), gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._flattened

    def aggregates(self, root: nn.Module) -> bool:
        # Where gradients are cut, the local one is gone after its aggregation; a NO_SHARD unit adds the next to what came back.
        in_place = any(not unit.is_sharded and len(unit.ranks) > 1 for unit in self._units)
        return super().aggregates(root) or (in_place and any(wrapper._sync_gradients for wrapper in self._wrappers))

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        # After a backward under no_sync alone, `grad` is the whole local gradient, and nothing was aggregated.
        return self._held(parameter, super().reduced(parameter))

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        return self._held(parameter, parameter.tensor)

    def moment(self, kind: str, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        return self._held(parameter, super().moment(kind, parameter, optimizer))

    def _held(self, parameter: NamedParameter, x: Tensor | None) -> Tensor | None:
        """``x`` if it is what this rank holds of a parameter; None where it holds no element."""
        found = self._flattened.get(id(parameter.tensor))
        if x is None or found is None:
            return x
        expected = found.unit.handle.flat_param._shard_param_infos[found.index].numel_in_shard
        return x if expected and x.numel() == expected else None

    def _wanted(self, parameters: Sequence[NamedParameter]) -> _Wanted:
        wanted: dict[int, list[tuple[int, NamedParameter]]] = {}
        for parameter in parameters:
            if (found := self._flattened.get(id(parameter.tensor))) is not None:
                wanted.setdefault(id(found.unit.handle), []).append((found.index, parameter))
        return wanted


_Wanted = Mapping[int, Sequence[tuple[int, NamedParameter]]]
"""By ``id`` of the handle: the parameters that are watched, with their place in the flat parameter."""


def _groups_of(wrapper: Any) -> tuple[Ranks, Ranks]:
    """The ranks over which a unit is cut, and those over which its parts are replicated, if there are others."""
    ranks = ranks_of(group_ranks(GROUP, wrapper.process_group) or ())
    replicas = ranks_of(group_ranks(GROUP, getattr(wrapper, "_inter_node_pg", None)) or ())
    return ranks, replicas if len(replicas) > 1 else ()


def _check(handle: Any) -> None:
    """Refuse what cannot be observed.

    Raises:
        ValueError: The original parameters are not kept, or not in place now, or kept in a way that is not known.
    """
    known = all(hasattr(handle, name) for name in OF_A_HANDLE)
    known = known and all(hasattr(handle.flat_param, name) for name in OF_A_FLAT_PARAMETER)
    if not known or not POST_BACKWARD.fits:
        raise ValueError(
            f"torch {torch.__version__} keeps the parameters of FullyShardedDataParallel in a way that is not known here: use "
            "a version of torch that this one was tested with, or fully_shard."
        )
    if not handle._use_orig_params:
        raise ValueError(
            "FullyShardedDataParallel was given use_orig_params=False, and the original parameters are not kept then: "
            "pass use_orig_params=True."
        )
    if handle._skipped_use_sharded_views:
        raise ValueError(
            "A forward without its backward has left parameters of FullyShardedDataParallel gathered: attach the monitor "
            "before the forward, or after the backward."
        )


class _Catch(CallListener):
    """Tells of the gradients of the parameters that are watched, when a unit's backward ends."""

    def __init__(self, units: Mapping[int, _Unit], wanted: _Wanted, gradients: LocalGradients, failures: Failures) -> None:
        self._units = units
        self._wanted = wanted
        self._gradients = gradients
        # What FSDP does at this point is left out of compiled code, and so is this.
        self._told = torch.compiler.disable(failures.guarded("reading gradients of a unit of FSDP", self._tell))
        POST_BACKWARD.add(self)

    def remove(self) -> None:
        POST_BACKWARD.remove(self)

    def call_begins(self, _: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._gradients.wanted:
            self._told(*args, **kwargs)

    def _tell(self, state: Any, handle: Any, *_: Any, **__: Any) -> None:
        if (unit := self._units.get(id(handle))) is not None:
            unit.reduces = bool(state._sync_gradients)
        wanted, gradient = self._wanted.get(id(handle)), handle.flat_param.grad
        if wanted is None or gradient is None:
            return
        with torch.no_grad():
            views = tuple(handle._get_unflat_views(gradient))
        for index, parameter in wanted:
            # A frozen parameter of a unit has zeros here, and no gradient.
            if parameter.tensor.requires_grad:
                self._gradients.arrived(parameter, views[index], complete=False)
