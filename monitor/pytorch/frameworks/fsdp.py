"""FullyShardedDataParallel: each unit flattens its parameters into one tensor, and every rank keeps a run of its elements.

Between steps an original parameter is a view of the rank's elements, and so are its gradient and its moments. The whole
gradient exists only briefly, at the end of the unit's backward, where torch has no public hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.optim import Optimizer

from monitor.coordinator.ownership import alike_over
from monitor.failures import Failures
from monitor.pytorch.frameworks.dtensor import Layout, layout_of, placed, placement_of, ranks_along
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.process_group import group_ranks
from monitor.recording import patches
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import Removable
from monitor.recording.patches import CallListener
from monitor.series import LOCAL, Placement, Ranks, Shard, ranks_of

GROUP: Final = "the process group of FullyShardedDataParallel"
POST_BACKWARD: Final = TorchCallPatch(_runtime_utils, "_post_backward_hook", ("state", "handle", "flat_param"))
"""Reduces the gradient of a unit. A backward uses the function that its forward looked up, so adding or removing the patch does
not affect a backward in progress.
"""

HANDLE_ATTRIBUTES: Final = ("_use_orig_params", "_get_unflat_views", "uses_sharded_strategy", "_skipped_use_sharded_views")
FLAT_PARAMETER_ATTRIBUTES: Final = ("_params", "_shapes", "_contiguities", "_shard_param_infos", "_param_extensions")


class _Unit:
    """A wrapped module that manages parameters.

    Attributes:
        handle: torch's handle of the flat parameter.
        ranks: The ranks that shard the flat parameter, or under NO_SHARD replicate it.
        replicas: Under HYBRID_SHARD, the ranks that hold the same part; otherwise empty.
        parameters: The original parameters, in flattening order.
        reduces: Whether the last backward has reduced the gradient: ``no_sync`` leaves it local.
    """

    def __init__(self, module: Any) -> None:
        self.handle: Any = module._handle
        _check_handle(self.handle)
        self.ranks, self.replicas = _groups_of(module)
        self.parameters: Sequence[nn.Parameter] = tuple(self.handle.flat_param._params)
        self.reduces = True

    @property
    def is_sharded(self) -> bool:
        return bool(self.handle.uses_sharded_strategy)

    def whole(self, index: int) -> Placement:
        """The placement of an original parameter before flattening: it may have been a DTensor."""
        spec = self.handle.flat_param._param_extensions[index]
        return LOCAL if spec is None else placed(spec.mesh, spec.placements, tuple(spec.shape))

    def part(self, index: int) -> Placement:
        """The placement of this rank's part of an original parameter: a run of its elements, none, or under NO_SHARD all."""
        whole = self.whole(index)
        if not self.is_sharded:
            return replace(whole, unclaimed=self.ranks if len(self.ranks) > 1 else ())
        replicas = alike_over(dist.get_rank(), [self.replicas, whole.replicas])
        return replace(whole, replicas=replicas, shard=self._shard(index, whole.shard))

    def _shard(self, index: int, within: Shard | None) -> Shard:
        """The run of elements that this rank holds.

        Args:
            within: The part that was flattened, if it was itself a shard.
        """
        flat = self.handle.flat_param
        if within is not None:
            return Shard(alike_over(dist.get_rank(), [self.ranks, within.ranks]), within.global_shape, flat=True)
        start = flat._shard_param_infos[index].intra_param_start_idx
        # A strided parameter's memory was sharded: its elements there are in another order.
        in_order = flat._contiguities[index] and start is not None
        return Shard(self.ranks, tuple(flat._shapes[index]), (start,) if in_order else (), flat=True)


@dataclass(frozen=True, slots=True)
class _Flattened:
    """The unit of an original parameter, and its index there."""

    unit: _Unit
    index: int


