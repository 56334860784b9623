"""What becomes of a buffer that ranks have summed up, until the optimizer steps: gradients are copied from it.

Loops that reduce gradients in flat buffers write them back with a few functions of torch's. A mode sees these where Python
calls them; what a compiled region or an extension in C++ writes is not seen, and then it is not known that it was reduced.
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
"""Functions whose result is, up to a factor and a dtype, what they are given."""

OVERWRITES: Final = frozenset({"fill_", "normal_", "uniform_", "zero_", "_foreach_zero_"})
"""Functions after which nothing is left of what a tensor held."""


Told = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]


class _Mode(TorchFunctionMode):
    """Hands every call of one thread on as it came, and calls ``told`` with it; with ``told`` None it has no effect.

    torch takes a mode off the stack while it handles a call, and puts it back. So that it is not on the stack does not say that
    it will not be there again: it is pushed once, and not again before it was found there and removed.
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
        """Put it below every mode of the user's, so that each of theirs is on top when its ``with`` ends; but for a default
        device, which torch wants at the bottom. Whether it is there: not while torch has taken the default device off.
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
        """On the thread that pushed it. Where torch has taken it off to handle a call, it stays until it is removed again."""
        if self.pushed and _on_stack(self):
            self.pushed = False
            for mode in reversed(_taken_off()):
                if mode is not self:
                    _push_mode(mode)


class _OfThread(threading.local):
    """Each thread has modes of its own, and those of another cannot be removed from it."""

    def __init__(self) -> None:
        self.mode = _Mode()


class BufferWrites:
    """Follows what is written from reduced memory.

    Args:
        take_in: Has ``memory`` know of every sum that is there by now.
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
        """Look at each call of this thread from now on, until ``leave``; not where no mode can be pushed."""
        self.leave()
        mode = self._modes.mode
        if mode.put():
            mode.told = _weakly(self)
            self._entered = mode

    def leave(self) -> None:
        """Look no longer. What another thread has entered is told nothing from now on, and goes when that thread leaves."""
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
        """A factor is a tensor of one element, if it is a tensor."""
        given = list(_tensors((*args, *kwargs.values())))
        groups = self._memory.common([x for x in given if x.numel() > 1] or given)
        for x in _tensors((result,)) if groups else ():
            if self._memory.groups_of(x) is None:
                self._memory.add(x, groups or ())


def _weakly(writes: BufferWrites) -> Told:
    """A mode on a stack keeps nothing of a monitor's alive."""
    held = weakref.ref(writes)

    def told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = held()
        if found is not None:
            found.follow(func, args, kwargs, result)

    return told


def _on_stack(mode: Any) -> bool:
    return any(one is mode for one in _get_current_function_mode_stack())


def _taken_off() -> list[Any]:
    """Every mode of this thread, from the top."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]


def _changes_modes(frame: FrameType | None) -> bool:
    """Whether what is collected now interrupts somebody who has counted the modes, and takes that many off."""
    return frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", "torch.utils._device", __name__)


def _is_one_view(index: Any) -> bool:
    """Whether what is indexed so is a view of the tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)
