"""Hooks of modules as a compiler traces them. Each holds constants only and leaves one operator in the graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from monitor.pytorch.compiled.operators import FOLLOW, SEE, Observed, begin, end
from monitor.pytorch.tensors import LEAVES
from monitor.recording.tensor_paths import Leaf
from monitor.selection import TensorChoice


class TracedHook:
    """A hook without tensors: it only reports the call."""

    def __init__(self, observed: Observed, *, ends: bool = False) -> None:
        self._observed = observed  # kept alive: compiled code references only the handle
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
        leaves = LEAVES.inputs(args, kwargs)
        slots = ["input" + leaf.suffix for leaf in leaves]
        begin([leaf.tensor for leaf in leaves], self._handle, slots, _wanted(self._seen, self._followed, leaves, found), found)


class TracedOutputs(TracedHook):
    """After a module's forward, likewise."""

    def __init__(self, observed: Observed, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed, ends=True)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, _args: Any = (), _kwargs: Any = None, result: Any = None) -> None:
        found = LEAVES.length(result)
        leaves = LEAVES.outputs(result)
        slots = ["output" + leaf.suffix for leaf in leaves]
        wanted = _wanted(self._seen, self._followed, leaves, found)
        end([leaf.tensor for leaf in leaves], self._handle, slots, wanted, found, LEAVES.finds_all(result))


def _wanted(seen: TensorChoice, followed: TensorChoice, leaves: Sequence[Leaf], found: int) -> list[int]:
    return [(SEE if _takes(seen, leaf, found) else 0) | (FOLLOW if _takes(followed, leaf, found) else 0) for leaf in leaves]


def _takes(choice: TensorChoice, leaf: Leaf, found: int) -> bool:
    """Whether a leaf is wanted. If the choice expects another number of tensors than the call has, all are."""
    return choice.wanted and (choice.index is None or choice.index == leaf.position or choice.length not in (None, found))


# --- Code compiled before the monitor was attached has no hooks, and is not recompiled for them.

ADVICE = (
    "was compiled before the monitor was attached: tensors of compiled code have no rows. Attach before the first "
    "forward, or call torch._dynamo.reset() afterwards to recompile everything."
)


def was_compiled(module: nn.Module) -> bool:
    """Whether compiled code exists for the forward of this module's class."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    written: Any = type(getattr(module, "_orig_mod", module))
    code = getattr(getattr(written, "forward", None), "__code__", None)  # a scripted module has none
    if dynamo is None or code is None:
        return False
    return len(dynamo._debug_get_cache_entry_list(code)) > 0


class HookGuards:
    """Has torch guard code compiled from now on against hooks added to its modules.

    By default torch's compiler assumes that no hooks are added. It would reuse code compiled without the monitor's hooks, for
    an unmonitored model or before this one was monitored. The setting is torch's, for the whole process, and is restored when
    no monitor needs it.
    """

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._off, self._before = False, True
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: set[type] = set()

    def meet(self, root: nn.Module) -> None:
        """Note which classes of modules in a model were compiled before the guards. Later compilations are guarded."""
        if root not in self._met:
            self._met.add(root)
            self._early |= {type(module) for module in root.modules() if was_compiled(module)}

    def came_late(self, module: nn.Module) -> bool:
        """Whether a module may have compiled code without guards for hooks."""
        return type(module) in self._early and was_compiled(module)

    def hold(self, holder: object) -> None:
        """Keep the guards on until ``holder`` is released or garbage-collected."""
        config: Any = torch._dynamo.config
        if not self._off:
            self._off, self._before = True, config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
        weakref.finalize(holder, self._put_back).atexit = False  # made first, called last
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Release ``holder``. Idempotent."""
        self._holders.discard(holder)
        self._put_back()

    def _put_back(self) -> None:
        if self._off and not self._holders:
            config: Any = torch._dynamo.config
            self._off, config.skip_nnmodule_hook_guards = False, self._before
            self._met.clear()
            self._early.clear()


HOOK_GUARDS: Final = HookGuards()
"""One for the process, like torch's setting."""
