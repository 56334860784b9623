"""Hooks of modules as a compiler traces them: in each stands what is constant, and one operator is all that it leaves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from monitor.pytorch.compiled.operators import FOLLOW, SEE, Observed, begin, end
from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.tensor_paths import TensorPath
from monitor.selection import TensorChoice


class TracedHook:
    """A hook that asks for nothing but to be called."""

    def __init__(self, observed: Observed, *, ends: bool = False) -> None:
        self._observed = observed  # kept: compiled code has the handle alone
        self._handle = observed.handle
        self._ends = ends

    def __call__(self, _module: nn.Module, *_: Any) -> None:
        if self._ends:
            end([], self._handle, [], [], 0)
        else:
            begin([], self._handle, [], [], 0)


class TracedInputs(TracedHook):
    """Before a module's forward.

    Args:
        seen: The inputs to observe.
        followed: The inputs whose gradients are observed.
    """

    def __init__(self, observed: Observed, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        kwargs = kwargs or {}
        found = len(args) + len(kwargs)
        leaves = TENSOR_PATHS.inputs(args, kwargs)
        slots = ["input" + leaf.suffix for leaf in leaves]
        begin([leaf.tensor for leaf in leaves], self._handle, slots, _wanted(self._seen, self._followed, leaves, found), found)


class TracedOutputs(TracedHook):
    """After a module's forward, likewise."""

    def __init__(self, observed: Observed, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed, ends=True)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, _args: Any = (), _kwargs: Any = None, result: Any = None) -> None:
        found = TENSOR_PATHS.length(result)
        leaves = TENSOR_PATHS.outputs(result)
        slots = ["output" + leaf.suffix for leaf in leaves]
        wanted = _wanted(self._seen, self._followed, leaves, found)
        end([leaf.tensor for leaf in leaves], self._handle, slots, wanted, found, TENSOR_PATHS.finds_all(result))


def _wanted(seen: TensorChoice, followed: TensorChoice, leaves: Sequence[TensorPath], found: int) -> list[int]:
    return [(SEE if _takes(seen, leaf, found) else 0) | (FOLLOW if _takes(followed, leaf, found) else 0) for leaf in leaves]


def _takes(choice: TensorChoice, leaf: TensorPath, found: int) -> bool:
    """Whether a leaf is wanted; all are where the choice counts on another number of tensors than the call has."""
    return choice.wanted and (choice.index is None or choice.index == leaf.position or choice.length not in (None, found))


# --- What was compiled before the monitor was attached has no hooks in it, and is not compiled anew because of them.

ADVICE = (
    "has been compiled before the monitor was attached: what compiled code computes has no rows. Attach before the first "
    "forward, or call torch._dynamo.reset() afterwards, which has everything compiled anew."
)


def was_compiled(module: nn.Module) -> bool:
    """Whether there is compiled code of the forward of a module of this class."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    written: Any = type(getattr(module, "_orig_mod", module))
    code = getattr(getattr(written, "forward", None), "__code__", None)  # a scripted module has none
    if dynamo is None or code is None:
        return False
    return len(dynamo._debug_get_cache_entry_list(code)) > 0


class HookGuards:
    """Has code that is compiled from now on looked at again when hooks are added to its modules.

    Torch's compiler takes it that none will be, and would run what it has compiled of an unmonitored model, or of this one
    while nothing of it was watched, in the place of what has our hooks. The setting is torch's, for the whole process; it is
    put back when nobody needs it any more.
    """

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._off, self._before = False, True
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: set[type] = set()

    def meet(self, root: nn.Module) -> None:
        """Note which classes of modules in a model were compiled before it was looked after: afterwards it does not matter."""
        if root not in self._met:
            self._met.add(root)
            self._early |= {type(module) for module in root.modules() if was_compiled(module)}

    def came_late(self, module: nn.Module) -> bool:
        """Whether there may be code of a module that does not look for hooks."""
        return type(module) in self._early and was_compiled(module)

    def hold(self, holder: object) -> None:
        """Until it is released, or nobody has it any more."""
        config: Any = torch._dynamo.config
        if not self._off:
            self._off, self._before = True, config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
        weakref.finalize(holder, self._put_back).atexit = False  # made first, called last
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Any number of times."""
        self._holders.discard(holder)
        self._put_back()

    def _put_back(self) -> None:
        if self._off and not self._holders:
            config: Any = torch._dynamo.config
            self._off, config.skip_nnmodule_hook_guards = False, self._before
            self._met.clear()
            self._early.clear()


HOOK_GUARDS: Final = HookGuards()
"""One, as torch's setting is one."""
