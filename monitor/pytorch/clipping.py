"""Observes how gradients are clipped by their total norm: the functions of torch that do it, FSDP's method, and changes of
gradients between the end of backward and the optimizer's step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from monitor.failures import Failures
from monitor.pytorch.hooks import GradientVersion, TorchCallPatch
from monitor.recording.backend import StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.phases import Clipping

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
SCALED_LIMIT: Final = 16.0
"""A limit that is not less than the loss scale divided by this is itself multiplied by the scale. Our choice."""

NOT_CLIPPED: Final[tuple[frozenset[int] | None, float]] = frozenset(), inf
"""Ids of the clipped parameters, None if they are not known, and the limit."""

_SCALED: Final = (
    "Gradients were clipped to {limit:g} while the loss scale {scale:g} multiplied them. Then they are as small as with a "
    "limit of {limit:g}/{scale:g}, and grad_norm is not recorded. Call scaler.unscale_(optimizer) before clipping."
)


def _patch_of_fsdp() -> TorchCallPatch | None:
    """The patch of FSDP's method; None if FSDP is not in use."""
    of = getattr(sys.modules.get(FULLY_SHARDED), "FullyShardedDataParallel", None)
    return None if of is None else TorchCallPatch(of, "clip_grad_norm_", ("self", "max_norm", "norm_type"))


class GradientClipping(CallListener):
    """Reports each clipping to a listener, when it is done.

    A norm that is no Euclidean one, or that is spread over the ranks, is reported as None: the gradients have changed.

    Attributes:
        latest: The latest clipping since an optimizer has stepped.
    """

    def __init__(self, listener: StepListener, failures: Failures) -> None:
        self._listener, self._failures = listener, failures
        self.latest = NOT_CLIPPED
        self._has_looked = False
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

    def scaled_step_begins(self, stepped: Callable[[], Collection[int]], scale: Tensor) -> None:
        """An optimizer is about to step. Its gradients are still multiplied by ``scale``.

        Args:
            stepped: Returns the ids of its parameters. Called until one clipping was looked at: there may be thousands.
        """
        of, limit = self.latest
        if self._has_looked or limit == inf or (of is not None and of.isdisjoint(stepped())):
            return
        self._has_looked = True
        factor = scale.item()  # this once a device is waited for
        if limit < factor / SCALED_LIMIT:
            self._failures.warn("clipping of scaled gradients", _SCALED.format(limit=limit, scale=factor))

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
        given = args[0] if patch is self._fsdp else _argument("parameters", 0, args, kwargs, None)
        of = _ids(given)
        self.latest = of, limit
        if patch is self._fsdp:
            found = _if(_argument("norm_type", 2, args, kwargs, EUCLIDEAN) == EUCLIDEAN, result)
            self._listener.clipped(Clipping(found, limit, of, is_total=True, intact=_followed(given)))
            return
        norm = _argument("total_norm", 2, args, kwargs, None)
        computed, self._computed = self._computed, None
        by_torch = computed is not None and computed[0] is norm
        is_euclidean = computed is None or not by_torch or computed[1] == EUCLIDEAN
        # A norm that torch has not just computed is one that the loop has summed over the ranks; so is a DTensor's.
        is_total = not by_torch or hasattr(norm, "placements")
        if of is not None:
            found = _if(is_euclidean and _is_whole(norm), norm)
            self._listener.clipped(Clipping(found, limit, of, is_total, _followed(given)))


class BeforeClipping(CallListener):
    """Calls a function right before torch scales gradients to clip them by their norm."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._patches = [one for one in (SCALES, SCALES_BY_ANY) if one.fits]
        for patch in self._patches:
            patch.add(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        self._call()

    def remove(self) -> None:
        """Stop observing."""
        for patch in self._patches:
            patch.remove(self)


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
