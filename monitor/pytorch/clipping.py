"""Observes how gradients are clipped by their total norm: the functions of torch that do it, FSDP's method, and changes of
gradients between the end of backward and the optimizer's step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from monitor.failures import Failures
from monitor.pytorch.hooks import TorchCallPatch, when_backward_ends
from monitor.recording.attached_model import NamedParameter, ParameterSubset
from monitor.recording.backend import StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.phases import Clipping

# --- Changes of gradients. Gradients are read at the step, so a loop that clips has done it by then. Most reducers write to
# gradients inside backward, which is no such change. So a gradient's version is taken when backward, including its reducer, has
# ended.

MAX_SENTINELS: Final = 4
"""Gradients that are checked. A few suffice: clipping changes all of them."""


class GradientVersion:
    """The version of a gradient, to detect later whether it was replaced or changed.

    A gradient is known by its storage: FSDP makes new views of one gradient after every micro-batch. The storage is referenced
    weakly. A weak reference to the tensor would make ``module.to`` fail where torch swaps tensors. Changes that bypass the
    version (``p.grad.data``) are not detected.
    """

    __slots__ = ("_storage", "_version")

    def __init__(self, gradient: Tensor) -> None:
        self._storage: weakref.ref[Any] = weakref.ref(_storage_of(gradient))
        self._version = gradient._version

    def refers_to(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self._storage() is _storage_of(gradient)

    def is_intact(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self.refers_to(gradient) and gradient._version == self._version


class ChangeDetector:
    """Follows the first and the last gradients of each backward of a step."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._task = -1
        self._latest: NamedParameter | None = None
        self._sentinels: dict[NamedParameter, GradientVersion | None] = {}

    def begin_step(self) -> None:
        self._latest = None
        self._sentinels.clear()

    def arrived(self, parameter: NamedParameter) -> None:
        """Backward has reached a parameter."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._sentinels = dict.fromkeys(self._sentinels)  # in case this backward does not end
            self._add(parameter)
            when_backward_ends(self._failures.guarded("following the gradients", self._ended, "Clipping may go unnoticed."))
        self._latest = parameter

    def changed(self, reduced: Callable[[NamedParameter], Tensor | None], held: ParameterSubset = None) -> bool:
        """Whether a gradient that is about to be read was written to since backward ended.

        Args:
            reduced: Finds the tensor that is about to be read. If backward left another tensor, nothing is known.
            held: The parameters that are about to be read.
        """
        for parameter, left in self._sentinels.items():
            gradient = None if left is None or (held is not None and parameter not in held) else reduced(parameter)
            if left is not None and left.refers_to(gradient) and not left.is_intact(gradient):
                return True
        return False

    def intact(self, reduced: Callable[[NamedParameter], Tensor | None], held: ParameterSubset = None) -> bool:
        """Whether all gradients that are checked, at least one, are as backward left them. Arguments as for ``changed``."""
        left = [(one, version) for one, version in self._sentinels.items() if held is None or one in held]
        return bool(left) and all(version is not None and version.is_intact(reduced(one)) for one, version in left)

    def _add(self, parameter: NamedParameter) -> None:
        if len(self._sentinels) < MAX_SENTINELS:
            self._sentinels.setdefault(parameter)

    def _ended(self) -> None:
        """Take all versions again: later backwards of a step add to the gradients of earlier ones."""
        self._task = -1
        if self._latest is not None:
            self._add(self._latest)
        for parameter in self._sentinels:
            gradient = parameter.tensor.grad
            self._sentinels[parameter] = None if gradient is None else GradientVersion(gradient)


def _storage_of(gradient: Tensor) -> Any:
    """The storage, an object that lives as long as its memory; of a sparse tensor the tensor itself."""
    return gradient.untyped_storage() if gradient.layout is torch.strided else gradient


# --- The patches. ``clip_grad_norm_`` looks these two functions up at each call, however a loop has imported it. Loops that sum
# the norm over ranks by themselves call the second one, under the name that ``torch.nn.utils`` gives it.


class EagerPatch(TorchCallPatch):
    """A patch of a function that loops may compile, alone or with a whole step. Compiled code calls the original."""

    def _is_unseen(self) -> bool:
        return torch.compiler.is_compiling()


COMPUTES: Final = EagerPatch(clip_grad, "_get_total_norm", ("tensors", "norm_type"))
SCALES: Final = EagerPatch(clip_grad, "_clip_grads_with_norm_", ("parameters", "max_norm", "total_norm"))
SCALES_BY_ANY: Final = EagerPatch(torch.nn.utils, "clip_grads_with_norm_", ("parameters", "max_norm", "total_norm"))

FULLY_SHARDED: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"
"""The module that defines ``FullyShardedDataParallel``, whose method sums the norm over its ranks."""

EUCLIDEAN: Final = 2.0


def _patch_of_fsdp() -> TorchCallPatch | None:
    """The patch of FSDP's method; None if FSDP is not in use."""
    of = getattr(sys.modules.get(FULLY_SHARDED), "FullyShardedDataParallel", None)
    return None if of is None else TorchCallPatch(of, "clip_grad_norm_", ("self", "max_norm", "norm_type"))


