"""Which gradients DistributedDataParallel has reduced, when the optimizer's step begins.

Its reducer is made ready by a forward of the wrapper outside ``no_sync``, and reduces in the first backward after that, when it
ends. A gradient is what all ranks make together if the last backward that added to it did so. Who calls the module inside the
wrapper, or has no forward that shows, has gradients of which that is not known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

REDUCE_NOTHING: Final = frozenset({"noop_hook", "post_localSGD_hook"})
"""Communication hooks of torch's that leave gradients local, or average them among some of the ranks only."""

_NO_BACKWARD: Final = -1


class _Reducer:
    """One wrapper.

    Attributes:
        ready: Whether the next backward is to reduce.
        reduced: Whether the last one has; None where none was seen.
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
        """Whether a forward was seen to make it ready, and the wrapper keeps of its last forward that it has. That alone is no
        sign: it says so from the beginning.
        """
        return self.ready and bool(getattr(self._module(), "require_forward_param_sync", False))

    @property
    def leaves_local(self) -> bool:
        hooks = getattr(self._module(), "_comm_hooks", ())
        return any(getattr(hook, "__name__", "") in REDUCE_NOTHING for hook, *_ in hooks)


class Reducers:
    """Those of a model: the wrappers that are part of it, and those in whose forward it is called."""

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
        """Whether there is a wrapper."""
        return bool(self._of)

    def forward_begins(self, root: nn.Module) -> None:
        """A forward of a chunk begins, with gradients enabled: of the wrappers that it has in it, and of the one around it."""
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
        """Whether a gradient is reduced; None of a parameter that no wrapper reduces."""
        one = self._of.get(id(parameter)) if self._of else None
        if one is None:
            return None
        if one.leaves_local:
            return None  # somebody else may reduce it
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            return False  # it is written back when backward ends: an optimizer that steps in a hook has what this rank added
        # Of what no backward was seen to reach on this rank, the wrapper has reduced what other ranks added.
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
