"""FSDP2 (``fully_shard``), with HSDP and ``replicate``: each rank keeps its shard of every parameter, as a DTensor.

Reduced gradients, weights and moments are DTensors, too, and carry their own layout. The whole gradient of a parameter exists
on each rank from its module's backward to the following reduction. torch has no public hook there that works for every model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from monitor.failures import Failures
from monitor.pytorch.frameworks.dtensor import layout_of, placed, placement_of, ranks_along
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording import patches
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import Removable
from monitor.recording.patches import CallListener
from monitor.series import LOCAL, Placement, Ranks

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

    name, accumulating = "fsdp2", "set_requires_gradient_sync(False)"

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
                _check(managed)
                yield managed


def _check(managed: Any) -> None:
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
