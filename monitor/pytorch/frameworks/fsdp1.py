"""FullyShardedDataParallel: each unit flattens its parameters into one tensor, and every rank keeps a run of its elements.

Between steps an original parameter is a view of the rank's elements, and so are its gradient and its moments. The whole
gradient exists only briefly, at the end of the unit's backward, where torch has no public hook.
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
        reduced_before: Whether the one before it has.
    """

    def __init__(self, module: Any) -> None:
        self.handle: Any = module._handle
        _check(self.handle)
        self.ranks, self.replicas = _groups_of(module)
        self.parameters: Sequence[nn.Parameter] = tuple(self.handle.flat_param._params)
        self.reduces = self.reduced_before = True

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

    name, accumulating = "fsdp1", "no_sync()"

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

    @property
    def follows_backward(self) -> bool:
        # A sharded unit frees the local gradient after its reduction; a NO_SHARD unit adds the next one to the reduced
        # gradient.
        return super().follows_backward or any(not unit.is_sharded and len(unit.ranks) > 1 for unit in self._units)

    def reduced_before(self, parameter: NamedParameter) -> bool:
        found = self._flattened.get(id(parameter.tensor))
        return super().reduced_before(parameter) if found is None else found.unit.reduced_before

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        # If all backwards ran under no_sync, `grad` is the whole local gradient and nothing was reduced.
        return self._held(parameter, super().reduced(parameter))

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        return self._held(parameter, parameter.tensor)

    def moments(self, kinds: Sequence[str], parameter: NamedParameter, optimizer: Optimizer) -> Sequence[Tensor | None]:
        return [self._held(parameter, one) for one in super().moments(kinds, parameter, optimizer)]

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


def _check(handle: Any) -> None:
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
            unit.reduced_before, unit.reduces = unit.reduces, bool(state._sync_gradients)
        wanted, gradient = self._wanted.get(id(handle)), handle.flat_param.grad
        if wanted is None or gradient is None:
            return
        with torch.no_grad():
            views = tuple(handle._get_unflat_views(gradient))
        for index, parameter in wanted:
            # A frozen parameter of a unit has zeros here, and no gradient.
            if parameter.tensor.requires_grad:
                self._gradients.arrived(parameter, views[index], complete=False)
