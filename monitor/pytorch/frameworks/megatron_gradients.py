"""Local gradients under Megatron: ``main_grad``, to which its own hooks add what a backward leaves, until it is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import LocalGradients
from monitor.pytorch.frameworks.megatron_patches import START_GRAD_SYNC
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import HookSet, Removable


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
