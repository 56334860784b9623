"""Follows copies from reduced buffers to gradients, until the optimizer steps.

Loops that reduce gradients in flat buffers write them back with a few torch functions. A function mode sees calls from Python.
Writes by compiled code or C++ extensions are not seen: such gradients are not known to be reduced.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from monitor.pytorch.reductions.memory import ReducedMemory
from monitor.stats.torch.tensors import unseen

KEEPS: Final = frozenset(
    {
        "bfloat16", "cat", "clone", "concat", "concatenate", "contiguous", "detach", "div", "divide", "double", "flatten",
        "float", "half", "mul", "multiply", "reshape", "to", "true_divide", "type", "type_as", "__mul__", "__rmul__",
        "__truediv__", "_foreach_div", "_foreach_mul",
    }
)  # fmt: skip
"""Functions whose result equals their input up to a factor and a dtype."""

OVERWRITES: Final = frozenset({"fill_", "normal_", "uniform_", "zero_", "_foreach_zero_"})
"""Functions that overwrite all of a tensor."""


Told = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]


class _Mode(TorchFunctionMode):
    """Forwards every call of one thread unchanged and reports it to ``on_call``. Inactive while ``on_call`` is None.

    torch pops a mode while it handles a call, and pushes it again. A mode that is missing on the stack may therefore come back.
    So it is pushed once, and only pushed again after it was found on the stack and removed.
    """

    def __init__(self) -> None:
        self.told: Told | None = None
        self.pushed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # In code that is being compiled this is traced, and must have no effect.
        if not torch.compiler.is_compiling() and (told := self.told) is not None:
            with unseen():
                told(func, args, kwargs or {}, result)
        return result

    def put(self) -> bool:
        """Push it below all modes of the user, so that each of theirs is on top when its ``with`` ends. Only a default device
        stays below, as torch requires. Returns whether it is pushed: not while torch has popped the default device.
        """
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        if self.pushed or (default is not None and not _on_stack(default)):
            return self.pushed
        above = _taken_off()
        bottom = [above.pop()] if default is not None and above[-1] is default else []
        for mode in (*bottom, self, *reversed(above)):
            _push_mode(mode)
        self.pushed = True
        return True

    def remove(self) -> None:
        """Remove it, on the thread that pushed it. While torch has popped it to handle a call it stays, until the next
        ``remove``.
        """
        if self.pushed and _on_stack(self):
            self.pushed = False
            for mode in reversed(_taken_off()):
                if mode is not self:
                    _push_mode(mode)


class _OfThread(threading.local):
    """The mode of each thread: modes of another thread cannot be removed."""

    def __init__(self) -> None:
        self.mode = _Mode()


class BufferWrites:
    """Follows copies from reduced memory.

    Args:
        take_in: Enters every completed sum in ``memory``.
        failed: Called with an error of the monitor.
    """

    def __init__(self, memory: ReducedMemory, take_in: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        self._memory = memory
        self._take_in = take_in
        self._failed = failed
        self._modes = _OfThread()
        self._entered: _Mode | None = None

    def __del__(self) -> None:
        if (mode := self._entered) is not None:
            mode.told = None
        if not _changes_modes(sys._getframe().f_back):
            self._modes.mode.remove()

    @property
    def entered(self) -> bool:
        return self._entered is not None

    def enter(self) -> None:
        """Observe calls of this thread from now on, until ``leave``, if a mode can be pushed."""
        self.leave()
        mode = self._modes.mode
        if mode.put():
            mode.told = _weakly(self)
            self._entered = mode

    def leave(self) -> None:
        """Stop observing. A mode of another thread becomes inactive, and is removed when that thread leaves."""
        if self._entered is not None:
            self._entered.told = None
            self._entered = None
        self._modes.mode.remove()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """``func`` has been called, and has returned ``result``."""
        try:
            self._take_in()
            self._look(getattr(func, "__name__", ""), args, kwargs, result)
        except Exception as error:
            self._failed(error)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        memory = self._memory
        if name == "copy_":
            memory.copied(args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()), None))
        elif name == "_foreach_copy_":
            for to, source in zip(args[0], args[1] if len(args) > 1 else kwargs["src"], strict=True):
                memory.copied(to, source)
        elif name == "__setitem__":
            self._set_item(*args)
        elif name in OVERWRITES:
            for x in _tensors(args[:1]):
                memory.forget(x)
        elif isinstance(out := kwargs.get("out"), Tensor):
            memory.forget(out)
        elif name in KEEPS:
            self._keep(args, kwargs, result)

    def _set_item(self, x: Tensor, index: Any, source: Any) -> None:
        if _is_one_view(index):
            self._memory.copied(x[index], source)
        else:
            self._memory.forget(x)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark results of a function in ``KEEPS``. Tensors of one element among its arguments are factors."""
        given = list(_tensors((*args, *kwargs.values())))
        groups = self._memory.common([x for x in given if x.numel() > 1] or given)
        for x in _tensors((result,)) if groups else ():
            if self._memory.groups_of(x) is None:
                self._memory.add(x, groups or ())


def _weakly(writes: BufferWrites) -> Told:
    """A callback with a weak reference: a mode on a stack must not keep a monitor alive."""
    held = weakref.ref(writes)

    def told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = held()
        if found is not None:
            found.follow(func, args, kwargs, result)

    return told


def _on_stack(mode: Any) -> bool:
    return any(one is mode for one in _get_current_function_mode_stack())


def _taken_off() -> list[Any]:
    """Pop all modes of this thread, from the top."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]


def _changes_modes(frame: FrameType | None) -> bool:
    """Whether garbage collection interrupts code that has counted the modes and is about to pop that many."""
    return frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", "torch.utils._device", __name__)


def _is_one_view(index: Any) -> bool:
    """Whether indexing with ``index`` gives a view of the tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)
