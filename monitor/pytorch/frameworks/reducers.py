"""Tracks which gradients DistributedDataParallel has reduced when the optimizer's step begins.

A forward of the wrapper outside ``no_sync`` prepares its reducer, which reduces at the end of the next backward. A gradient is
reduced if the last backward that added to it did so. If a loop calls the module inside the wrapper, or a forward is not
observed, that is unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

REDUCE_NOTHING: Final = frozenset({"noop_hook", "post_localSGD_hook"})
"""Communication hooks of torch that leave gradients local, or average them over some ranks only."""

_NO_BACKWARD: Final = -1


class _Reducer:
    """The reducer of one wrapper.

    Attributes:
        ready: Whether the next backward will reduce.
        reduced: Whether the last backward has reduced; None if none was seen.
        backward: The last backward that was seen.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)
        self.ready = False
        self.reduced: bool | None = None
        self.backward = _NO_BACKWARD

    def forward_begins(self) -> None:
        self.ready = self.ready or bool(getattr(self._module(), "require_backward_grad_sync", False))

    def backward_begins(self, backward: int) -> None:
        self.backward = backward
        self.reduced = self.is_ready
        self.ready = False

    @property
    def is_ready(self) -> bool:
        """Whether an observed forward prepared it, and the wrapper's flag agrees. The flag alone proves nothing: it is set from
        the beginning.
        """
        return self.ready and bool(getattr(self._module(), "require_forward_param_sync", False))

    @property
    def leaves_local(self) -> bool:
        hooks = getattr(self._module(), "_comm_hooks", ())
        return any(getattr(hook, "__name__", "") in REDUCE_NOTHING for hook, *_ in hooks)


class Reducers:
    """The reducers of a model: of wrappers inside it, and of wrappers whose forward calls it."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._known: dict[int, _Reducer] = {}
        self._of: dict[int, _Reducer] = {}
        self._below: dict[int, list[_Reducer]] = {}
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, DistributedDataParallel):
                    self._learn(module)

    @property
    def any_known(self) -> bool:
        """Whether any wrapper is known."""
        return bool(self._of)

    def forward_begins(self, root: nn.Module) -> None:
        """A forward of a chunk begins, with gradients enabled. Notify the wrappers inside it and the one around it."""
        around = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if around is not None and id(around) not in self._known:
            self._learn(around)
        for one in self._called(root, around):
            one.forward_begins()

    def backward_reaches(self, parameter: Tensor) -> None:
        one = self._of.get(id(parameter)) if self._of else None
        if one is not None and one.backward != (backward := torch._C._current_graph_task_id()):
            one.backward_begins(backward)

    def reduced(self, parameter: Tensor) -> bool | None:
        """Whether a gradient is reduced; None if no wrapper reduces the parameter."""
        one = self._of.get(id(parameter)) if self._of else None
        if one is None:
            return None
        if one.leaves_local:
            return None  # the training loop may reduce it
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            return False  # it is written back when backward ends: an optimizer that steps in a hook sees the local gradient
        # If no backward reached the parameter on this rank, the wrapper has still reduced the terms of other ranks.
        return one.is_ready if one.reduced is None else one.reduced

    def _called(self, root: nn.Module, around: nn.Module | None) -> Iterator[_Reducer]:
        if not self._known:
            return
        below = self._below.get(id(root))
        if below is None:
            below = self._below[id(root)] = [self._known[id(one)] for one in root.modules() if id(one) in self._known]
        yield from below
        if around is not None:
            yield self._known[id(around)]

    def _learn(self, module: DistributedDataParallel) -> None:
        one = self._known[id(module)] = _Reducer(module)
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        self._of.update({id(p): one for name, p in module.module.named_parameters() if name not in ignored})