class GradientClipping(CallListener):
    """Reports each clipping to a listener, when it is done.

    A norm that is no Euclidean one, or that is spread over the ranks, is reported as None: the gradients have changed.
    """

    def __init__(self, listener: StepListener, failures: Failures) -> None:
        self._listener = listener
        self._report = failures.guarded("following the clipping of gradients", self._reported)
        self._computed: tuple[Any, float] | None = None
        self._within_fsdp = False
        self._fsdp = _patch_of_fsdp()
        self._patches = [one for one in (COMPUTES, SCALES, SCALES_BY_ANY, self._fsdp) if one is not None and one.fits]
        for patch in self._patches:
            patch.add(self)

    def remove(self) -> None:
        """Stop observing."""
        for patch in self._patches:
            patch.remove(self)
        self._computed = None

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._within_fsdp |= patch is self._fsdp

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._within_fsdp &= patch is not self._fsdp

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if patch is COMPUTES:
            norm_type = _argument("norm_type", 1, args, kwargs, EUCLIDEAN)
            self._computed = result, float(norm_type)
            return
        if patch is self._fsdp:
            self._within_fsdp = False
        if not self._within_fsdp:
            self._report(patch, args, kwargs, result)

    def _reported(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        limit = float(_argument("max_norm", 1, args, kwargs, None))
        if patch is self._fsdp:
            root, norm_type = args[0], _argument("norm_type", 2, args, kwargs, EUCLIDEAN)
            found = _if(norm_type == EUCLIDEAN, result)
            self._listener.clipped(Clipping(found, limit, _ids(root), is_total=True, intact=_followed(root)))
            return
        given, norm = _argument("parameters", 0, args, kwargs, None), _argument("total_norm", 2, args, kwargs, None)
        of = _ids(given)
        computed, self._computed = self._computed, None
        by_torch = computed is not None and computed[0] is norm
        is_euclidean = computed is None or not by_torch or computed[1] == EUCLIDEAN
        # A norm that torch has not just computed is one that the loop has summed over the ranks; so is a DTensor's.
        is_total = not by_torch or hasattr(norm, "placements")
        if of is not None:
            found = _if(is_euclidean and _is_whole(norm), norm)
            self._listener.clipped(Clipping(found, limit, of, is_total, _followed(given)))


def _argument(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _if(known: bool, norm: Any) -> Any:
    return norm if known else None


def _is_whole(norm: Any) -> bool:
    """Whether this rank has the value: of a DTensor it may have only a part."""
    return all(one.is_replicate() for one in getattr(norm, "placements", ()))


def _clipped(given: Any) -> list[Tensor] | None:
    """The parameters that a clipping was given; None for a generator, which has been read to its end."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, Tensor):
        return [given]
    return list(given) if isinstance(given, list | tuple) else None


def _ids(given: Any) -> frozenset[int] | None:
    found = _clipped(given)
    return None if found is None else frozenset(map(id, found))


def _followed(given: Any) -> Callable[[], bool]:
    """Whether the first and the last of the gradients are still as they are now. A further backward changes all of them."""
    found = _clipped(given) or []
    ends = [next((p for p in some if p.grad is not None), None) for some in (found, reversed(found))]
    left = [(p, GradientVersion(p.grad)) for p in ends if p is not None and p.grad is not None]
    return lambda: all(version.is_intact(p.grad) for p, version in left)