class Fsdp1(Framework):
    """FSDP1 with any sharding strategy. Parameters that no unit manages (``ignored_modules``) are plain.

    ``grad_unreduced`` is read whole, in the dtype that backward leaves, before casting and reduction.
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
        """``dp``, or under HYBRID_SHARD ``dp_shard`` and ``dp_replicate``. If units differ, the outermost one counts."""
        found: dict[str, Sequence[int]] = {}
        for ranks, replicas in map(_groups_of, self._wrappers):
            for role, members in {"dp_shard": ranks, "dp_replicate": replicas}.items() if replicas else [("dp", ranks)]:
                found.setdefault(role, members)
        return {**super().groups(), **found}

    def notes(self) -> Mapping[str, str]:
        casts = {(unit.handle._fwd_bwd_param_dtype, unit.handle._reduce_dtype) for unit in self._units}
        notes = sorted(f"{left}, reduced in {reduced}" for left, reduced in casts if left != reduced)
        return {"mixed_precision": f"grad_unreduced has the dtype that backward leaves: {'; '.join(notes)}"} if notes else {}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        found = self._flattened.get(id(parameter.tensor))
        if found is None:
            known = super().placement(kind, parameter)
            return Placement(differing=self._ranks) if known == LOCAL else known
        if kind == "grad_unreduced":
            return found.unit.whole(found.index)
        # No collective connects this unit to ranks outside its own groups.
        members = {*found.unit.ranks, *found.unit.replicas}
        return replace(found.unit.part(found.index), differing=tuple(rank for rank in self._ranks if rank not in members))

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """True for parameters that no unit manages: they differ between ranks and need no reduction."""
        found = self._flattened.get(id(parameter.tensor))
        return True if found is None else found.unit.reduces

    def _layouts(self) -> Iterable[Layout]:
        """Layouts of plain parameters, and of parameters that were DTensors before flattening."""
        specs = [spec for unit in self._units for spec in unit.handle.flat_param._param_extensions if spec is not None]
        return [*super()._layouts(), *((spec.mesh, tuple(spec.placements)) for spec in specs)]

    def _apart(self, kind: str, parameter: NamedParameter) -> Collection[int]:
        flattened = id(parameter.tensor) in self._flattened
        return super()._apart(kind, parameter) if flattened and kind != "grad_unreduced" else self._ranks

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        units = {id(unit.handle): unit for unit in self._units}
        return _UnitGradients(units, self._wanted(parameters), gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._flattened

    def aggregates(self, root: nn.Module) -> bool:
        # A sharded unit frees the local gradient after its reduction; a NO_SHARD unit adds the next one to the reduced
        # gradient.
        in_place = any(not unit.is_sharded and len(unit.ranks) > 1 for unit in self._units)
        return super().aggregates(root) or (in_place and any(wrapper._sync_gradients for wrapper in self._wrappers))

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        # If all backwards ran under no_sync, `grad` is the whole local gradient and nothing was reduced.
        return self._held(parameter, super().reduced(parameter))

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        return self._held(parameter, parameter.tensor)

    def moment(self, kind: str, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        return self._held(parameter, super().moment(kind, parameter, optimizer))

    def _held(self, parameter: NamedParameter, x: Tensor | None) -> Tensor | None:
        """``x`` if it has the elements of a parameter on this rank; None if this rank holds none."""
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
"""By ``id`` of the handle: the watched parameters, with their index in the flat parameter."""


def _groups_of(wrapper: Any) -> tuple[Ranks, Ranks]:
    """The ranks that shard a unit, and those that replicate its parts, if there are several."""
    ranks = ranks_of(group_ranks(GROUP, wrapper.process_group) or ())
    replicas = ranks_of(group_ranks(GROUP, getattr(wrapper, "_inter_node_pg", None)) or ())
    return ranks, replicas if len(replicas) > 1 else ()


def _check_handle(handle: Any) -> None:
    """Check that a unit can be observed.

    Raises:
        ValueError: The original parameters are not kept, or are gathered now, or their storage is unknown.
    """
    known = all(hasattr(handle, name) for name in HANDLE_ATTRIBUTES)
    known = known and all(hasattr(handle.flat_param, name) for name in FLAT_PARAMETER_ATTRIBUTES)
    if not known or not POST_BACKWARD.fits:
        raise ValueError(
            f"The monitor does not know how torch {torch.__version__} keeps the parameters of FullyShardedDataParallel: use "
            "a version of torch that the monitor was tested with, or fully_shard."
        )
    if not handle._use_orig_params:
        raise ValueError(
            "FullyShardedDataParallel with use_orig_params=False does not keep the original parameters: "
            "pass use_orig_params=True."
        )
    if handle._skipped_use_sharded_views:
        raise ValueError(
            "Parameters of FullyShardedDataParallel are still gathered after a forward without a backward: attach the monitor "
            "before the forward, or after the backward."
        )


class _UnitGradients(CallListener):
    """Reports the gradients of watched parameters when a unit's backward ends."""

    def __init__(self, units: Mapping[int, _Unit], wanted: _Wanted, gradients: LocalGradients, failures: Failures) -> None:
        self._units = units
        self._wanted = wanted
        self._gradients = gradients
        # FSDP runs eagerly here, outside of compiled code, and so must this.
        self._guarded_report = torch.compiler.disable(failures.guarded("reading gradients of a unit of FSDP", self._report))
        POST_BACKWARD.add(self)

    def remove(self) -> None:
        POST_BACKWARD.remove(self)

    def call_begins(self, _: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._gradients.wanted:
            self._guarded_report(*args, **kwargs)

    def _report(self, state: Any, handle: Any, *_: Any, **__: Any) -> None:
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


# --- FSDP2 (``fully_shard``), with HSDP and ``replicate``: each rank keeps its shard of every parameter, as a DTensor.
#
# Reduced gradients, weights and moments are DTensors, too, and carry their own layout. The whole gradient of a
# parameter exists on each rank from its module's backward to the following reduction. torch has no public hook there
# that works for every model.

PARAMETER_ATTRIBUTES: Final = ("sharded_param", "sharded_state", "is_dtensor", "_module_info", "unsharded_accumulated_grad")

REDUCED: Final = TorchCallPatch(_fsdp_param_group, "foreach_reduce", ("fsdp_params", "unsharded_grads"))
"""Reduces the gradients of a group of parameters."""

KEPT: Final = TorchCallPatch(_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed", ("self",))
"""Keeps the gradient of one parameter, at the end of a backward without reduction."""


class Fsdp2(Framework):
    """FSDP2 on any mesh, also with tensor parallelism. Parameters that FSDP does not manage are plain.

    ``grad_unreduced`` is read whole (the tensor-parallel shard of a tensor-parallel parameter), before division by the number
    of ranks and the cast for reduction. A gradient accumulated under ``set_requires_gradient_sync(False)`` is read once, when
    the last micro-batch has been added.
    """

    name = "fsdp2"

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, optimizer, main_grad=main_grad)
        self._managed = {id(_parameter_of(one)): one for chunk in chunks for one in _managed_in(chunk)}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of the mesh by its names; ``dp`` for an unnamed mesh that ``fully_shard`` made."""
        if named := super().groups():
            return named
        placements = (placement_of(_parameter_of(one)) for one in self._managed.values())
        cut = next((found.shard for found in placements if found is not None and found.shard is not None), None)
        return {} if cut is None else {"dp": cut.ranks}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        managed = self._managed.get(id(parameter.tensor))
        if managed is None or kind != "grad_unreduced":
            return super().placement(kind, parameter)
        spec = _tensor_parallel(managed)
        return LOCAL if spec is None else placed(spec.mesh, spec.placements, tuple(spec.shape), _data_parallel(managed))

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """True for parameters that FSDP manages: they have no gradient before reduction."""
        return True if self.catches(parameter) else super().reduces(parameter)

    def _largest_mesh(self) -> Ranks:
        """Empty: the mesh is the data-parallel one, which says nothing about a plain parameter's gradient."""
        return ()

    def _apart(self, kind: str, parameter: NamedParameter) -> Collection[int]:
        """The data-parallel ranks for local gradients. Other code may reduce parameters that FSDP does not manage."""
        managed = self._managed.get(id(parameter.tensor))
        if kind != "grad_unreduced":
            return super()._apart(kind, parameter)
        every = self._managed.values() if managed is None else [managed]
        return {rank for mesh in {one.mesh_info.mesh for one in every} for rank in ranks_along(mesh, range(mesh.ndim))}

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return _GroupGradients([one for one in parameters if self.catches(one)], gradients, failures)

    def catches(self, parameter: NamedParameter) -> bool:
        return id(parameter.tensor) in self._managed


def _managed_in(chunk: nn.Module) -> Iterator[Any]:
    """The record that torch keeps of each parameter that FSDP manages; once each, though modules may share a group."""
    states = {id(state): state for module in chunk.modules() if (state := _get_module_fsdp_state(module)) is not None}
    for state in states.values():
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for managed in group.fsdp_params:
                _check_managed(managed)
                yield managed


def _check_managed(managed: Any) -> None:
    """Check that a parameter can be observed.

    Raises:
        ValueError: The parameter is gathered now, or its storage is unknown.
    """
    known = all(hasattr(managed, name) for name in PARAMETER_ATTRIBUTES) and REDUCED.fits and KEPT.fits
    if not known or (managed.is_dtensor and not hasattr(managed, "_unsharded_dtensor_spec")):
        raise ValueError(
            f"The monitor does not know how torch {torch.__version__} keeps the parameters of fully_shard: use a version of "
            "torch that the monitor was tested with."
        )
    if managed.sharded_state is not _fsdp_param.ShardedState.SHARDED:
        raise ValueError(
            "Parameters of fully_shard are still gathered after a forward without a backward: call reshard() on the modules "
            "that fully_shard was applied to, or attach the monitor before the forward or after the backward."
        )


def _parameter_of(managed: Any) -> Any:
    """The model's current parameter: FSDP's reference to a reloaded one is stale until the next forward."""
    return getattr(managed._module_info.module, managed._module_info.param_name)


def _tensor_parallel(managed: Any) -> Any:
    """The layout of the parameter before FSDP sharded it; None for a plain parameter."""
    return managed._unsharded_dtensor_spec if managed.is_dtensor else None


def _data_parallel(managed: Any) -> frozenset[int]:
    """The dimensions of that layout's mesh over which FSDP reduces, if any."""
    return getattr(managed, "_dp_dim_indices", frozenset())


class _GroupGradients(CallListener):
    """Reports the gradients of watched parameters, and whether they are sums over several micro-batches."""

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._parameters = {id(one.tensor): one for one in parameters}
        self._gradients = gradients
        self._accumulated: set[NamedParameter] = set()
        # FSDP runs eagerly here, outside of compiled code, and so must this.
        self._on_reduced = torch.compiler.disable(failures.guarded("reading gradients of FSDP", self._reduced))
        self._on_kept = torch.compiler.disable(failures.guarded("reading gradients of FSDP", self._kept))
        REDUCED.add(self)
        KEPT.add(self)

    def remove(self) -> None:
        REDUCED.remove(self)
        KEPT.remove(self)

    def call_begins(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self._gradients.wanted:
            self._accumulated.clear()
        elif patch is REDUCED:  # it empties the list of gradients
            self._on_reduced(*args, **kwargs)

    def call_ended(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del result
        if patch is KEPT and self._gradients.wanted:
            self._on_kept(*args, **kwargs)

    def _reduced(self, fsdp_params: Sequence[Any], unsharded_grads: Sequence[Tensor], *_: Any, **__: Any) -> None:
        for managed, gradient in zip(fsdp_params, unsharded_grads, strict=True):
            parameter = self._parameters.get(id(managed.sharded_param))
            if parameter is not None:
                complete = parameter in self._accumulated
                self._accumulated.discard(parameter)
                self._gradients.arrived(parameter, gradient, complete=complete)

    def _kept(self, managed: Any) -> None:
        parameter, gradient = self._parameters.get(id(managed.sharded_param)), _local_sum(managed)
        if parameter is None or gradient is None:
            return
        self._accumulated.add(parameter)
        if (local := _laid_out_as_parameter(managed, gradient)) is not None:
            self._gradients.arrived(parameter, local, complete=False)


def _local_sum(managed: Any) -> Tensor | None:
    """The local sum so far of a gradient that is not reduced yet."""
    accumulated: Tensor | None = managed.unsharded_accumulated_grad
    return getattr(getattr(managed, "_unsharded_param", None), "grad", None) if accumulated is None else accumulated


def _laid_out_as_parameter(managed: Any, gradient: Any) -> Tensor | None:
    """The local part of a gradient with the layout of its parameter; None otherwise: FSDP changes the layout when it
    reduces.
    """
    spec, layout = _tensor_parallel(managed), layout_of(gradient)
    if spec is None or layout is None:
        return gradient if spec is None and layout is None else None
    apart = _data_parallel(managed)
    same = all(a == b for place, (a, b) in enumerate(zip(layout[1], spec.placements, strict=True)) if place not in apart)
    return gradient._local_tensor if same else None
