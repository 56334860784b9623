"""What becomes of a buffer that ranks have summed up, until the optimizer steps: gradients are copied from it.

Loops that reduce gradients in flat buffers write them back with a few functions of torch's. A mode sees these where Python
calls them; what a compiled region or an extension in C++ writes is not seen, and then it is not known that it was reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from monitor.pytorch.reduced_memory import ReducedMemory
from monitor.stats.torch_modes import unseen

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


class BufferWrites(TorchFunctionMode):
    """Follows what is written from reduced memory, and hands every call on as it came.

    Args:
        take_in: Has ``memory`` know of every sum that is there by now.
        failed: Called with an error of the monitor.
    """

    def __init__(self, memory: ReducedMemory, take_in: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        self._memory = memory
        self._take_in = take_in
        self._failed = failed
        self._entered = False

    @property
    def entered(self) -> bool:
        return self._entered

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # In code that is being compiled this is traced, and must have no effect.
        if not torch.compiler.is_compiling() and self._entered:
            with unseen():
                self._follow(func, args, kwargs or {}, result)
        return result

    def enter(self) -> None:
        """Look at each call of this thread from now on, until ``leave``.

        Below every mode of the user's, so that each of theirs is on top when its ``with`` ends; but for the one of a default
        device, which torch wants at the bottom.
        """
        self._entered = True
        above = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        if above and isinstance(above[-1], DeviceContext):
            _push_mode(above.pop())
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def leave(self) -> None:
        """Look no longer. In another thread than the one that entered, calls are handed on unseen from now on."""
        if not self._entered:
            return
        self._entered = False
        modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        for mode in reversed(modes):
            if mode is not self:
                _push_mode(mode)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
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
